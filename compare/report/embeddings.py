"""What fusing embeddings is worth, from a result file's records: targets, tables, write-ups.

A cell is a workload: one head of some columns over some segments, in one precision, with one
embedding. Ours is the time of `fuse="auto"`, of sinusoidal embeddings by tables or by positions,
whichever is faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compare.common.console import number
from compare.common.result_files import Results
from compare.implementations.kernels import AUTO, FUSE, INSIDE, TABLES
from compare.report.grouping import KERNELS, RecordDict
from compare.report.markdown import speedup, table
from compare.workloads.embeddings import EMBEDDING_WORKLOADS, Shape, parsed
from compare.workloads.kernels import ABSOLUTE_LIMITS

EMBEDDINGS = {"rope": "RoPE", "sinusoidal": "sinusoidal"}
_HOLDS, _MISSED = "holds", "**missed**"

# How much faster than compiled RoPE and SDPA the kernels should be: in fp32 all, in bf16 where
# segments are short. Many wide segments should besides reach a share of the floor by bytes.
_SPEEDUPS = {
    Shape(1, 64, 512): 3.0,
    Shape(1, 64, 2048): 6.0,
    Shape(1, 64, 4096): 8.0,
    Shape(1, 16, 8192): 12.0,
    Shape(1, 16, 16384): 20.0,
    Shape(128, 64, 512): 1.5,
    Shape(128, 64, 2048): 1.6,
    Shape(64, 64, 4096): 1.6,
    Shape(64, 64, 16384): 1.6,
    Shape(4, 1024, 512): 1.5,
    Shape(4, 4096, 512): 2.0,
}
_SHORT = 64  # tokens
_SHARE = 0.55
_LONG, _LONG_SPEEDUP = Shape(4, 4096, 512), 2.0  # in bf16, over the best of SDPA's backends
_ADDED_OVER_ROTATED, _AUTO_OVER_BEST, _PALLAS_OVER_TRITON = 1.1, 1.05, 1.15


class _WriteUp(NamedTuple):
    """What a public write-up measured: 64 queries and keys, fp32 without tensor cores.

    By columns the speedup over separate passes, and milliseconds; `fuse` and `angles` say which way
    of ours is theirs.
    """

    title: str
    embedding: str
    fuse: str
    angles: str
    speedups: Mapping[int, str]
    times_ms: Mapping[int, str]


_WRITE_UP_WIDTHS = (128, 512, 2048, 4096)
_WRITE_UPS = (
    _WriteUp(
        "RoPE, K beforehand, Q inside",
        *("rope", "q", TABLES),
        {128: "1.66x", 512: "1.45x", 2048: "1.40x"},
        {128: "0.020", 512: "0.047", 2048: "0.162"},
    ),
    _WriteUp(
        "RoPE, both inside",
        *("rope", "qk", TABLES),
        dict.fromkeys((128, 512, 2048), "0.30x to 0.59x"),
        {},
    ),
    _WriteUp(
        "sinusoidal, both inside, angles computed there",
        *("sinusoidal", "qk", INSIDE),
        {512: "2.0x", 2048: "1.9x", 4096: "1.4x"},
        {512: "0.058", 2048: "0.220", 4096: "0.149"},
    ),
    _WriteUp(
        "sinusoidal, both inside, by tables",
        *("sinusoidal", "qk", TABLES),
        dict.fromkeys((512, 2048, 4096), "0.42x"),
        {},
    ),
)


@dataclass(frozen=True)
class Cell:
    """One workload's records.

    Attributes:
        embedding: a key of EMBEDDINGS.
        precision: "fp32" or "bf16".
        shape: of the workload.
        records: as they are written.
    """

    embedding: str
    precision: str
    shape: Shape
    records: Sequence[RecordDict]

    def time_us(
        self, twin: str, fuse: str, angles: str = TABLES, key: str = "median_us"
    ) -> float | None:
        """Microseconds of one way of ours; None where there is no timing."""
        way = {"implementation": twin, "fuse": fuse, "angles": angles}
        found = (
            r for r in self.records if all(r.get(name) == value for name, value in way.items())
        )
        return next((record.get(key) for record in found), None)

    def ways_us(self, twin: str, angles: str) -> dict[str, float]:
        """Microseconds of each way that has a timing, "auto" among them."""
        times = {fuse: self.time_us(twin, fuse, angles) for fuse in (*FUSE, AUTO)}
        return {fuse: time for fuse, time in times.items() if time}

    def ours_us(self, twin: str, key: str = "median_us") -> float | None:
        """Microseconds of "auto", by tables or by positions, whichever is faster."""
        times = (self.time_us(twin, AUTO, angles, key) for angles in (TABLES, INSIDE))
        return min(filter(None, times), default=None)

    @property
    def peers_us(self) -> dict[str, tuple[str, float]]:
        """By what a peer attends with: its framework, and microseconds, embedding included."""
        return {
            record["implementation"].partition(" + ")[2]: (
                record["framework"],
                record["median_us"],
            )
            for record in self.records
            if "fuse" not in record and record["median_us"] is not None
        }

    def peer_us(self, name: str) -> float | None:
        """Microseconds of a peer by what it attends with; None where there is no timing."""
        return self.peers_us.get(name, ("", None))[1]

    @property
    def floor_us(self) -> float | None:
        """The least time, by tables."""
        floors = (r.get("floor_us") for r in self.records if r.get("angles") == TABLES)
        return next(floors, None)

    def speedups(self, rival_us: float | None) -> list[float | None]:
        """Of each twin over a time."""
        times = map(self.ours_us, KERNELS)
        return [rival_us / ours if rival_us and ours else None for ours in times]

    def __str__(self) -> str:
        """As "4x1024x512, RoPE, bf16"."""
        return f"{self.shape}, {EMBEDDINGS.get(self.embedding, self.embedding)}, {self.precision}"


Cells = Mapping[tuple[str, str, Shape], Cell]


def cells_of(results: Results) -> Cells:
    """The cells by embedding, precision and shape, in the workloads' order; of others none."""
    found: dict[str, list[RecordDict]] = {name: [] for name in EMBEDDING_WORKLOADS}
    for record in results.records:
        found.setdefault(record["workload"], []).append(record)
    known = ((parsed(name), records) for name, records in found.items() if records)
    return {key: Cell(*key, records) for key, records in known if key}


