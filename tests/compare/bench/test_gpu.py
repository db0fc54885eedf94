"""The clocks on a real GPU."""

import itertools

import pytest
import torch

from compare.agreement.metrics import relative_rms_error
from compare.agreement.oracle import oracle
from compare.bench import ceilings, fusion
from compare.bench.jax_profiler import profile
from compare.bench.kernels import all_implementations, bench_kernels
from compare.bench.rotation import ROTATION_WORKLOADS, bench_rotation
from compare.bench.timing import GraphTimer, input_sets
from compare.bench.tune import TWINS, tune
from compare.bench.tuning_cases import tuning_cases
from compare.common.environment import has_gpu
from compare.implementations import kernels as implementations
from compare.implementations.kernels import KernelImplementation
from compare.workloads.arrays import jax_arguments, torch_arguments
from compare.workloads.kernels import DTYPES, KERNEL_WORKLOADS, segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU"),
]

WORKLOAD = KERNEL_WORKLOADS["windows-448"]


def test_input_sets_pass_the_cache():
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    assert input_sets(1 << 20) * (1 << 20) >= 4 * cache
    assert input_sets(1 << 40) >= 3


def test_ceilings_are_plausible():
    measured = ceilings.measure()
    assert 1e11 < measured.copy_bytes_per_s < 2e13
    assert 1e13 < measured.matrix_flops_per_s < 5e15


def test_inputs_rotated_in_place_are_put_back_before_outputs_are_judged():
    (rotating,) = [i for i in all_implementations() if i.name == "in-place rope + FA2 varlen"]
    inputs = WORKLOAD.inputs()
    with torch.inference_mode():
        timer = GraphTimer(rotating.prepare(WORKLOAD), torch_arguments(inputs), 3)
        timer.time()
        exact = oracle(inputs)
        assert all(relative_rms_error(output, exact) < 4e-3 for output in timer.outputs())


def test_an_output_that_is_not_written_is_found():
    def forgetful(qkv, cos, sin, cu_seqlens):
        out = torch.empty_like(qkv[:, 0])
        out[1:] = 0
        return out

    measured = [KernelImplementation("forgetful", "torch", lambda _: forgetful)]
    [[record]] = bench_kernels([WORKLOAD], ceilings.measure(), measured)
    assert record.median_us is None
    assert record.relative_rms_error != record.relative_rms_error


def test_both_kernels_are_timed_and_no_faster_than_the_floor():
    ours = [implementations.triton(), implementations.pallas()]
    [records] = bench_kernels([WORKLOAD], ceilings.measure(), ours)
    for record in records:
        assert record.passed, record
        assert record.median_us > 0.9 * record.floor_us
        assert record.kernels_per_call == 1


@pytest.mark.parametrize(
    ("name", "kernels", "warp_specialized"),
    [
        ("windows-448", ["window_kernel"], True),
        ("frames-448", ["rotate_kernel", "stream_kernel"], False),
        ("frames-448", ["rotate_kernel", "hopper_stream_kernel"], True),
    ],
)
def test_the_pallas_call_adds_no_kernel_of_its_own(name, kernels, warp_specialized):
    from pallas_kernels.launching import choose
    from pallas_kernels.launching.table import Table

    workload = KERNEL_WORKLOADS[name]
    shape = workload.head_dim, int(workload.lengths.max()), workload.tokens, workload.heads
    taken = choose.is_warp_specialized(DTYPES[workload.dtype], *shape)
    if "hopper_stream_kernel" in kernels and not taken:
        pytest.skip("needs a GPU of compute capability 9.0 and JAX 0.11.2 or 0.12")
    call, arguments = implementations.pallas().prepare(workload), jax_arguments(workload.inputs())

    def run():
        with choose.launching_by(Table.read(choose.TABLE_FILE), warp_specialized):
            for _ in range(4):
                call(*arguments).block_until_ready()

    run()
    profiled = profile(run, 4)
    assert profiled.kernels_per_call == len(kernels), profiled.by_kernel()
    for kernel in kernels:
        assert len(profiled.of_kernel(kernel).events) == 4, profiled.by_kernel()


def test_rotations_are_timed():
    [records] = bench_rotation([ROTATION_WORKLOADS["rotate-448"]], ceilings.measure())
    for record in records:
        assert record.passed, record
        assert record.kernels_per_call == (1 if record.ours else None)
        assert record.share_of_floor > 0.1


def test_every_way_of_fusing_is_timed():
    cells = fusion.measure_fusion(ceilings.measure(), [segments(64), segments(256)])
    records = list(itertools.chain.from_iterable(cells))
    assert len(records) == 2 * 3 * 2
    assert all(record.passed and record.median_us for record in records), records


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("kernel", ["window", "stream", "rotate"])
def test_candidates_are_timed(name, kernel):
    [choice] = tune(TWINS[name], tuning_cases((kernel,))[2:3])
    assert choice.new_us <= choice.old_us
    assert sum(record.median_us is not None for record in choice.records) > 1, choice.records
    # A launch counts: were the candidates all launched alike, so would their times be.
    times = [record.median_us for record in choice.records if record.median_us]
    assert max(times) > 1.02 * min(times)
