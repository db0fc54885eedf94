"""How fast are the kernels and their strongest peers, on the named workloads of one GPU?"""

from collections.abc import Iterator, Sequence

from compare.bench.ceilings import Ceilings
from compare.bench.kernel_timing import measure_all
from compare.common.console import number, print_missing, print_table, say
from compare.common.errors import one_line
from compare.common.result_files import Record
from compare.implementations import kernels
from compare.implementations.kernels import KernelImplementation
from compare.implementations.warm_up import warm_up
from compare.workloads.kernels import KernelWorkload


def all_implementations() -> list[KernelImplementation]:
    """Ours and every peer; those that cannot run here are reported with the reason."""
    from compare.implementations.peers_torch import torch_peers

    ours = [kernels.triton(), kernels.pallas(), kernels.pallas_by_xla()]
    found = [*ours, *torch_peers()]
    try:
        from compare.implementations.peers_jax import jax_peers
    except ImportError as error:
        say(f"No JAX peers: {one_line(error)}")
        return found
    return [*found, *jax_peers()]


def bench_kernels(
    workloads: Sequence[KernelWorkload],
    ceilings: Ceilings,
    measured: Sequence[KernelImplementation] | None = None,
) -> Iterator[list[Record]]:
    """Measure every implementation on every workload; print the tables.

    The ceilings are of the same run, `measured` is all_implementations() by default. Yields for
    each workload a record for each of them.
    """
    measured = all_implementations() if measured is None else measured
    # Peers are left to compile by themselves: some choose their kernels by timing them.
    ours = [(i, workload) for workload in workloads for i in measured if i.ours]
    compiled = iter(warm_up(ours, "compiling"))
    for workload in workloads:
        floor_us = ceilings.kernel_floor_us(workload.bytes_moved, workload.matrix_flops)
        peers = workload.peers
        chosen = [
            next(compiled) if i.ours else i
            for i in measured
            if i.ours or peers is None or i.name in peers
        ]
        measured_here = measure_all(chosen, workload, description=workload.name)
        of_workload = [record.beside_floor(floor_us) for record in measured_here]
        _print(workload, floor_us, of_workload)
        yield of_workload


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
    print_missing(records)