def families(cells: Cells) -> dict[tuple[str, str], list[Cell]]:
    """The cells of each embedding and precision."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells.values():
        found.setdefault((cell.embedding, cell.precision), []).append(cell)
    return found


def targets(cells: Cells) -> str:
    """What should be reached and what is: a table of RoPE's rows, and a line for each bound."""
    rows = [*_rows(cells, "fp32"), *_rows(cells, "bf16")]
    headings = ["RoPE; segments x tokens x columns", "compiled RoPE + SDPA, µs"]
    headings += ["ours, Triton / Pallas, µs", "speedup", "at least", "of the floor", "at least", ""]
    lines = [f"- {line}" for line in (*_bounds(cells), *_beside(cells))]
    return "\n\n".join(filter(None, [table(headings, rows) if rows else "", "\n".join(lines)]))


def _rows(cells: Cells, precision: str) -> Iterator[list[str]]:
    for shape, wanted in _SPEEDUPS.items():
        cell = cells.get(("rope", precision, shape))
        if cell is None or (precision == "bf16" and shape.length > _SHORT and shape != _LONG):
            continue
        which, rival = "", cell.peer_us("SDPA")
        if (precision, shape) == ("bf16", _LONG):
            backends = [us for name, (_, us) in cell.peers_us.items() if name.endswith("SDPA")]
            which, rival, wanted = ", its best backend", min(backends, default=None), _LONG_SPEEDUP
        ratios, floor, ours = cell.speedups(rival), cell.floor_us, cell.ours_us(KERNELS[0])
        share = floor / ours if floor and ours else None
        share_wanted = precision == "fp32" and shape.segments >= 64
        reached = [(ratios[0], wanted), *([(share, _SHARE)] if share_wanted else [])]
        yield [
            f"{precision}, {shape}{which}",
            number(rival),
            " / ".join(number(cell.ours_us(twin)) for twin in KERNELS),
            " / ".join(speedup(ratio) if ratio else "–" for ratio in ratios),
            f"{wanted:g}x",
            f"{share:.0%}" if share else "–",
            f"{_SHARE:.0%}" if share_wanted else "",
            _HOLDS if all(ratio and ratio >= least for ratio, least in reached) else _MISSED,
        ]


