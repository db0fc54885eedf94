"""The times of every way of fusing, cell by cell, from a result file's records, as tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compare.common.console import number
from compare.implementations.kernels import FUSE

# "auto" is near enough where the fastest way has at most this speedup over it.
AUTO_SLACK = 1.05


@dataclass(frozen=True)
class Cell:
    """One shape in one framework.

    Attributes:
        implementation: "triton" or "pallas".
        rotary_dim: dims of a head that rotate.
        length: tokens of a segment.
        auto: the way that fuse="auto" takes.
        times_us: microseconds of each way that has a timing.
    """

    implementation: str
    head_dim: int
    rotary_dim: int
    length: int
    auto: str
    times_us: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest way."""
        return min(self.times_us, key=lambda fuse: self.times_us[fuse])

    @property
    def auto_over_best(self) -> float | None:
        """Speedup of the fastest way over "auto"; None where that has no timing."""
        time = self.times_us.get(self.auto)
        return None if time is None else time / self.times_us[self.best]

    @property
    def holds(self) -> bool:
        """Whether "auto" is near enough to the fastest way."""
        ratio = self.auto_over_best
        return ratio is not None and ratio <= AUTO_SLACK

    @property
    def series(self) -> str:
        """All but the length: "triton, 80", "triton, 80 of which 40 rotate"."""
        partial = f" of which {self.rotary_dim} rotate" if self.rotary_dim < self.head_dim else ""
        return f"{self.implementation}, {self.head_dim}{partial}"


def cells_of(records: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells of records as they are written, in their order."""
    cells: dict[tuple, Cell] = {}
    for record in records:
        names = ("implementation", "head_dim", "rotary_dim", "segment_length", "auto")
        place = tuple(record[name] for name in names)
        cell = cells.setdefault(place, Cell(*place))
        if record["median_us"] is not None:
            cell.times_us[record["fuse"]] = record["median_us"]
    return [cell for cell in cells.values() if cell.times_us]


def verdict_line(cells: Sequence[Cell]) -> str:
    """One sentence: in how many cells "auto" is near the fastest way, and where it is not."""
    failing = [cell for cell in cells if not cell.holds]
    line = (
        f'fuse="auto" is within {AUTO_SLACK - 1:.0%} of the fastest way in '
        f"{len(cells) - len(failing)} of {len(cells)} cells"
    )
    if not failing:
        return f"{line}."
    told = "; ".join(f"{cell.series} at {cell.length} ({_cell(cell)})" for cell in failing)
    return f"{line}. Not in: {told}."


def best_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: the fastest way of each cell, and "auto" over it where that differs."""
    return _table(cells, "fastest way", _cell)


def times_table(cells: Sequence[Cell], best: str = "{}") -> tuple[list[str], list[list[str]]]:
    """Headings and rows: microseconds of "qk", "q" and "none" in each cell.

    `best` formats the fastest of a cell.
    """

    def show(cell: Cell) -> str:
        return " / ".join(
            (best if fuse == cell.best else "{}").format(number(cell.times_us.get(fuse)))
            for fuse in FUSE
        )

    return _table(cells, f"µs of {', '.join(FUSE)}", show)


def _table(
    cells: Sequence[Cell], corner: str, show: Callable[[Cell], str]
) -> tuple[list[str], list[list[str]]]:
    lengths = sorted({cell.length for cell in cells})
    series: dict[str, dict[int, str]] = {}
    for cell in cells:
        series.setdefault(cell.series, {})[cell.length] = show(cell)
    rows = [[name, *(row.get(length, "–") for length in lengths)] for name, row in series.items()]
    return [corner, *map(str, lengths)], rows


def _cell(cell: Cell) -> str:
    ratio = cell.auto_over_best
    if ratio is None:
        return f"{cell.best}, auto –"
    if cell.auto == cell.best:
        return cell.best
    told = f"{cell.best}, auto {ratio:.2f}"
    return told if cell.holds else f"{told} !"
