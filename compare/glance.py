"""The numbers that a reader wants first: one table for the top of a README."""

from collections.abc import Callable, Iterator, Mapping

from compare.console import number
from compare.families import KERNELS, RecordDict, peers, timed
from compare.markdown import table
from compare.results import Results

_SIZES = ("448", "672", "896", "1344")
_FRAMEWORKS = ("torch", "jax")
_TOWERS = ("torch", "flax")

# Of a workload's records, those that ours of a framework is set against.
_Rivals = Callable[[dict[str, RecordDict], str], list[RecordDict]]


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
            "Hugging Face's, flash attention: times as long": _named("Hugging Face FA"),
            "Hugging Face's, SDPA, its default: times as long": _named("Hugging Face SDPA"),
        }
        rows += _rows(towers, "tower", _TOWERS, "row_us", 1e3, title, rivals)
    if kernels := parts.get("kernels"):
        rivals = {"the fastest library, with rotation: times as long": peers}
        for family, where in (("windows", "in windows of 64"), ("frames", "over the whole image")):
            title = f"attention {where}, one layer: Triton / Pallas, µs"
            rows += _rows(kernels, family, KERNELS, "median_us", 1.0, title, rivals)
    if not rows:
        return ""
    device = next(iter(parts.values())).device
    return table([f"{device}, bf16", *(f"{size} px" for size in _SIZES)], rows)


def _named(start: str) -> _Rivals:
    return lambda records, _: [r for name, r in records.items() if name.startswith(start)]


def _rows(
    results: Results,
    family: str,
    twins: tuple[str, str],
    key: str,
    unit_us: float,
    title: str,
    rivals: Mapping[str, _Rivals],
) -> Iterator[list[str]]:
    """Ours, and below it a row for each kind of rival; `key` tells which time."""
    columns = [timed(results, f"{family}-{size}") for size in _SIZES]

    def pair(records: dict[str, RecordDict], rivals_of: _Rivals | None) -> str:
        cells = []
        for name, framework in zip(twins, _FRAMEWORKS, strict=True):
            own_us = records.get(name, {}).get(key)
            if rivals_of is None:
                cells.append(number(own_us and own_us / unit_us))
                continue
            times_us = [r[key] for r in rivals_of(records, framework) if key in r]
            known = own_us is not None and times_us
            cells.append(f"{min(times_us) / own_us:.1f}" if known else "–")
        return " / ".join(cells)

    yield [f"**{title}**", *(f"**{pair(records, None)}**" for records in columns)]
    for label, rivals_of in rivals.items():
        yield [label, *(pair(records, rivals_of) for records in columns)]
