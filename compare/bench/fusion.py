"""How much of the rotation to fuse: every way, over segment lengths and widths of a head.

The grid is segment length x head_dim at about 9,216 tokens in all, in both frameworks, and partial
rotations at some of the lengths. `fuse="auto"` is not timed by itself: its time is that of the way
which it takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compare.bench.ceilings import Ceilings
from compare.bench.fusion_table import best_table, cells_of, times_table, verdict_line
from compare.bench.kernel_timing import QUICK, measure_all
from compare.common.console import print_missing, print_table, progress, say
from compare.common.environment import has_gpu
from compare.common.result_files import Record
from compare.implementations import kernels
from compare.implementations.kernels import FUSE, KernelImplementation
from compare.implementations.warm_up import draw_inputs, warm_up
from compare.workloads.kernels import DTYPES, SEGMENT_FRAMES, KernelWorkload, segments, variant

# For each way of fusing, the twins.
Ways = Mapping[str, Sequence[KernelImplementation]]

HEAD_DIMS = (64, 72, 80, 128)
# Where half and a quarter of a head rotate, down to a multiple of 4 dims: two axes, in pairs.
_PARTIAL_LENGTHS = (64, 256, 1024, 9216)


def grid() -> list[KernelWorkload]:
    """Every cell: all dims rotated, then half and a quarter of them."""
    whole = [
        variant(segments(length), head_dim=head_dim)
        for head_dim in HEAD_DIMS
        for length in SEGMENT_FRAMES
    ]
    partial = [
        variant(segments(length), head_dim=head_dim, rotary_dim=head_dim // part // 4 * 4)
        for head_dim in HEAD_DIMS
        for part in (2, 4)
        for length in _PARTIAL_LENGTHS
    ]
    return [*whole, *partial]


def our_ways() -> Ways:
    """Both kernels, by the way of fusing."""
    return {fuse: [kernels.triton(fuse), kernels.pallas(fuse)] for fuse in FUSE}


def measure_fusion(
    ceilings: Ceilings,
    workloads: Sequence[KernelWorkload] | None = None,
    ways: Ways | None = None,
) -> Iterator[list[Record]]:
    """Time every way of fusing on every workload; print the tables.

    The ceilings are of the same run, the workloads are the cells, grid() by default. Yields for
    each cell a record for each way in each framework.
    """
    workloads = grid() if workloads is None else workloads
    ways = our_ways() if ways is None else ways
    each = [(fuse, twin) for fuse, twins in ways.items() for twin in twins]
    inputs = draw_inputs(workloads)
    compiled = iter(warm_up([(i, w) for w in workloads for _, i in each], "compiling"))
    records: list[Record] = []
    for workload, drawn in zip(progress(workloads, "fusion"), inputs, strict=True):
        measured = measure_all([next(compiled) for _ in each], workload, drawn, QUICK)
        floor_us = ceilings.kernel_floor_us(workload.bytes_moved, workload.matrix_flops)
        of_workload = [
            replace(
                record.beside_floor(floor_us),
                fuse=fuse,
                details={
                    "segment_length": workload.longest,
                    "rotary_dim": workload.rotated_dims,
                    "auto": default_fuse(implementation, workload),
                },
            )
            for (fuse, implementation), record in zip(each, measured, strict=True)
        ]
        records += of_workload
        yield of_workload
    _print(records)


def default_fuse(implementation: KernelImplementation, workload: KernelWorkload) -> str | None:
    """What fuse="auto" means for a workload, asked of the implementation's package.

    None where that is not installed.
    """
    shape = workload.head_dim, workload.rotated_dims, workload.longest
    size = workload.tokens, workload.heads
    try:
        if implementation.framework == "torch":
            import torch

            from triton_kernels.launching.choose import auto_fuse, launch_source

            source = launch_source(0 if has_gpu() else None)
            return auto_fuse(getattr(torch, workload.dtype), *shape, *size, source)
        from pallas_kernels.launching.choose import auto_fuse

        return auto_fuse(DTYPES[workload.dtype], *shape, *size)
    except ImportError:
        return None


def _print(records: Sequence[Record]) -> None:
    cells = cells_of([record.to_json() for record in records])
    print_table("Times of each way, by segment length", *times_table(cells))
    print_table(
        'The fastest way, and fuse="auto" over it where it takes another', *best_table(cells)
    )
    print_missing(records, lambda r: f"{r.implementation} {r.fuse} on {r.workload}")
    say(verdict_line(cells))
