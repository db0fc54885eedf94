"""The numbers that a reader wants first: one table for the top of a README."""

from collections.abc import Callable, Iterator, Mapping

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import KERNELS, RecordDict, peers, timed
from compare.report.markdown import table

_SIZES = ("448", "672", "896", "1344")
_FRAMEWORKS = ("torch", "jax")
_TOWERS = ("torch", "flax")
_UNKNOWN = "– / –"

# Of a workload's records, the times that ours of a framework is set against, in microseconds.
_Rivals = Callable[[dict[str, RecordDict], str], list[float]]


def glance_table(parts: Mapping[str, Results]) -> str:
    """Times of ours at four sizes, PyTorch's / JAX's, and how many times longer others take.

    Args:
        parts: of one device, by name.

    Returns:
        A Markdown table; empty where neither towers nor kernels are on record.
    """
    rows: list[list[str]] = []
    if towers := parts.get("towers"):
        title = "vision tower of Qwen2.5-VL 7B, calls in a row: PyTorch / Flax, ms"
        rivals = {
            f"Hugging Face's, {attention}: times as long": _named(f"Hugging Face {name}", key)
            for attention, name, key in (
                ("flash attention", "FA", "row_us"),
                ("flash attention, its kernels alone", "FA", "profiler_us"),
                ("SDPA, its default", "SDPA", "row_us"),
                ("SDPA, its kernels alone", "SDPA", "profiler_us"),
            )
        }
        rows += _rows(towers, "tower", _TOWERS, "row_us", 1e3, title, rivals)
    if kernels := parts.get("kernels"):
        rivals = {"the fastest library, with rotation: times as long": _libraries}
        for family, where in (("windows", "in windows of 64"), ("frames", "over the whole image")):
            title = f"attention {where}, one layer: Triton / Pallas, µs"
            rows += _rows(kernels, family, KERNELS, "median_us", 1.0, title, rivals)
    if not rows:
        return ""
    device = next(iter(parts.values())).device
    return table([f"{device}, bf16", *(f"{size} px" for size in _SIZES)], rows)


def _named(start: str, key: str) -> _Rivals:
    """Times of the implementations whose names start so; `key` tells which time."""
    return lambda records, _: [
        r[key] for name, r in records.items() if name.startswith(start) and key in r
    ]


def _libraries(records: dict[str, RecordDict], framework: str) -> list[float]:
    return [record["median_us"] for record in peers(records, framework)]


def _rows(
    results: Results,
    family: str,
    twins: tuple[str, str],
    key: str,
    unit_us: float,
    title: str,
    rivals: Mapping[str, _Rivals],
) -> Iterator[list[str]]:
    """Ours and a row for each kind of rival, those on record; `key` tells which time is ours."""
    columns = [timed(results, f"{family}-{size}") for size in _SIZES]

    def pair(records: dict[str, RecordDict], rivals_of: _Rivals | None) -> str:
        cells = []
        for name, framework in zip(twins, _FRAMEWORKS, strict=True):
            own_us = records.get(name, {}).get(key)
            if rivals_of is None:
                cells.append(number(own_us and own_us / unit_us))
                continue
            times_us = rivals_of(records, framework)
            known = own_us is not None and times_us
            cells.append(_times(min(times_us) / own_us) if known else "–")
        return " / ".join(cells)

    for label, rivals_of in {f"**{title}**": None, **rivals}.items():
        cells = [pair(records, rivals_of) for records in columns]
        if set(cells) != {_UNKNOWN}:
            yield [label, *(f"**{cell}**" if rivals_of is None else cell for cell in cells)]


def _times(ratio: float) -> str:
    """Near 1 a second digit decides who is faster."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"