def _bounds(cells: Cells) -> Iterator[str]:
    """A sentence for each bound that holds everywhere or does not."""
    yield _bound(
        "Sinusoidal over RoPE",
        _ADDED_OVER_ROTATED,
        {
            f"{cell}, {twin}": _ratio(cell.ours_us(twin), rotated.ours_us(twin))
            for cell in cells.values()
            for rotated in [cells.get(("rope", cell.precision, cell.shape))]
            if rotated and cell.embedding == "sinusoidal"
            for twin in KERNELS
        },
    )
    yield _bound(
        '`fuse="auto"` over the best way',
        _AUTO_OVER_BEST,
        {
            f"{cell}, {twin}, {angles}": times[AUTO] / min(times.values())
            for cell in cells.values()
            for twin in KERNELS
            for angles in (TABLES, INSIDE)
            for times in [cell.ways_us(twin, angles)]
            if AUTO in times and len(times) > 1
        },
    )
    yield _bound(
        "Pallas over Triton, by the profiler for both",
        _PALLAS_OVER_TRITON,
        {
            f"{cell}, {angles}": _ratio(*times)
            for cell in cells.values()
            for angles in (TABLES, INSIDE)
            for times in [
                [cell.time_us(twin, AUTO, angles, "profiler_us") for twin in reversed(KERNELS)]
            ]
        },
    )


def _ratio(time: float | None, other: float | None) -> float | None:
    return time / other if time and other else None


def _bound(title: str, limit: float, found: Mapping[str, float | None]) -> str:
    known = {name: ratio for name, ratio in found.items() if ratio is not None}
    if not known:
        return f"{title}: not measured."
    held = sum(ratio <= limit for ratio in known.values())
    worst = max(known, key=lambda name: known[name])
    outcome = _HOLDS if held == len(known) else _MISSED
    return (
        f"{title}, at most {limit:g}: {outcome}, in {held} of {len(known)} cells; the largest is "
        f"{known[worst]:.2f} ({worst})."
    )


def _beside(cells: Cells) -> Iterator[str]:
    """Errors, and the time of a library for wide heads beside ours."""
    errors = {
        f"{cell}, {record['implementation']}": record["max_abs_error"]
        for cell in cells.values()
        for record in cell.records
        if record.get("ours") and record.get("max_abs_error") is not None
    }
    ours = [record for cell in cells.values() for record in cell.records if record.get("ours")]
    wrong = sum(record.get("passed") is False for record in ours)
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        yield (
            f"Errors of ours in fp32, of any element at most {ABSOLUTE_LIMITS['float32']:.0e}: the "
            f"largest is {errors[worst]:.1e} ({worst}). Failed or against a rule: {wrong} of "
            f"{len(ours)}."
        )
    long = cells.get(("rope", "bf16", _LONG))
    for name in ("ffpa-attn", "ffpa-attn CuTeDSL") if long else ():
        if (time := long.peer_us(name)) and (mine := long.ours_us(KERNELS[0])):
            yield f"{name} over {_LONG} in bf16: {number(time)} µs, ours {number(mine)}."


