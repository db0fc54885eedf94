"""What the benchmark does with times and errors, on stand-ins for the GPU's clocks."""

import itertools
from dataclasses import replace

import pytest
import torch

from compare.agreement.oracle import oracle, oracle_gradient, unfused
from compare.bench import kernel_timing, kernels
from compare.bench.ceilings import Ceilings
from compare.bench.kernels import bench_kernels
from compare.common.errors import UnavailableError
from compare.implementations.kernels import (
    KernelImplementation,
    pallas,
    pallas_by_xla,
    triton,
    with_gradient,
)
from compare.workloads.kernels import KernelWorkload
from tests.compare.clocks import stand_in_clocks

TINY = KernelWorkload("windows-tiny", "windows", ((1, 8, 10),), heads=1)
INPUTS = TINY.inputs()
CEILINGS = Ceilings(4e9, 4e9, 8e14)


@pytest.fixture(autouse=True)
def clocks(monkeypatch):
    stand_in_clocks(monkeypatch)


def bench(*implementations):
    [records] = bench_kernels([TINY], CEILINGS, implementations)
    return records


def right(name="triton"):
    return KernelImplementation(name, "torch", lambda _: lambda *_: unfused(INPUTS), ours=True)


def test_a_right_kernel_gets_its_time_beside_its_error():
    (record,) = bench(right())
    assert record.passed
    assert record.median_us == 10
    assert record.spread_us == 0.5
    assert record.profiler_us == 9
    assert record.kernels_per_call == 1
    assert record.details == {"host_us": 20, "host_additions": 1}
    assert record.floor_us == pytest.approx(1e6 * TINY.bytes_moved / 4e9)
    assert record.share_of_floor == pytest.approx(record.floor_us / 10)
    assert 1e-3 < record.relative_rms_error < 4e-3


def test_jax_is_timed_by_the_profiler():
    import jax.numpy as jnp

    out = jnp.asarray(oracle(INPUTS).float().cpu().numpy())
    (record,) = bench(KernelImplementation("pallas", "jax", lambda _: lambda *_: out))
    assert record.median_us == record.profiler_us == 9


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 90), (0.02, 5), (0.5, 3)])
def test_as_long_is_profiled_as_a_graph_is_replayed(monkeypatch, seconds, rounds):
    """And 60 calls at least."""
    clock, made = itertools.count(), []
    monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: seconds * next(clock))
    assert kernel_timing.FULL.profiled_rounds(made.append, calls=20) == rounds
    assert made == [1]


def test_jax_is_judged_without_what_an_earlier_call_has_left(monkeypatch):
    """A result that is right because its memory held the last one shows once that is poisoned."""
    import jax.numpy as jnp

    memory = [jnp.asarray(oracle(INPUTS).float().cpu().numpy())]

    def poison(arguments, results):
        assert results == 2
        memory[0] = memory[0].at[0, 0, 0].set(jnp.nan)

    monkeypatch.setattr(kernel_timing, "poison", poison)
    (record,) = bench(KernelImplementation("pallas", "jax", lambda _: lambda *_: memory[0]))
    assert (record.median_us, record.passed) == (None, False)


TRAINED = replace(TINY, gradients=True)


@pytest.mark.parametrize("twin", [triton, pallas])
def test_forward_and_backward_are_timed_together(twin):
    [[record]] = bench_kernels([TRAINED], CEILINGS, [with_gradient(twin())])
    assert (record.passed, record.median_us is None) == (True, False)
    assert record.error_limit < 0.02
    # A stand-in's in PyTorch. In JAX both results at least, and no more than some copies of them.
    results = 4 * 2 * TRAINED.tokens * TRAINED.heads * TRAINED.head_dim / 2**20
    least, most = (30, 30) if record.framework == "torch" else (results, 40 * results)
    assert least <= record.peak_memory_mib <= most
    assert record.floor_us == pytest.approx(1e6 * TRAINED.bytes_moved / 4e9)
    values = TRAINED.tokens * TRAINED.heads * TRAINED.head_dim
    assert TRAINED.bytes_moved == 11 * 2 * values + 2 * 4 * TRAINED.tokens * TRAINED.head_dim
    assert TRAINED.matrix_flops == 3.5 * TINY.matrix_flops


@pytest.mark.parametrize("part", range(3))
def test_a_gradient_that_is_wrong_in_one_part_has_no_time(part):
    exact = oracle_gradient(TRAINED.inputs())
    exact[:, part] *= 1.02
    kernel = KernelImplementation("triton", "torch", lambda _: lambda *_: exact, ours=True)
    [[record]] = bench_kernels([TRAINED], CEILINGS, [kernel])
    assert (record.passed, record.median_us) == (False, None)
    assert record.relative_rms_error == pytest.approx(0.02)


