"""Result files as charts that can be read at a glance; SVG on white, labelled in place."""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from compare.bench.fusion_table import Cell
from compare.common.console import number
from compare.common.result_files import Results, write_text
from compare.report.embeddings import EMBEDDINGS, Cells
from compare.report.grouping import (
    KERNELS,
    OURS,
    UNITS,
    Column,
    RecordDict,
    kind,
    ranking,
    size,
    timed,
)
from compare.report.markdown import speedup
from compare.report.summary import SIZES

_PANELS_SIDE_BY_SIDE = 4
_WIDTH = 9.4  # inches, some 900 pixels: a README's width
_INK, _SOFT_INK, _PEER = "#1f2937", "#6b7280", "#cbd5e1"
_PYTORCH = ("triton", "torch", "ours, PyTorch", "accelerated", "accelerated, compiled")
_COLOURS = {
    **dict.fromkeys(_PYTORCH, "#0f766e"),
    **dict.fromkeys(("pallas", "flax", "ours, Flax"), "#2563eb"),
    "pallas by XLA": "#93b4f5",
}
_STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "text.color": _INK,
    "axes.edgecolor": _SOFT_INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": _SOFT_INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",  # text as text, a fifth of the size of outlines
    "svg.hashsalt": "fused-rope-attention",  # the same results give the same file
}
_styled = matplotlib.rc_context(_STYLE)


@_styled
def hero_chart(bars: Mapping[str, Sequence[float]], device: str, path: Path) -> None:
    """Bars of `hero_bars`, a panel for each size, ours above; speedups on others' bars.

    There is no chart, nor an earlier one any more, where nothing is on record.
    """
    if not bars:
        path.unlink(missing_ok=True)
        return
    figure = Figure(figsize=(_WIDTH, 2.4))
    panels = figure.subplots(1, len(SIZES), sharey=True)
    for panel, size_px, *times in zip(panels, SIZES, *bars.values(), strict=True):
        from_below = dict(reversed(list(zip(bars, times, strict=True))))
        _draw_bars(panel, from_below, ours=times[0])
        panel.set_title(f"{size_px} px", loc="left", fontsize=10)
    _name_bars(panels[0], list(reversed(bars)))
    title = f"Qwen2.5-VL 7B vision tower, ms an image, {device} (in the bars: our speedup)"
    _save(figure, title, path)


@_styled
def timing_chart(results: Results, workloads: Sequence[str], title: str, path: Path) -> None:
    """Bars of one family of workloads, one panel for each, with the floor as a line.

    Panels stand in rows, images before clips. Whoever was timed on fewer than half of the workloads
    stands in the table alone, and no row of panels names one that none of them has. Peers that
    differ only in their rotation share a bar: that of the fastest on each workload. There is no
    chart, nor an earlier one any more, where nobody has a time.
    """
    if not ranking(results, workloads):
        path.unlink(missing_ok=True)
        return
    workloads = sorted(workloads, key=lambda name: not size(name).partition("-")[0].isdigit())
    side_by_side = min(_PANELS_SIDE_BY_SIDE, len(workloads))
    starts = range(0, len(workloads), side_by_side)
    groups = [workloads[start : start + side_by_side] for start in starts]
    named = [_bars(results, group, workloads) for group in groups]
    heights = [len(bars) + 1.2 for bars in named]
    of_kind = kind(results, workloads)
    unit, unit_us = UNITS[of_kind]
    figure = Figure(figsize=(_WIDTH, 0.5 + 0.24 * sum(heights)))
    panels = figure.subplots(
        len(groups), side_by_side, squeeze=False, sharey="row", height_ratios=heights
    )
    for row, group, bars in zip(panels, groups, named, strict=True):
        for panel, workload in zip(row, group, strict=False):
            records = timed(results, workload)
            times = {bar: _fastest(records, names) / unit_us for bar, names in bars.items()}
            floors = [record["floor_us"] for record in records.values() if record.get("floor_us")]
            floor = floors[0] / unit_us if floors else None
            _draw_bars(panel, times, floor)
            told = size(workload)
            panel.set_title(f"{told} px" if told.isdigit() else told, loc="left", fontsize=9)
        for panel in row[len(group) :]:
            panel.set_axis_off()
        _name_bars(row[0], list(bars))
    calls = "" if of_kind in ("kernels", "training") else ", each call waited for"
    _save(figure, f"{title}, {unit}{calls} (lower is better; dashed: floor)", path)


