"""How fast are the kernels and their strongest peers, on the named workloads of one GPU?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from compare import ceilings as ceilings_module
from compare import implementations
from compare.arrays import from_jax, jax_arguments, poison, torch_arguments
from compare.ceilings import Ceilings
from compare.console import number, print_missing, print_table, progress, say
from compare.errors import UnavailableError, one_line
from compare.implementations import KernelImplementation
from compare.metrics import Verdict
from compare.profiling import Profile, profile
from compare.results import Record
from compare.timing import GraphTimer, Timing, input_sets
from compare.workloads import KernelWorkload
from compare.yardstick import Yardstick

_MIN_PROFILED_CALLS = 60


def all_implementations() -> list[KernelImplementation]:
    """Ours and every peer; those that cannot run here are reported with the reason."""
    from compare.peers_torch import torch_peers

    found = [implementations.triton(), implementations.pallas(), *torch_peers()]
    try:
        from compare.peers_jax import jax_peers
    except ImportError as error:
        say(f"No JAX peers: {one_line(error)}")
        return found
    return [*found, *jax_peers()]


def bench_kernels(
    workloads: Sequence[KernelWorkload],
    measured: Sequence[KernelImplementation] | None = None,
) -> tuple[list[Record], Ceilings]:
    """Measure the GPU's ceilings and every implementation on every workload; print the tables.

    Args:
        workloads: what to measure on.
        measured: default all_implementations().

    Returns:
        A record for each implementation of each workload, and the ceilings.
    """
    ceilings = ceilings_module.measure()
    say(
        f"Ceilings: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s "
        f"(1 GiB: {ceilings.large_copy_bytes_per_s / 1e12:.2f}), "
        f"bf16 products {ceilings.matrix_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    measured = all_implementations() if measured is None else measured
    records: list[Record] = []
    for workload in workloads:
        floor_us = ceilings.kernel_floor_us(workload.bytes_moved, workload.matrix_flops)
        try:
            of_workload = _bench(workload, measured)
        except Exception as error:  # after a kernel that broke the GPU: keep what is measured
            of_workload = [replace(_blank(i, workload), note=one_line(error)) for i in measured]
        of_workload = [_with_floor(record, floor_us) for record in of_workload]
        _print(workload, floor_us, of_workload)
        records += of_workload
    return records, ceilings


def _bench(workload: KernelWorkload, measured: Sequence[KernelImplementation]) -> list[Record]:
    yardstick = Yardstick.of(workload)
    return [
        _measure(implementation, yardstick) for implementation in progress(measured, workload.name)
    ]


def _blank(implementation: KernelImplementation, workload: KernelWorkload) -> Record:
    return Record(
        workload.name,
        implementation.name,
        framework=implementation.framework,
        dtype=workload.dtype,
        head_dim=workload.head_dim,
        heads=workload.heads,
    )


def _measure(implementation: KernelImplementation, yardstick: Yardstick) -> Record:
    blank = _blank(implementation, yardstick.workload)
    time = _time_torch if implementation.framework == "torch" else _time_jax
    try:
        return time(implementation, yardstick, blank)
    except ImportError as error:
        return replace(blank, note=f"not installed: {one_line(error)}")
    except Exception as error:  # a peer that fails is reported; the run goes on
        return replace(blank, note=one_line(error))
    finally:
        torch.cuda.empty_cache()


def _time_torch(
    implementation: KernelImplementation, yardstick: Yardstick, blank: Record
) -> Record:
    call = implementation.prepare(yardstick.workload)
    inputs = yardstick.inputs
    with torch.inference_mode():
        timer = GraphTimer(call, torch_arguments(inputs), input_sets(inputs.qkv.nbytes))
        timing = timer.time()
        verdict = yardstick.judge(timer.outputs())
        profiled = _profile_quietly(timer) if implementation.ours else None
    return _timed(blank, verdict, timing, profiled)


def _time_jax(implementation: KernelImplementation, yardstick: Yardstick, blank: Record) -> Record:
    import jax

    call = implementation.prepare(yardstick.workload)
    inputs = yardstick.inputs
    sets = [jax_arguments(inputs) for _ in range(input_sets(inputs.qkv.nbytes))]
    outputs: list[Any] = []

    def run(rounds: int) -> None:
        for _ in range(rounds):
            outputs[:] = [call(*arguments) for arguments in sets]
        jax.block_until_ready(outputs)

    run(1)
    rounds = _rounds(len(sets))
    profiled = profile(lambda: run(rounds), rounds * len(sets))
    if profiled is None:
        raise UnavailableError("JAX's profiler recorded nothing on the GPU")
    verdict = yardstick.judge([from_jax(output) for output in outputs])
    if verdict.passed:  # so far: once more, without what earlier calls wrote
        outputs.clear()
        poison(sets[0], len(sets))
        run(1)
        verdict = yardstick.judge([from_jax(output) for output in outputs])
    return _timed(blank, verdict, profiled.timing(), profiled)


def _rounds(sets: int) -> int:
    return -(-_MIN_PROFILED_CALLS // sets)


def _profile_quietly(timer: GraphTimer) -> Profile | None:
    """Profile PyTorch's calls with JAX's profiler: a second opinion, not worth failing for."""
    rounds = _rounds(timer.sets)
    try:
        return profile(lambda: timer.run_eagerly(rounds), rounds * timer.sets)
    except Exception:  # no JAX, no CUPTI, another profiler attached: then there is none
        return None


def _timed(blank: Record, verdict: Verdict, timing: Timing, profiled: Profile | None) -> Record:
    """The record with its timing, or without it where the error breaks the rule."""
    record = replace(
        blank,
        relative_rms_error=verdict.error,
        error_limit=verdict.limit,
        passed=verdict.passed,
    )
    if not verdict.passed:
        return replace(record, note="not timed: the error breaks its rule")
    return replace(
        record,
        median_us=timing.median_us,
        spread_us=timing.spread_us,
        profiler_us=profiled.timing().median_us if profiled else None,
        kernels_per_call=profiled.kernels_per_call if profiled else None,
    )


def _with_floor(record: Record, floor_us: float) -> Record:
    share = floor_us / record.median_us if record.median_us else None
    return replace(record, floor_us=floor_us, share_of_floor=share)


def _print(workload: KernelWorkload, floor_us: float, records: Sequence[Record]) -> None:
    timed = sorted((r for r in records if r.median_us is not None), key=lambda r: r.median_us or 0)
    print_table(
        f"{workload.name}: {workload.tokens} tokens, {len(workload.lengths)} segments, "
        f"{workload.heads} heads x {workload.head_dim}, {workload.dtype}, "
        f"floor {number(floor_us)} us",
        ("implementation", "us", "spread", "of floor", "profiler us", "kernels", "rel. RMS"),
        [
            [
                record.implementation,
                number(record.median_us),
                number(record.spread_us, 2),
                "" if record.share_of_floor is None else f"{record.share_of_floor:.0%}",
                number(record.profiler_us),
                number(record.kernels_per_call),
                number(record.relative_rms_error),
            ]
            for record in timed
        ],
    )
    print_missing((r.implementation, r.note or "") for r in records if r.median_us is None)
