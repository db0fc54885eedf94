"""The numbers that a reader wants first: a table, three sentences, the bars of the hero chart."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import KERNELS, RecordDict, peers, timed
from compare.report.markdown import speedup, table

SIZES = ("448", "672", "896", "1344")
_FRAMEWORKS = ("torch", "jax")
_UNKNOWN = "– / –"

# Of a workload's records, the times that ours of a framework is set against, in microseconds.
_Rivals = Callable[[dict[str, RecordDict], str], list[float]]


@dataclass(frozen=True)
class _Subject:
    """Something of ours in both frameworks, and those whom it is set against.

    Attributes:
        title: of its row of times.
        key: which time of a record counts.
        unit_us: microseconds of the unit in which the row has them.
        rivals: by the title of the row that has the speedup over the fastest of them.
    """

    part: str
    family: str
    twins: tuple[str, str]
    title: str
    key: str
    unit_us: float
    rivals: Mapping[str, _Rivals]

    def columns(self, parts: Mapping[str, Results]) -> list[dict[str, RecordDict]]:
        """The records at each size by implementation."""
        results = parts.get(self.part)
        return [timed(results, f"{self.family}-{s}") if results else {} for s in SIZES]

    def times_us(self, records: dict[str, RecordDict]) -> list[float | None]:
        """Ours in each framework."""
        return [records.get(name, {}).get(self.key) for name in self.twins]

    def speedups(self, records: dict[str, RecordDict], rivals: _Rivals) -> list[float | None]:
        """How much faster ours of each framework is than the fastest of its rivals."""
        return [
            min(theirs) / ours if ours and (theirs := rivals(records, framework)) else None
            for ours, framework in zip(self.times_us(records), _FRAMEWORKS, strict=True)
        ]


def _hugging_face(attention: str, key: str) -> _Rivals:
    """Times of Hugging Face's tower with an attention; `key` tells which time."""
    start = f"Hugging Face {attention}"
    return lambda records, _: [
        r[key] for name, r in records.items() if name.startswith(start) and key in r
    ]


def _libraries(records: dict[str, RecordDict], framework: str) -> list[float]:
    return [record["median_us"] for record in peers(records, framework)]


_LIBRARIES = {"speedup over the fastest library": _libraries}
_SDPA, _FLASH = _hugging_face("SDPA", "row_us"), _hugging_face("FA", "row_us")
_TOWERS = _Subject(
    "towers",
    "tower",
    ("torch", "flax"),
    "vision tower of Qwen2.5-VL 7B: PyTorch / Flax, ms",
    "row_us",
    1e3,
    {
        "speedup over Hugging Face, SDPA (its default)": _SDPA,
        "speedup over Hugging Face, flash attention": _FLASH,
        "speedup over its kernels alone, SDPA": _hugging_face("SDPA", "profiler_us"),
        "speedup over its kernels alone, flash attention": _hugging_face("FA", "profiler_us"),
    },
)
_WINDOWS, _FRAMES = (
    _Subject(
        "kernels",
        family,
        KERNELS,
        f"attention {where}, one layer: Triton / Pallas, µs",
        "median_us",
        1.0,
        _LIBRARIES,
    )
    for family, where in (("windows", "in windows of 64"), ("frames", "over the whole image"))
)


def summary_table(parts: Mapping[str, Results]) -> str:
    """Times of ours at four sizes, PyTorch's / JAX's, and their speedups over others.

    Args:
        parts: of one device, by name.

    Returns:
        A Markdown table; empty where neither towers nor kernels are on record.
    """
    rows = [row for subject in (_TOWERS, _WINDOWS, _FRAMES) for row in _rows(subject, parts)]
    if not rows:
        return ""
    device = next(iter(parts.values())).device
    return table([f"{device}, bf16", *(f"{size} px" for size in SIZES)], rows)


def _rows(subject: _Subject, parts: Mapping[str, Results]) -> Iterator[list[str]]:
    """Ours and a row for each kind of rival, those on record."""
    columns = subject.columns(parts)
    own = [[number(t and t / subject.unit_us) for t in subject.times_us(c)] for c in columns]
    table = {f"**{subject.title}**": [f"**{' / '.join(cells)}**" for cells in own]}
    for title, rivals in subject.rivals.items():
        ratios = [subject.speedups(records, rivals) for records in columns]
        table[title] = [" / ".join(speedup(r) if r else "–" for r in pair) for pair in ratios]
    for title, cells in table.items():
        if {cell.strip("*") for cell in cells} != {_UNKNOWN}:
            yield [title, *cells]


def summary_sentences(parts: Mapping[str, Results]) -> str:
    """A sentence on towers, on windows and on whole images, of what is on record.

    Each tells the least speedup at the four sizes: none is the choice of the best one.
    """
    libraries = (
        "the speedup over the fastest library, which rotates beforehand, is at least {} in PyTorch "
        "and {} in JAX."
    )
    told = {
        "**Towers**: the speedup over Hugging Face's is at least {} with SDPA, its default, and at "
        "least {} with flash attention.": [
            min(filter(None, _least(_TOWERS, parts, rivals)), default=None)
            for rivals in (_SDPA, _FLASH)
        ],
        f"**Attention in windows**: {libraries}": _least(_WINDOWS, parts, _libraries),
        f"**Attention over whole images**: {libraries}": _least(_FRAMES, parts, _libraries),
    }
    return "\n".join(
        f"- {text.format(*map(speedup, ratios))}" for text, ratios in told.items() if all(ratios)
    )


def _least(subject: _Subject, parts: Mapping[str, Results], rivals: _Rivals) -> list[float | None]:
    """The least speedup at any size, of each framework."""
    sizes = [subject.speedups(records, rivals) for records in subject.columns(parts)]
    return [min(filter(None, ratios), default=None) for ratios in zip(*sizes, strict=True)]


def hero_bars(parts: Mapping[str, Results]) -> dict[str, list[tuple[float, float | None]]]:
    """Towers at the four sizes: milliseconds, and for others ours of PyTorch's speedup over them.

    Returns:
        A list of four by what a bar is called, ours first; empty where a time is not on record.
    """
    columns = _TOWERS.columns(parts)
    ours = [_TOWERS.times_us(records) for records in columns]
    others = {
        "Hugging Face, flash attention": [_FLASH(records, "torch") for records in columns],
        "Hugging Face, SDPA": [_SDPA(records, "torch") for records in columns],
    }
    if not all(map(all, ours)) or not all(map(all, others.values())):
        return {}
    torch, flax = zip(*ours, strict=True)
    return {
        "ours, PyTorch": [(us / 1e3, None) for us in torch],
        "ours, Flax": [(us / 1e3, None) for us in flax],
        **{
            name: [(min(us) / 1e3, min(us) / own) for us, own in zip(times, torch, strict=True)]
            for name, times in others.items()
        },
    }
