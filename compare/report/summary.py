"""The numbers that a reader wants first: a table, three sentences, the bars of the hero chart."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import KERNELS, OURS, UNITS, Column, timed
from compare.report.markdown import speedup, table

SIZES = ("448", "672", "896", "1344")
_UNKNOWN = "– / –"


@dataclass(frozen=True)
class _Subject:
    """Something of ours in PyTorch and JAX, and whom it is set against.

    Attributes:
        key: which time of a record counts.
        rivals: by the title of their row, how their names start and which time counts. With no
            name, all libraries of the same framework.
    """

    part: str
    family: str
    twins: tuple[str, str]
    title: str
    key: str
    rivals: Mapping[str, tuple[str, str]]

    def columns(self, parts: Mapping[str, Results]) -> list[Column]:
        """The records at each size by implementation."""
        results = parts.get(self.part)
        return [timed(results, f"{self.family}-{s}") if results else {} for s in SIZES]

    def ours_us(self, records: Column) -> list[float | None]:
        """The time of each twin."""
        return [records.get(name, {}).get(self.key) for name in self.twins]

    def speedups(self, records: Column, rival: str) -> list[float | None]:
        """How much faster each twin is than the fastest of some rivals."""
        return [
            theirs / ours
            if ours and (theirs := self.fastest_us(records, rival, framework))
            else None
            for ours, framework in zip(self.ours_us(records), ("torch", "jax"), strict=True)
        ]

    def fastest_us(self, records: Column, rival: str, framework: str) -> float | None:
        """The least time of some rivals."""
        start, key = self.rivals[rival]
        times_us = (
            record.get(key)
            for name, record in records.items()
            if (name.startswith(start) if start else record.get("framework") == framework)
            and name not in OURS
        )
        return min(filter(None, times_us), default=None)


_SDPA = "speedup over Hugging Face, SDPA (its default)"
_FLASH = "speedup over Hugging Face, flash attention"
_LIBRARIES = "speedup over the fastest library"
_TOWERS = _Subject(
    "towers",
    "tower",
    ("torch", "flax"),
    "vision tower of Qwen2.5-VL 7B: PyTorch / Flax, ms",
    "row_us",
    {
        _SDPA: ("Hugging Face SDPA", "row_us"),
        _FLASH: ("Hugging Face FA", "row_us"),
        "speedup over its kernels alone, SDPA": ("Hugging Face SDPA", "profiler_us"),
        "speedup over its kernels alone, flash attention": ("Hugging Face FA", "profiler_us"),
    },
)
_WINDOWS, _FRAMES = (
    _Subject(
        "kernels",
        family,
        KERNELS,
        f"attention {where}, one layer: Triton / Pallas, µs",
        "median_us",
        {_LIBRARIES: ("", "median_us")},
    )
    for family, where in (("windows", "in windows of 64"), ("frames", "over the whole image"))
)


_TRAINED_WINDOWS, _TRAINED_FRAMES = (
    replace(subject, part="training") for subject in (_WINDOWS, _FRAMES)
)
_TRAINED_TOWERS = replace(
    _TOWERS, part="training", family="tower-train", twins=("accelerated", "flax")
)


def summary_table(parts: Mapping[str, Results]) -> str:
    """Times of ours at four sizes, PyTorch's / JAX's, and their speedups over others.

    A Markdown table of one device's parts; empty where neither towers nor kernels are on record.
    """
    return _table((_TOWERS, _WINDOWS, _FRAMES), parts)


def attention_table(parts: Mapping[str, Results]) -> str:
    """Of the same table the rows of the attention alone."""
    return _table((_WINDOWS, _FRAMES), parts)


def _table(subjects: Sequence[_Subject], parts: Mapping[str, Results]) -> str:
    rows = [row for subject in subjects for row in _rows(subject, parts)]
    if not rows:
        return ""
    device = next(iter(parts.values())).device
    return table([f"{device}, bf16", *(f"{size} px" for size in SIZES)], rows)


def _rows(subject: _Subject, parts: Mapping[str, Results]) -> Iterator[list[str]]:
    """Ours and a row for each kind of rival, those on record."""
    columns = subject.columns(parts)
    unit_us = UNITS[subject.part][1]
    times = [[number(t and t / unit_us) for t in subject.ours_us(c)] for c in columns]
    told = {f"**{subject.title}**": [f"**{' / '.join(pair)}**" for pair in times]}
    for rival in subject.rivals:
        ratios = [subject.speedups(records, rival) for records in columns]
        told[rival] = [" / ".join(speedup(r) if r else "–" for r in pair) for pair in ratios]
    for title, cells in told.items():
        if {cell.strip("*") for cell in cells} != {_UNKNOWN}:
            yield [title, *cells]


def summary_sentences(parts: Mapping[str, Results], training: Results | None = None) -> str:
    """A sentence on towers, on windows, on whole images and on training, of what is on record.

    Each tells the least speedup at the four sizes: none is the choice of the best one.

    Args:
        parts: of one device.
        training: that part, which may be of another.
    """
    libraries = (
        "the speedup over the fastest library, which rotates beforehand, is at least {} in PyTorch "
        "and {} in JAX."
    )
    told = {
        "**Towers**: the speedup over Hugging Face's is at least {} with SDPA, its default, and at "
        "least {} with flash attention.": [
            min(filter(None, _least(_TOWERS, parts, rival)), default=None)
            for rival in (_SDPA, _FLASH)
        ],
        f"**Attention in windows**: {libraries}": _least(_WINDOWS, parts, _LIBRARIES),
        f"**Attention over whole images**: {libraries}": _least(_FRAMES, parts, _LIBRARIES),
    }
    if training is not None:
        trained = {"training": training}
        begin = f"**Training** ({training.device}, forward and backward): "
        told |= {
            f"{begin}{libraries[:-1]} in windows, {{}} and {{}} over whole images.": [
                ratio
                for subject in (_TRAINED_WINDOWS, _TRAINED_FRAMES)
                for ratio in _least(subject, trained, _LIBRARIES)
            ],
            "**A step of training** all layers of an accelerated model: the speedup is at least {} "
            "over SDPA, and {} over flash attention.": [
                _least(_TRAINED_TOWERS, trained, rival)[0] for rival in (_SDPA, _FLASH)
            ],
        }
    return "\n".join(
        f"- {text.format(*map(speedup, ratios))}" for text, ratios in told.items() if all(ratios)
    )


def _least(subject: _Subject, parts: Mapping[str, Results], rival: str) -> list[float | None]:
    """The least speedup at any size, of each twin."""
    sizes = [subject.speedups(records, rival) for records in subject.columns(parts)]
    return [min(filter(None, ratios), default=None) for ratios in zip(*sizes, strict=True)]


def hero_bars(parts: Mapping[str, Results]) -> dict[str, list[float]]:
    """Milliseconds of towers at the four sizes, by what a bar is called, that of PyTorch first.

    Empty where a time is not on record.
    """
    columns = _TOWERS.columns(parts)
    torch_us, flax_us = zip(*map(_TOWERS.ours_us, columns), strict=True)
    bars = {
        "ours, PyTorch": torch_us,
        "ours, Flax": flax_us,
        "Hugging Face, flash attention": [_TOWERS.fastest_us(c, _FLASH, "torch") for c in columns],
        "Hugging Face, SDPA": [_TOWERS.fastest_us(c, _SDPA, "torch") for c in columns],
    }
    if not all(map(all, bars.values())):
        return {}
    return {name: [us / 1e3 for us in times_us] for name, times_us in bars.items()}