@_styled
def layer_chart(records: Sequence[RecordDict], title: str, path: Path) -> None:
    """How far each of one family's bf16 towers is from fp32 after every layer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        # Where there is no error, it was NaN.
        if record.get("layer") is not None and record["relative_rms_error"] is not None:
            point = record["layer"], record["relative_rms_error"]
            lines.setdefault(record["implementation"], []).append(point)
    figure = Figure(figsize=(7, 3.2))
    axes = figure.subplots()
    for name, points in lines.items():
        colour = _COLOURS.get(name, _SOFT_INK)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2 if name in OURS else 1.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    _label_ends(axes, sorted((points[-1][::-1], name) for name, points in lines.items()))
    _save(figure, f"{title}: relative RMS error of bf16 against Hugging Face's in fp32", path)


@_styled
def fusion_chart(cells: Sequence[Cell], path: Path) -> None:
    """Time of "qk" and of "q" over that of "none" against the segments' length.

    A panel for each head_dim, the frameworks one above the other; partial rotations are left to the
    table. A ring marks where "qk" stops paying, the grey line where fuse="auto" stops taking it.
    There is no chart, nor an earlier one any more, where no cell has a time of "none".
    """
    shown = [cell for cell in cells if cell.rotary_dim == cell.head_dim and "none" in cell.times_us]
    if not shown:
        path.unlink(missing_ok=True)
        return
    names = list(dict.fromkeys(cell.implementation for cell in shown))
    dims = sorted({cell.head_dim for cell in shown})
    figure = Figure(figsize=(_WIDTH, 0.9 + 2.1 * len(names)))
    panels = figure.subplots(len(names), len(dims), squeeze=False, sharex=True, sharey=True)
    for panel, (name, head_dim) in zip(panels.flat, product(names, dims), strict=True):
        chosen = [c for c in shown if (c.implementation, c.head_dim) == (name, head_dim)]
        _draw_ways(panel, sorted(chosen, key=lambda cell: cell.length), name)
        panel.set_title(f"{name}, head_dim {head_dim}", loc="left", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("tokens of a segment")
    title = 'Time of fuse="qk" (solid) and "q" (dashed) over that of "none" (below 1 fusing wins)'
    _save(figure, title, path)


@_styled
def embeddings_chart(cells: Cells, path: Path) -> None:
    """Speedup over the compiled embedding and SDPA against the columns of a head.

    A panel for each embedding and precision; of each length the cells of most segments. There is no
    chart, nor an earlier one any more, where no cell has both times.
    """
    panels_of: dict[tuple[str, str], dict[tuple[str, int], dict[int, float]]] = {}
    for cell in sorted(cells.values(), key=lambda cell: cell.shape.segments):
        for twin, ratio in zip(KERNELS, cell.speedups(cell.peer_us("SDPA")), strict=True):
            if ratio and cell.shape.segments > 1:
                lines = panels_of.setdefault((cell.embedding, cell.precision), {})
                lines.setdefault((twin, cell.shape.length), {})[cell.shape.width] = ratio
    if not panels_of:
        path.unlink(missing_ok=True)
        return
    figure = Figure(figsize=(_WIDTH, 0.9 + 2.4 * -(-len(panels_of) // 2)))
    panels = figure.subplots(-(-len(panels_of) // 2), 2, squeeze=False, sharex=True, sharey=True)
    for panel, ((embedding, precision), lines) in zip(panels.flat, panels_of.items(), strict=False):
        panel.axhline(1, color=_SOFT_INK, linewidth=1)
        for (twin, length), points in sorted(lines.items()):
            style = {16: ":", 64: "-", 1024: "--"}.get(length, "-.")
            points = sorted(points.items())
            panel.plot(*zip(*points, strict=True), style, color=_COLOURS[twin], linewidth=1.5)
        panel.set_title(f"{EMBEDDINGS.get(embedding, embedding)}, {precision}", loc="left")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_minor_locator(NullLocator())
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
    for panel in panels.flat[len(panels_of) :]:
        panel.set_axis_off()
    for panel in panels[-1]:
        panel.set_xlabel("columns of a head")
    title = "Speedup over compiled embedding + SDPA: Triton green, Pallas blue"
    _save(figure, f"{title}; segments of 16 (dotted), 64, 1,024 (dashed)", path)


def crossover(cells: Sequence[Cell], fuse: str) -> float | None:
    """The segment length at which a way starts to take longer than "none", of one series by length.

    Between two measured ones, interpolated in the logarithms; None where it never or always does.
    """
    points = zip(*(map(math.log, values) for values in _ratios(cells, fuse)), strict=True)
    for (x, y), (next_x, next_y) in pairwise(points):
        if y <= 0 < next_y:
            return math.exp(x + (next_x - x) * -y / (next_y - y))
    return None


def _ratios(cells: Sequence[Cell], fuse: str) -> tuple[list[int], list[float]]:
    """Lengths of the cells that have the time of a way, and that time over that of "none"."""
    cells = [cell for cell in cells if fuse in cell.times_us]
    ratios = [cell.times_us[fuse] / cell.times_us["none"] for cell in cells]
    return [cell.length for cell in cells], ratios


def _draw_ways(panel: Axes, cells: Sequence[Cell], name: str) -> None:
    panel.axhline(1, color=_SOFT_INK, linewidth=1)
    for fuse, line in (("qk", "-"), ("q", "--")):
        colour = _COLOURS.get(name, _INK)
        panel.plot(*_ratios(cells, fuse), line, color=colour, linewidth=1.5)
    if length := crossover(cells, "qk"):
        panel.plot(length, 1, "o", markerfacecolor="white", color=_INK, markersize=6)
        panel.annotate(f"{length:.0f}", (length, 1), (4, 6), textcoords="offset points", fontsize=8)
    taken = [cell.length for cell in cells if cell.auto == "qk"]
    if taken and len(taken) < len(cells):
        panel.axvline(max(taken), color=_PEER, linewidth=1, linestyle=(0, (3, 2)))
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(LogLocator(4))
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    panel.yaxis.set_minor_locator(NullLocator())
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")


def _draw_bars(
    panel: Axes, times: Mapping[str, float], floor: float | None = None, ours: float | None = None
) -> None:
    """Bars from below, each with its number at its end, or a dash.

    Where the time of ours is given, others' bars hold its speedup over them.
    """
    panel.barh(range(len(times)), times.values(), color=[_COLOURS.get(n, _PEER) for n in times])
    longest = max(times.values(), default=0) or 1.0
    place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    for row, (name, time) in enumerate(times.items()):
        panel.annotate(number(time or None), (time, row), **place)
        if ours and name not in _COLOURS:
            told = speedup(time / ours)
            panel.text(0.04 * longest, row, told, va="center", fontweight="bold")
    if floor:
        panel.axvline(floor, color=_INK, linewidth=1, linestyle=(0, (3, 2)))
    panel.set_xlim(0, 1.3 * longest)
    panel.set_xticks([])
    panel.tick_params(left=False)
    panel.spines["bottom"].set_visible(False)


def _name_bars(panel: Axes, names: Sequence[str]) -> None:
    """Names at the left of a row's first panel, ours in bold."""
    panel.set_yticks(range(len(names)), names)
    for label, name in zip(panel.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name in _COLOURS else "normal")


