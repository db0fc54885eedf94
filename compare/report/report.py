"""The report: Markdown and charts from result files, for a file of its own and for the README."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from compare.bench.fusion_table import best_table, cells_of, times_table, verdict_line
from compare.common import result_files
from compare.common.errors import InputError, UnavailableError
from compare.common.result_files import Results
from compare.report import markdown
from compare.report.check_tables import agreement_line, layer_table, trust_line, trust_table
from compare.report.grouping import RecordDict, families, layer_families, ranking
from compare.report.summary import glance_table
from compare.report.timing_tables import (
    device_table,
    group_table,
    rate_table,
    ratio_table,
    resource_table,
    row_table,
    timing_table,
)
from compare.workloads.towers import TOWERS

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
GLANCE_BEGIN, GLANCE_END = "<!-- glance:begin -->", "<!-- glance:end -->"
REPORT = "report.md"  # its name in a directory of results
PARTS = ("agreement", "trust", "kernels", "fusion", "towers", "integration")

_SPREAD = (
    "Spread: 90th - 10th percentile over the median; it and the error are the largest of a row."
)
_METHODS = {
    "kernels": "PyTorch's times are CUDA-graph replays, JAX's the profiler's sum of a call's "
    "kernels without the gaps between them. Inputs rotate past the L2 cache. Floor: the bytes that "
    "must move at the rate of a copy of 94 MiB, as many as the windows of 1344 px move, or the "
    "products at the matrix rate, whichever takes longer. In brackets: share of the floor, or "
    "times as long as ours of the same framework. "
    f"{_SPREAD} PyTorch's samples are means over some 3 ms of replays, JAX's are single calls, "
    "which spread more.",
    "fusion": "Of about 9,216 tokens in all, by head_dim and tokens of a segment. Clocks as in the "
    'kernels\' tables. In the chart a ring marks where "qk" begins to take longer than "none", the '
    'grey line the longest segment for which "auto" takes it.',
    "towers": "Random weights at the published sizes. Wall time of whole calls, inputs on the GPU, "
    "each waited for; of calls in a row only the last is. The first call of a size, which compiles "
    "and plans, stands by itself. Floor: all products at the matrix rate and the windows' bytes at "
    "the copy bandwidth. In brackets: share of the floor, or times as long as ours of the same "
    f"framework. {_SPREAD}",
    "integration": "Weights, wall time of whole calls and floor as for the towers. "
    "`accelerate(model)` as it is, and with every block compiled by torch.compile. In brackets: "
    f"share of the floor, or times as long as accelerated. {_SPREAD}",
}
_ROTATIONS = 'In the chart "rope + ..." is the faster of the rotations before that attention.'
# What has to be known of one family alone.
_REMARKS = {
    "windows": _ROTATIONS,
    "frames": _ROTATIONS,
    "rotate": 'Pallas\' pass is timed within a call with `fuse="none"`, whose error stands here. '
    "A negation in place, where there is one, is PyTorch's, of as many bytes in one piece.",
}
_RATIOS = "pallas / triton is by the profiler for both."
# Beside the tables of times, what stands in the report alone.
_KERNEL_DETAILS = (ratio_table,)
_TOWER_DETAILS = (row_table, device_table, rate_table, group_table, resource_table)
# What a README has: charts of the main families, and a table of these.
_DETAIL_FAMILIES = {"windows_other", "frames_other", "rotate"}
_README_TABLES = {"windows", "frames", "tower"}
_MODELS = {
    "tower": "Qwen2.5-VL 7B",
    "qwen2-tower": "Qwen2-VL 7B",
    "qwen3-tower": "Qwen3-VL 8B",
}
_TITLES = {
    "windows": "Windowed attention, one layer, RoPE included",
    "frames": "Whole-frame attention, one layer, RoPE included",
    "windows_other": "Windowed attention, other shapes",
    "frames_other": "Whole-frame attention, other shapes",
    "rotate": "Rotation of Q and K as a pass of its own",
    **{family: f"Whole tower of {model}" for family, model in _MODELS.items()},
    "integration": "Hugging Face's tower of Qwen2.5-VL 7B, untouched and accelerated",
}


def write_report(directory: Path, out: Path) -> Path:
    """Draw the charts beside the result files and write the report.

    Args:
        directory: holds a directory for each device, each with the parts' JSON files.
        out: the Markdown file to write.

    Returns:
        `out`.

    Raises:
        InputError: no results there, one that cannot be read, or a place that cannot be written.
    """
    devices = read_devices(directory)
    result_files.check_writable(out)
    for folder, parts in devices.items():
        _draw(folder, parts)
    sections = "\n\n".join(_section(f, p, out.parent, full=True) for f, p in devices.items())
    result_files.write_text(f"# Results\n\n{sections}\n", out)
    return out


def update_readme(readme: Path, directory: Path, report: Path) -> None:
    """Renew what stands between the markers of a README: results, and at its top a glance at them.

    Args:
        readme: the file to renew.
        directory: as of `write_report`.
        report: what that wrote, to link it.

    Raises:
        InputError: the README cannot be read or lacks the results' markers, or there are none.
    """
    text = read_readme(readme)
    text = _renewed(text, BEGIN, END, readme_block(readme, directory, report))
    text = _renewed(text, GLANCE_BEGIN, GLANCE_END, glance_block(directory))
    result_files.write_text(text, readme)


def read_readme(readme: Path) -> str:
    """A README whose results can be renewed.

    Raises:
        InputError: it cannot be read, or lacks the results' markers.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {readme}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if END not in text.partition(BEGIN)[2]:
        raise InputError(f"{readme} has no {BEGIN} followed by {END}")
    return text


