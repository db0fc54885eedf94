#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the contracts of the attention's kernels, of its gradients' and of
# the MLP's, compiled on this machine's GPU: accesses outside of allocations (memcheck), races on
# shared memory (racecheck), reads of memory that nobody wrote (initcheck). Fails if one finds
# anything. Of the warp-specialized kernels, on a Hopper GPU, the tools see what threads access; the
# copy engine's accesses, which its descriptors bound, and the tensor cores' are no thread's.
#
#   tests/sanitize.sh [TOOL...]       PYTHON and COMPUTE_SANITIZER name the programs; with JOBS=8 as
#                                     many suites run at once, each on a core; with
#                                     SUITES=test_gradients those alone whose files match it
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
  echo "compute-sanitizer is not here (it comes with the CUDA toolkit): set COMPUTE_SANITIZER" >&2
  exit 2
fi

# Each tensor an allocation of its own: in a pool an access could land in a neighbour unnoticed.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 XLA_PYTHON_CLIENT_ALLOCATOR=platform
# XLA's trials of its own kernels compare results that nobody wrote.
export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"
attention='(TestKernel or TestContract or TestLengths) and (any_cu_seqlens or every_fusion'
attention+=' or segments_of_every_kind or test_every_head_dim or every_embedding'
attention+=' or (many_lengths and 80))'
kernels='window|stream|wide|hopper_stream|rotate|rotate_back|gated|gated_product|norm_scale'
kernels+='|window_backward|stream_backward_q|stream_backward_kv|hopper_backward_q|hopper_backward_kv'
gradients='TestKernel and as_exact'
bounds='TestKernel and (any_cu_seqlens or lengths_around or ends_of_their_dtype)'
specialized='(TestContract or TestGradients) and (as_exact or any_segments or (many_lengths and 80))'
gated='TestGated and (oracles_rounded_once or one_kernel_is_the_oracles)'

run() {  # a suite by a tool; prints when it is done, as several may run at once
  local tool=$1 selected=${2%: *} files options log status=0
  read -ra files <<<"${2##*: }"
  options=(--tool "$tool" --error-exitcode 86 --target-processes application-only)
  case $tool in
    # Frameworks ask the driver for what older ones lack, which is no fault.
    memcheck) options+=(--report-api-errors no --padding 4096) ;;
  esac
  if [[ $tool == initcheck ]]; then
    # To it what the copy engine writes was never written: results of Mosaic's kernels.
    selected="($selected) and not (pallas_kernels and (test_hopper_stream or test_hopper_backward))"
    selected+=" and not (flax_models and test_gated_product)"
  else  # which has to see what other kernels write
    options+=(--kernel-regex "kns=($kernels)_kernel")
  fi
  log=$("$sanitizer" "${options[@]}" "$python" -m pytest -q -p no:cacheprovider -o timeout=0 \
    "${files[@]}" -k "$selected" 2>&1) || status=$?
  # pytest's 5: of that suite initcheck has nothing left, which the other tools run.
  [[ $tool == initcheck && $status == 5 ]] && status=0
  printf '== %s: %s\n%s\n' "$tool" "${files[*]}" "$log"
  return "$status"
}

suites=(
  "$attention: tests/triton_kernels/test_contract.py tests/triton_kernels/kernels/test_hopper_stream.py"
  "$attention: tests/pallas_kernels/test_contract.py tests/pallas_kernels/kernels/test_hopper_stream.py"
  "$gradients: tests/triton_kernels/test_gradients.py"
  "$gradients: tests/pallas_kernels/test_gradients.py"
  "$bounds: tests/triton_kernels/test_gradients.py"
  "$specialized: tests/triton_kernels/kernels/test_hopper_backward.py"
  "$bounds: tests/pallas_kernels/test_gradients.py"
  "$gated: tests/compare/torch_tower/test_gated.py tests/compare/torch_tower/test_gated_product.py"
  "$gated: tests/flax_models/test_gated.py tests/flax_models/test_gated_product.py"
  "$specialized: tests/pallas_kernels/kernels/test_hopper_backward.py"
)
[[ $# -gt 0 ]] || set -- memcheck racecheck initcheck
pids=()
for tool in "$@"; do
  for suite in "${suites[@]}"; do
    [[ ${suite##*: } =~ ${SUITES:-.} ]] || continue
    while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n || :; done
    run "$tool" "$suite" &
    pids+=($!)
  done
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
exit "$failed"
