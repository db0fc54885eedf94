"""Result files as charts that can be read at a glance; SVG on white, labelled in place."""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from compare.bench.fusion_table import Cell
from compare.common.console import number
from compare.common.result_files import Results, write_text
from compare.report.grouping import OURS, RecordDict, ranking, size, timed
from compare.report.markdown import speedup
from compare.report.summary import SIZES

_PANELS_SIDE_BY_SIDE = 4
_WIDTH = 9.4  # inches, some 900 pixels: a README's width
_INK, _SOFT_INK, _PEER = "#1f2937", "#6b7280", "#cbd5e1"
_COLOURS = {
    "triton": "#0f766e",
    "pallas": "#2563eb",
    "pallas by XLA": "#93b4f5",
    "torch": "#0f766e",
    "flax": "#2563eb",
    "ours, PyTorch": "#0f766e",
    "ours, Flax": "#2563eb",
    "accelerated": "#0f766e",
    "accelerated, compiled": "#0f766e",
}
_STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "text.color": _INK,
    "axes.edgecolor": _SOFT_INK,
    "axes.labelcolor": _INK,
    "xtick.color": _SOFT_INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",  # text as text, a fifth of the size of outlines
    "svg.hashsalt": "fused-rope-attention",  # the same results give the same file
}


def hero_chart(
    bars: Mapping[str, Sequence[tuple[float, float | None]]], device: str, path: Path
) -> None:
    """Whole towers at the four sizes, a panel for each, ours above; speedups on others' bars.

    There is no chart, nor an earlier one any more, where nothing is on record.

    Args:
        bars: of `hero_bars`.
        device: what they were measured on.
        path: the SVG to write.
    """
    if not bars:
        path.unlink(missing_ok=True)
        return
    names = list(reversed(bars))  # from below
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 2.4))
        panels = figure.subplots(1, len(SIZES), sharey=True)
        for index, panel in enumerate(panels):
            _draw_hero_panel(panel, {name: bars[name][index] for name in names})
            panel.set_title(f"{SIZES[index]} px", loc="left", fontsize=10)
        _name_bars(panels[0], names)
        _save(
            figure,
            f"Qwen2.5-VL 7B vision tower, ms an image, {device} (in the bars: our speedup)",
            path,
        )


def _draw_hero_panel(panel: Axes, bars: Mapping[str, tuple[float, float | None]]) -> None:
    longest = max(time_ms for time_ms, _ in bars.values())
    for row, (name, (time_ms, faster)) in enumerate(bars.items()):
        panel.barh(row, time_ms, color=_COLOURS.get(name, _PEER))
        _label_bar(panel, time_ms, row)
        if faster:
            panel.text(0.04 * longest, row, speedup(faster), va="center", fontweight="bold")
    _leave_names_and_bars(panel, 1.3 * longest)


def _name_bars(panel: Axes, names: Sequence[str]) -> None:
    """Names at the left of a row's first panel, ours in bold."""
    panel.set_yticks(range(len(names)), names)
    for label, name in zip(panel.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name in _COLOURS else "normal")


def timing_chart(results: Results, workloads: Sequence[str], title: str, path: Path) -> None:
    """Bars of one family of workloads, one panel for each, with the floor as a line.

    Panels stand in rows, images before clips. Whoever was timed on fewer than half of the workloads
    stands in the table alone, and no row of panels names one that none of them has. Peers that
    differ only in their rotation share a bar: that of the fastest on each workload.

    Args:
        results: of any part but agreement.
        workloads: panels.
        title: what is timed.
        path: the SVG to write.
    """
    unit, scale, calls = ("ms", 1e3, ", each call waited for")
    if results.part == "kernels":
        unit, scale, calls = ("µs", 1.0, "")
    workloads = sorted(
        workloads, key=lambda workload: not size(workload).partition("-")[0].isdigit()
    )
    groups = [
        workloads[start : start + _PANELS_SIDE_BY_SIDE]
        for start in range(0, len(workloads), _PANELS_SIDE_BY_SIDE)
    ]
    named = [_bars(results, group, workloads) for group in groups]
    heights = [len(bars) + 1.2 for bars in named]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.5 + 0.24 * sum(heights)))
        columns = min(_PANELS_SIDE_BY_SIDE, len(workloads))
        panels = figure.subplots(
            len(groups), columns, squeeze=False, sharey="row", height_ratios=heights
        )
        for row, group, bars in zip(panels, groups, named, strict=True):
            for panel, workload in zip(row, group, strict=False):
                _draw_bars(panel, results, workload, bars, scale)
            for panel in row[len(group) :]:
                panel.set_axis_off()
            _name_bars(row[0], list(bars))
        _save(figure, f"{title}, {unit}{calls} (lower is better; dashed: floor)", path)


