#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the kernels' contract, compiled on this machine's GPU: accesses
# outside of allocations (memcheck), races on shared memory (racecheck), reads of memory that nobody
# wrote (initcheck). Fails on the first tool that finds anything.
#
#   tests/sanitize.sh [TOOL...]       PYTHON and COMPUTE_SANITIZER name the programs
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
chosen='TestKernel and (any_cu_seqlens or every_fusion or segments_of_every_kind or test_every_head_dim)'

[[ $# -gt 0 ]] || set -- memcheck racecheck initcheck
for tool in "$@"; do
  options=(--tool "$tool" --error-exitcode 86 --target-processes application-only)
  case $tool in
    # Frameworks ask the driver for what older ones lack, which is no fault.
    memcheck) options+=(--report-api-errors no --padding 4096) ;;
  esac
  # What other kernels write has to be seen for initcheck to know that it was written.
  [[ $tool == initcheck ]] || options+=(--kernel-regex 'kns=(window|stream|rotate)_kernel')
  for package in triton_kernels pallas_kernels; do
    echo "== $tool: $package"
    "$sanitizer" "${options[@]}" "$python" -m pytest -q -p no:cacheprovider -o timeout=0 \
      "tests/$package/test_contract.py" -k "$chosen"
  done
done