def ways_table(cells: Sequence[Cell]) -> str:
    """Microseconds of every way in each cell of a family, the fastest of a twin in bold."""
    sources = [
        (twin, angles)
        for angles in (TABLES, INSIDE)
        for twin in KERNELS
        if any(cell.ways_us(twin, angles) for cell in cells)
    ]
    ways = " / ".join((*FUSE, AUTO))
    headings = ["segments x tokens x columns", "floor, µs"]
    headings += [
        f"{twin}, {ways}{', angles inside' if angles == INSIDE else ''}" for twin, angles in sources
    ]
    rows = [
        [
            str(cell.shape),
            number(cell.floor_us),
            *(_ways(cell.ways_us(twin, angles)) for twin, angles in sources),
            _shares(cell),
        ]
        for cell in cells
    ]
    return table([*headings, "auto, of the floor"], rows)


def _ways(times: Mapping[str, float]) -> str:
    best = min(times, key=lambda fuse: times[fuse], default=None)
    told = {fuse: number(times.get(fuse)) for fuse in (*FUSE, AUTO)}
    return " / ".join(f"**{us}**" if fuse == best else us for fuse, us in told.items())


def _shares(cell: Cell) -> str:
    times, floor = map(cell.ours_us, KERNELS), cell.floor_us
    return " / ".join(f"{floor / ours:.0%}" if floor and ours else "–" for ours in times)


def peers_table(cells: Sequence[Cell]) -> str:
    """Microseconds of each peer in each cell of a family, and the speedup of ours over it.

    Empty where none has a timing.
    """
    names = dict.fromkeys(name for cell in cells for name in cell.peers_us)
    rows = [[str(cell.shape), *(_beside_ours(cell, name) for name in names)] for cell in cells]
    return table(["µs (speedup of ours)", *names], rows) if names else ""


def _beside_ours(cell: Cell, name: str) -> str:
    framework, time = cell.peers_us.get(name, ("", None))
    ours = cell.ours_us(KERNELS[framework == "jax"])
    if time is None:
        return "–"
    return f"{number(time)} ({speedup(time / ours)})" if ours else number(time)


def write_ups_table(cells: Cells) -> str:
    """The write-ups' figures, and the same of ours, Triton / Pallas.

    Ours over one segment is what they measured; many fill a GPU.
    """
    rows = []
    for told in _WRITE_UPS:
        ones, many = (
            [_of_width(cells, told.embedding, width, alone) for width in _WRITE_UP_WIDTHS]
            for alone in (True, False)
        )
        rows += [
            [f"{told.title}: theirs", *(told.speedups.get(w, "–") for w in _WRITE_UP_WIDTHS)],
            ["ours, one segment", *(_gains(cell, told) for cell in ones)],
            ["ours, many segments", *(_gains(cell, told) for cell in many)],
        ]
        if told.times_ms:
            rows += [
                ["theirs, ms", *(told.times_ms.get(w, "–") for w in _WRITE_UP_WIDTHS)],
                ["ours, one segment, ms", *(_times_ms(cell, told) for cell in ones)],
            ]
    headings = ["speedup over separate passes, fp32, 64 tokens", *map(str, _WRITE_UP_WIDTHS)]
    return table(headings, rows)


def _of_width(cells: Cells, embedding: str, width: int, alone: bool) -> Cell | None:
    """The fp32 cell of one segment of 64 tokens, or of the fewest more than one."""
    alike = [
        cell
        for (name, precision, shape), cell in cells.items()
        if (name, precision, shape.length, shape.width) == (embedding, "fp32", _SHORT, width)
        and (shape.segments == 1) == alone
    ]
    return min(alike, key=lambda cell: cell.shape.segments, default=None)


def _gains(cell: Cell | None, told: _WriteUp) -> str:
    """Time of both embedded beforehand, by tables, over that of the write-up's way."""
    ratios = [
        _ratio(cell.time_us(twin, "none"), cell.time_us(twin, told.fuse, told.angles))
        for twin in KERNELS
        if cell
    ]
    return " / ".join(speedup(ratio) if ratio else "–" for ratio in ratios) or "–"


def _times_ms(cell: Cell | None, told: _WriteUp) -> str:
    times = [cell.time_us(twin, told.fuse, told.angles) for twin in KERNELS if cell]
    return " / ".join(f"{time / 1e3:.3f}" if time else "–" for time in times) or "–"
