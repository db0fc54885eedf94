"""What is fusing an embedding worth: rotated and added positions, over narrow and very wide heads.

Ours is timed in every way of fusing, of sinusoidal embeddings with angles from tables and from
positions, beside what PyTorch and XLA make of the separate steps. `fuse="auto"` is timed by itself,
and by the profiler as well, which times both twins.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from compare.agreement.expected import Expected
from compare.bench.ceilings import Ceilings
from compare.bench.kernel_timing import Effort, blank_record, measure
from compare.common.console import number, print_missing, print_table, progress, say
from compare.common.errors import one_line
from compare.common.result_files import Record
from compare.implementations import kernels
from compare.implementations.kernels import AUTO, FUSE, INSIDE, TABLES, KernelImplementation
from compare.implementations.warm_up import caches_filled, draw_inputs, warm_up
from compare.workloads.kernels import KernelInputs, KernelWorkload

# Of fp32 a product is at least three in bf16. Its error takes six of them, or three in tf32: these
# are as slow, so that no kernel comes nearer than half to a floor of products.
_PRODUCTS = {"float32": 3}
_EFFORT = Effort(samples=9, jax_sets=3, profiled_calls=20, thorough=False)
# Bytes of qkv above which fewer sets of them do, as a call takes long: more would fill the GPU.
_LARGE, _SETS_IF_LARGE = 1 << 27, 8
_TOGETHER = 6  # workloads whose kernels are compiled at once, before any of them is timed


@dataclass(frozen=True)
class Way:
    """An implementation, and how it embeds.

    Attributes:
        fuse: as the public functions have it; None of a peer, which embeds beforehand.
        angles: where they come from, TABLES or INSIDE: computed from positions.
    """

    implementation: KernelImplementation
    fuse: str | None = None
    angles: str = TABLES


Ways = Callable[[KernelWorkload], Sequence[Way]]


def our_ways(workload: KernelWorkload) -> list[Way]:
    """Both twins in every way, with every source of angles that the embedding has.

    Where a workload names its peers, angles are computed inside only where all is fused.
    """
    inside = () if workload.embedding == "rope" else FUSE if workload.peers is None else ("qk",)
    ways = {TABLES: (*FUSE, AUTO), INSIDE: inside and (*inside, AUTO)}
    return [
        Way(twin(fuse, tables=angles == TABLES), fuse, angles)
        for twin in (kernels.triton, kernels.pallas)
        for angles, fuses in ways.items()
        for fuse in fuses
    ]


def peers(workload: KernelWorkload) -> list[Way]:
    """What others make of the separate steps: those that a workload names, or all.

    Those that cannot run say so when they are prepared.
    """
    from compare.implementations.peers_sdpa import sdpa_peers

    found = sdpa_peers(workload.embedding)
    try:
        from compare.implementations.peers_jax import jax_peers
    except ImportError as error:
        say(f"No JAX peers: {one_line(error)}")
    else:
        found += jax_peers(workload.embedding)
    named = workload.peers
    return [Way(peer) for peer in found if named is None or peer.name in named]


def _all_ways(workload: KernelWorkload) -> list[Way]:
    return [*our_ways(workload), *peers(workload)]


def all_implementations(workload: KernelWorkload) -> list[KernelImplementation]:
    """What has to be compiled before a workload can be timed: ours in every way, and the peers."""
    return [way.implementation for way in _all_ways(workload)]


def bench_embeddings(
    workloads: Sequence[KernelWorkload], ceilings: Ceilings, ways: Ways | None = None
) -> Iterator[list[Record]]:
    """Time every way on every workload; print the tables.

    Args:
        workloads: of EMBEDDING_WORKLOADS, or like them.
        ceilings: of the same run.
        ways: of a workload; default ours and the peers, all compiled beforehand in processes.

    Yields:
        For each workload a record for each way.
    """
    if ways is None:
        with caches_filled(workloads, all_implementations):
            yield from _bench(workloads, ceilings, _all_ways)
    else:
        yield from _bench(workloads, ceilings, ways)


def _bench(
    workloads: Sequence[KernelWorkload], ceilings: Ceilings, ways: Ways
) -> Iterator[list[Record]]:
    for workload, inputs, compiled in _prepared(workloads, ways):
        of_workload = [
            _described(record, way, workload, ceilings)
            for way, record in zip(compiled, _measure(compiled, workload, inputs), strict=True)
        ]
        _print(workload, of_workload)
        yield of_workload


def _prepared(
    workloads: Sequence[KernelWorkload], ways: Ways
) -> Iterator[tuple[KernelWorkload, KernelInputs, list[Way]]]:
    """Each workload with its inputs and ways, ours compiled: some workloads' at once."""
    for first in range(0, len(workloads), _TOGETHER):
        together = workloads[first : first + _TOGETHER]
        inputs = draw_inputs(together)
        of_each = [list(ways(workload)) for workload in together]
        # Peers are left to compile by themselves, as in the kernels' part.
        jobs = [
            (way.implementation, workload)
            for workload, found in zip(together, of_each, strict=True)
            for way in found
            if way.implementation.ours
        ]
        ready = iter(warm_up(jobs, "compiling"))
        for workload, drawn, found in zip(together, inputs, of_each, strict=True):
            yield (
                workload,
                drawn,
                [
                    replace(way, implementation=next(ready)) if way.implementation.ours else way
                    for way in found
                ],
            )