def _bars(results: Results, shown: Sequence[str], workloads: Sequence[str]) -> dict[str, list[str]]:
    """The implementations behind each bar of some panels, from below; those with one attention
    share a bar. Whoever has no time in these, or in most of all the chart's workloads, has none.
    """
    timings = {workload: timed(results, workload) for workload in workloads}
    found: dict[str, list[str]] = {}
    for name in ranking(results, shown):
        if 2 * sum(name in records for records in timings.values()) >= len(workloads):
            found.setdefault(name.partition(" + ")[2] or name, []).append(name)
    bars = [
        (alike[0] if len(alike) == 1 else f"rope + {attention}", alike)
        for attention, alike in found.items()
    ]
    return dict(reversed(bars))


def _fastest(records: Column, names: Sequence[str]) -> float:
    """The least time of some implementations, in microseconds; 0 where none has any."""
    return min((records[name]["median_us"] for name in names if name in records), default=0.0)


def _label_ends(axes: Axes, ends: Sequence[tuple[tuple[float, int], str]]) -> None:
    """Names at the lines' ends, pushed apart where they would overlap."""
    gap = 0.06 * axes.get_ylim()[1]
    place = float("-inf")
    for (error, layer), name in ends:
        place = max(error, place + gap)
        axes.annotate(
            name,
            (layer, error),
            (layer + 0.4, place),
            color=_COLOURS.get(name, _SOFT_INK),
            va="center",
            fontweight="bold" if name in OURS else "normal",
            annotation_clip=False,
        )


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None})
    write_text(drawn.getvalue(), path)