def layer_chart(records: Sequence[RecordDict], title: str, path: Path) -> None:
    """How far each of one family's bf16 towers is from fp32 after every layer."""
    records = [r for r in records if r.get("layer") is not None]
    names = list(dict.fromkeys(record["implementation"] for record in records))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.2))
        axes = figure.subplots()
        ends = []
        for name in names:
            points = [
                (r["layer"], r["relative_rms_error"])
                for r in records
                if r["implementation"] == name and r["relative_rms_error"] is not None
            ]
            if not points:  # NaN after every layer
                continue
            layers, errors = zip(*points, strict=True)
            colour = _COLOURS.get(name, _SOFT_INK)
            axes.plot(layers, errors, color=colour, linewidth=2 if name in OURS else 1.5)
            ends.append((errors[-1], layers[-1], name, colour))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer")
        _clean(axes)
        _label_ends(axes, sorted(ends))
        _save(figure, f"{title}: relative RMS error of bf16 against Hugging Face's in fp32", path)


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
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.9 + 2.1 * len(names)))
        panels = figure.subplots(len(names), len(dims), squeeze=False, sharex=True, sharey=True)
        for row, name in zip(panels, names, strict=True):
            for panel, head_dim in zip(row, dims, strict=True):
                chosen = [c for c in shown if (c.implementation, c.head_dim) == (name, head_dim)]
                _draw_ways(panel, sorted(chosen, key=lambda cell: cell.length), name)
                panel.set_title(f"{name}, head_dim {head_dim}", loc="left", fontsize=9)
        for panel in panels[-1]:
            panel.set_xlabel("tokens of a segment")
        _save(
            figure,
            'Time of fuse="qk" (solid) and "q" (dashed) over that of "none" (below 1 fusing wins)',
            path,
        )


def crossover(cells: Sequence[Cell], fuse: str) -> float | None:
    """The segment length at which a way starts to take longer than "none", between two measured.

    Args:
        cells: of one series, by length.
        fuse: the way.

    Returns:
        Interpolated in the logarithms; None where it never or always does.
    """
    points = [
        (math.log(cell.length), math.log(cell.times_us[fuse] / cell.times_us["none"]))
        for cell in cells
        if fuse in cell.times_us
    ]
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if y <= 0 < next_y:
            return math.exp(x + (next_x - x) * -y / (next_y - y))
    return None


def _draw_ways(panel: Axes, cells: Sequence[Cell], name: str) -> None:
    panel.axhline(1, color=_SOFT_INK, linewidth=1)
    for fuse, line in (("qk", "-"), ("q", "--")):
        points = [
            (cell.length, cell.times_us[fuse] / cell.times_us["none"])
            for cell in cells
            if fuse in cell.times_us
        ]
        panel.plot(
            [length for length, _ in points],
            [ratio for _, ratio in points],
            line,
            color=_COLOURS.get(name, _INK),
            linewidth=1.5,
        )
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
    _clean(panel)


def _draw_bars(
    panel: Axes, results: Results, workload: str, bars: dict[str, list[str]], scale: float
) -> None:
    records = timed(results, workload)
    times = [_fastest(records, names) / scale for names in bars.values()]
    panel.barh(range(len(bars)), times, color=[_COLOURS.get(name, _PEER) for name in bars])
    for row, time in enumerate(times):
        _label_bar(panel, time, row)
    floors = [record["floor_us"] for record in records.values() if record.get("floor_us")]
    if floors:
        panel.axvline(floors[0] / scale, color=_INK, linewidth=1, linestyle=(0, (3, 2)))
    panel.set_title(_size(workload), loc="left", fontsize=9)
    _leave_names_and_bars(panel, 1.3 * (max(times, default=0) or 1.0))


def _label_bar(panel: Axes, time: float, row: int) -> None:
    """A bar's number at its end, or a dash."""
    place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    panel.annotate(number(time or None), (time, row), **place)


def _leave_names_and_bars(panel: Axes, end: float) -> None:
    panel.set_xlim(0, end)
    panel.set_xticks([])
    panel.tick_params(left=False)
    _clean(panel)
    panel.spines["bottom"].set_visible(False)


def _size(workload: str) -> str:
    """What tells a workload from others of its family: "448 px"."""
    told = size(workload)
    return f"{told} px" if told.isdigit() else told


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


def _fastest(records: dict[str, RecordDict], names: Sequence[str]) -> float:
    """The least time of some implementations, in microseconds; 0 where none has any."""
    return min((records[name]["median_us"] for name in names if name in records), default=0.0)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the lines' ends, pushed apart where they would overlap."""
    gap = 0.06 * axes.get_ylim()[1]
    place = float("-inf")
    for error, layer, name, colour in ends:
        place = max(error, place + gap)
        axes.annotate(
            name,
            (layer, error),
            (layer + 0.4, place),
            color=colour,
            va="center",
            fontweight="bold" if name in OURS else "normal",
            annotation_clip=False,
        )


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None})
    write_text(drawn.getvalue(), path)