def _measure(
    ways: Sequence[Way], workload: KernelWorkload, inputs: KernelInputs
) -> Iterator[Record]:
    """A record of each way; where a kernel has broken the GPU they hold the reason."""
    try:
        expected = Expected.of(workload, inputs)
    except Exception as error:
        yield from (blank_record(way.implementation, workload).failed(error) for way in ways)
        return
    of_peers = expected
    if workload.dtype == "float32":
        # Who multiplies fp32 in three pieces of fewer bits is a peer as good as any other.
        of_peers = replace(expected, unfused_error=math.inf)
    effort = _EFFORT
    if inputs.qkv.nbytes > _LARGE:
        effort = replace(effort, torch_sets=_SETS_IF_LARGE)
    for way in progress(ways, workload.name):
        held_to = expected if way.implementation.ours else of_peers
        yield measure(way.implementation, held_to, replace(effort, thorough=way.fuse == AUTO))


def _described(record: Record, way: Way, workload: KernelWorkload, ceilings: Ceilings) -> Record:
    """The record beside its floor, with what tells its way."""
    moved = workload.bytes_moved
    if way.angles == INSIDE:  # a position of 4 bytes in place of the tables' rows
        moved -= workload.tokens * (4 * workload.rotated_dims - 4)
    flops = _PRODUCTS.get(workload.dtype, 1) * workload.matrix_flops
    # There are thousands, so what follows from the name or from other fields is not written, nor
    # digits that mean nothing.
    numbers = asdict(record) | {"floor_us": ceilings.kernel_floor_us(moved, flops)}
    short = {name: _short(value) for name, value in numbers.items() if isinstance(value, float)}
    details: dict[str, str | float] = {"angles": way.angles}
    if "max_abs_error" in record.details:
        details["max_abs_error"] = _short(record.details["max_abs_error"])
    return replace(record, **short, fuse=way.fuse, head_dim=None, heads=None, details=details)


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def told(record: Record) -> str:
    """A record's implementation and way: "triton q", "pallas qk, angles inside"."""
    inside = ", angles inside" if record.details.get("angles") == INSIDE else ""
    return f"{record.implementation} {record.fuse or ''}".strip() + inside


def _print(workload: KernelWorkload, records: Sequence[Record]) -> None:
    timed = sorted((r for r in records if r.median_us is not None), key=lambda r: r.median_us or 0)
    print_table(
        f"{workload.name}: floor {number(records[0].floor_us)} us",
        ("implementation", "us", "spread", "of floor", "profiler us", "rel. RMS", "largest error"),
        [
            [
                told(record),
                number(record.median_us),
                number(record.spread_us, 2),
                f"{(record.floor_us or 0) / (record.median_us or 1):.0%}",
                number(record.profiler_us),
                number(record.relative_rms_error),
                number(record.details.get("max_abs_error")),
            ]
            for record in timed
        ],
    )
    print_missing(records, told)
