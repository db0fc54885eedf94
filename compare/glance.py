"""The numbers that a reader wants first: one table for the top of a README."""

from collections.abc import Callable, Iterator, Mapping

from compare.console import number
from compare.families import KERNELS, OURS, RecordDict, timed
from compare.markdown import table
from compare.results import Results

_SIZES = ("448", "672", "896", "1344")
_TOWERS = ("torch", "flax")
_Rival = Callable[[str, RecordDict, RecordDict], bool]


def glance_table(parts: Mapping[str, Results]) -> str:
    """Times of ours at four sizes, PyTorch's / JAX's, and how many times longer others take.

    Args:
        parts: of one device, by name.

    Returns:
        A Markdown table; empty where neither towers nor kernels are on record.
    """
    rows: list[list[str]] = []
    if towers := parts.get("towers"):
        of_tower = "Hugging Face's tower, {}: times as long"
        rivals: dict[str, _Rival] = {
            of_tower.format("flash attention"): lambda name, *_: "varlen" in name,
            of_tower.format("SDPA, its default"): lambda name, *_: name.endswith("SDPA"),
        }
        title = "vision tower of Qwen2.5-VL 7B, calls in a row: PyTorch / Flax, ms"
        rows += _rows(towers, "tower", _TOWERS, "row_us", 1e3, title, rivals)
    if kernels := parts.get("kernels"):
        rivals = {"rotation apart, the fastest library: times as long": _is_unfused}
        for family, where in (("windows", "in windows of 64"), ("frames", "over the whole image")):
            title = f"attention {where}, one layer: Triton / Pallas, µs"
            rows += _rows(kernels, family, KERNELS, "median_us", 1.0, title, rivals)
    if not rows:
        return ""
    device = next(iter(parts.values())).device
    return table([f"{device}, bf16", *(f"{size} px" for size in _SIZES)], rows)


def _is_unfused(name: str, record: RecordDict, own: RecordDict) -> bool:
    return name not in OURS and record.get("framework") == own.get("framework")


def _rows(
    results: Results,
    family: str,
    twins: tuple[str, str],
    key: str,
    unit_us: float,
    title: str,
    rivals: Mapping[str, _Rival],
) -> Iterator[list[str]]:
    """Ours, and below it a row for each kind of rival."""
    columns = [timed(results, f"{family}-{size}") for size in _SIZES]

    def time_us(records: dict[str, RecordDict], name: str) -> float | None:
        return records.get(name, {}).get(key)

    times = [[time_us(records, name) for name in twins] for records in columns]
    cells = [[number(own and own / unit_us) for own in pair] for pair in times]
    yield [f"**{title}**", *(f"**{' / '.join(pair)}**" for pair in cells)]
    for label, is_rival in rivals.items():
        ratios = []
        for records, pair in zip(columns, times, strict=True):
            for name, own_us in zip(twins, pair, strict=True):
                rival_us = [
                    record[key]
                    for other, record in records.items()
                    if record.get(key) and is_rival(other, record, records.get(name, {}))
                ]
                known = own_us and rival_us
                ratios.append(f"{min(rival_us) / own_us:.1f}" if known else "–")
        yield [label, *(f"{a} / {b}" for a, b in zip(ratios[::2], ratios[1::2], strict=True))]