def _renewed(text: str, begin: str, end: str, block: str) -> str:
    """The text with another block between two markers, if they are there."""
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    return f"{before}{begin}\n{block}\n{end}{after}" if begun and ended else text


def glance_block(directory: Path) -> str:
    """What belongs at the top of a README: one table, of the device with the most timings.

    Raises:
        InputError: no results, or one that cannot be read.
    """
    return glance_table(next(iter(read_devices(directory).values())))


def readme_block(readme: Path, directory: Path, report: Path) -> str:
    """What belongs between the markers of a README: tables and charts.

    The main ones of the device with the most timings, a glance at others, and links to the report,
    which has all the rest.

    Args:
        readme, directory, report: as of `update_readme`.

    Raises:
        InputError: no results, or one that cannot be read.
    """
    (folder, parts), *others = read_devices(directory).items()
    link = f"[All of it]({_link(report, readme.parent)})"
    sections = [_section(folder, parts, readme.parent, full=False), link]
    for _, measured in others:
        sections += [f"### {_device(measured)}", glance_table(measured), link]
    return "\n\n".join(filter(None, sections))


def read_devices(directory: Path) -> dict[Path, dict[str, Results]]:
    """The result files by device directory and part, the device with the most timings first; of
    devices with as many, the one that was measured last.

    Raises:
        InputError: there is none, or one cannot be read.
    """
    found: dict[Path, dict[str, Results]] = {}
    for folder in sorted(path for path in directory.glob("*") if path.is_dir()):
        paths = {part: folder / f"{part}.json" for part in PARTS}
        parts = {part: result_files.read(path) for part, path in paths.items() if path.is_file()}
        for part, measured in parts.items():
            if measured.part != part:
                raise InputError(f"{paths[part]} holds results of {measured.part}, not of {part}")
            if measured.device != _device(parts):
                raise InputError(
                    f"{paths[part]} is of {measured.device}, but others in its folder are of "
                    f"{_device(parts)}: a folder holds one device's results"
                )
        if parts:
            found[folder] = parts
    if not found:
        names = ", ".join(f"{part}.json" for part in PARTS)
        raise InputError(f"no results in {directory}: expected <device>/ with {names}")
    first = sorted(found, key=lambda folder: _weight(found[folder]), reverse=True)
    return {folder: found[folder] for folder in first}


def _weight(parts: dict[str, Results]) -> tuple[int, str]:
    """Of a device: how many timings there are, and when its newest file was made."""
    records = (record for measured in parts.values() for record in measured.records)
    timings = sum(record["median_us"] is not None for record in records)
    return timings, max(measured.date for measured in parts.values())