def test_xla_compiles_the_row_that_says_so(monkeypatch):
    import jax

    from pallas_kernels.launching import compile as compile_module
    from tests.pallas_kernels.launching.test_lowering import cuda_device

    monkeypatch.setattr("compare.implementations.kernels.require_jax_gpu", lambda: None)
    monkeypatch.setattr(compile_module, "_default_compiler", lambda: "triton")
    call = pallas_by_xla().prepare(TINY)
    arrays = (INPUTS.qkv, INPUTS.cos, INPUTS.sin, INPUTS.cu_seqlens)
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with cuda_device():
        module = call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("__gpu$xla.gpu.triton") == 1
    assert "xla.gpu.ptx" not in module


def test_where_xla_compiles_all_its_row_is_left_out(monkeypatch):
    from pallas_kernels.launching import compile as compile_module

    monkeypatch.setattr(compile_module, "_default_compiler", lambda: "xla")
    (record,) = bench(pallas_by_xla())
    assert (record.median_us, record.note) == (None, "XLA compiles every Pallas kernel here")


@pytest.mark.parametrize("value", [float("nan"), 100.0])
@pytest.mark.parametrize("wrong", [1, 2])
def test_one_wrong_output_of_many_costs_the_time(capsys, wrong, value):
    calls = []

    def sometimes_wrong(*_):
        calls.append(None)
        out = unfused(INPUTS)
        if len(calls) == wrong:
            out[0, 0, 0] = value
        return out

    (record,) = bench(KernelImplementation("triton", "torch", lambda _: sometimes_wrong))
    assert record.median_us is None
    assert record.share_of_floor is None
    assert record.passed is False
    assert "not timed: the error breaks its rule" in capsys.readouterr().out


def test_what_fails_is_reported_and_the_run_goes_on():
    def unavailable(_):
        raise UnavailableError("needs another library")

    def missing(_):
        raise ImportError("no module named x")

    def fails(_):
        return lambda *_: torch.ones(2) @ torch.ones(3)

    records = bench(
        *(KernelImplementation(f.__name__, "torch", f) for f in (unavailable, missing, fails)),
        right(),
    )
    assert [record.median_us for record in records] == [None, None, None, 10]
    assert records[0].note == "needs another library"
    assert "no module named x" in records[1].note
    assert records[2].note.startswith("RuntimeError")


@pytest.mark.parametrize("error", [RuntimeError, UnavailableError, ImportError])
def test_ours_that_fails_is_wrong_unless_it_cannot_run_here(error):
    def fails(_):
        raise error("an illegal memory access")

    ours = KernelImplementation("triton", "torch", fails, ours=True)
    records = bench(ours, replace(ours, name="peer", ours=False))
    wrong = False if error is RuntimeError else None
    assert [record.passed for record in records] == [wrong, None]


def test_ours_is_wrong_where_nothing_could_be_judged(monkeypatch):
    def broken(*_):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(kernel_timing.Expected, "of", broken)
    records = bench(right(), replace(right("peer"), ours=False))
    assert [record.passed for record in records] == [False, None]


def test_a_workload_may_name_its_peers():
    fast, slow = (replace(right(name), ours=False) for name in ("fast", "slow"))
    named = replace(TINY, peers=("fast",))
    measured = bench_kernels([named, TINY], CEILINGS, [right(), fast, slow])
    assert [[record.implementation for record in records] for records in measured] == [
        ["triton", "fast"],
        ["triton", "fast", "slow"],
    ]


def test_a_peer_that_is_not_measured_has_no_reason_either(monkeypatch):
    def broken(*_):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(kernel_timing.Expected, "of", broken)
    fast, slow = (replace(right(name), ours=False) for name in ("fast", "slow"))
    named = replace(TINY, peers=("fast",))
    [records] = bench_kernels([named], CEILINGS, [right(), fast, slow])
    assert [record.implementation for record in records] == ["triton", "fast"]
    assert {record.note for record in records} == {"RuntimeError: the GPU is gone"}


def test_ours_and_every_peer_are_measured():
    names = [implementation.name for implementation in kernels.all_implementations()]
    assert names[:2] == ["triton", "pallas"]
    assert "torch.compile rope + FA2 varlen" in names
    assert "in-place rope + FA3 varlen" in names
    assert "XLA rope + cuDNN (jax.nn)" in names