def _section(folder: Path, parts: dict[str, Results], base: Path, full: bool) -> str:
    """One device's results; `base` is where the Markdown file lies that links the charts."""
    level = "##" if full else "###"  # a README has a heading of its own above
    lines = [f"{level} {_device(parts)}"]
    bodies = {"agreement": _agreement, "trust": _trust, "fusion": _fusion}
    for part, measured in parts.items():
        body = bodies.get(part, _timings)
        for title, chart, text in body(measured, full):
            drawn = chart is not None and (folder / chart).is_file()
            if drawn or text:
                lines.append(f"{level}# {title}")
            if drawn:
                lines.append(f"![{title}]({_link(folder / chart, base)})")
            if text:
                lines.append(text)
        if full and part != "trust" and (reasons := markdown.notes(measured)):
            lines.append("Without a number, and why:\n\n" + "\n".join(reasons))
    lines.append(f"<sub>{_provenance(parts)}</sub>")
    return "\n\n".join(lines)


def _device(parts: dict[str, Results]) -> str:
    return next(iter(parts.values())).device


def _provenance(parts: dict[str, Results]) -> str:
    return markdown.provenance(list(parts.values()))


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _agreement(measured: Results, full: bool) -> Iterator[tuple[str, str | None, str]]:
    yield "Agreement", None, agreement_line(measured)
    if not full:
        return
    for family, records in layer_families(measured).items():
        title = f"{_tower_title(family, records)}, layer by layer"
        yield title, f"{family}-layers.svg", layer_table(records)


def _trust(measured: Results, full: bool) -> Iterator[tuple[str, str | None, str]]:
    yield "Under stress", None, trust_table(measured) if full else trust_line(measured)


def _fusion(measured: Results, full: bool) -> Iterator[tuple[str, str | None, str]]:
    cells = cells_of(measured.records)
    texts = [verdict_line(cells)]
    if full:
        texts += [markdown.table(*best_table(cells)), markdown.table(*times_table(cells))]
    texts.append(_METHODS["fusion"])
    yield "How much of the rotation to fuse", "fusion.svg", "\n\n".join(texts)


def _timings(measured: Results, full: bool) -> Iterator[tuple[str, str | None, str]]:
    method = _METHODS[measured.part]  # told once, below the first tables
    if full and measured.part == "kernels":
        method = f"{method} {_RATIOS}"
    for family, workloads in families(measured).items():
        if family in _DETAIL_FAMILIES and not full:
            continue
        details = _KERNEL_DETAILS if measured.part == "kernels" else _TOWER_DETAILS
        tables = (timing_table, *details) if full else (timing_table,)
        texts = []
        if full or family in _README_TABLES:
            texts = [table(measured, workloads) for table in tables]
            texts.append(f"{method} {_REMARKS.get(family, '')}".strip())
            method = ""
        yield _title(family), f"{family}.svg", "\n\n".join(filter(None, texts))


def _draw(folder: Path, parts: dict[str, Results]) -> None:
    try:
        from compare.report import charts
    except ImportError:
        raise UnavailableError(
            "charts need Matplotlib: pip install '.[compare]' in the clone"
        ) from None
    for part, measured in parts.items():
        if part == "agreement":
            for family, records in layer_families(measured).items():
                path = folder / f"{family}-layers.svg"
                charts.layer_chart(records, _tower_title(family, records), path)
        elif part == "fusion":
            charts.fusion_chart(cells_of(measured.records), folder / "fusion.svg")
        elif part != "trust":
            for family, workloads in families(measured).items():
                path = folder / f"{family}.svg"
                if ranking(measured, workloads):
                    charts.timing_chart(measured, workloads, _title(family), path)
                else:
                    path.unlink(missing_ok=True)  # an earlier run's


def _title(family: str) -> str:
    return _TITLES.get(family, family)


def _tower_title(family: str, records: Sequence[RecordDict]) -> str:
    """The title of a tower compared layer by layer, which without a GPU is a small one."""
    depth = 1 + max(record["layer"] for record in records if record.get("layer") is not None)
    if depth < TOWERS[family].depth:
        return f"Small tower of {depth} layers, built as that of {_MODELS[family]}"
    return _title(family)
