"""Result files as charts that can be read at a glance; SVG on white, labelled in place."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from compare.bench.fusion_table import Cell
from compare.common.console import number
from compare.common.result_files import Results, write_text
from compare.report.grouping import OURS, RecordDict, ranking, size, timed

_PANELS_SIDE_BY_SIDE = 7
_INK, _SOFT_INK, _PEER = "#1f2937", "#6b7280", "#cbd5e1"
_COLOURS = {
    "triton": "#0f766e",
    "pallas": "#2563eb",
    "pallas by XLA": "#93b4f5",
    "torch": "#0f766e",
    "flax": "#2563eb",
    "accelerated": "#0f766e",
    "accelerated, compiled": "#0f766e",
}
_STYLE = {
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _SOFT_INK,
    "axes.labelcolor": _INK,
    "xtick.color": _SOFT_INK,
    "ytick.color": _INK,
    "svg.hashsalt": "fused-rope-attention",  # the same results give the same file
}


def timing_chart(results: Results, workloads: Sequence[str], title: str, path: Path) -> None:
    """Bars of one family of workloads, one panel for each, with the floor as a line.

    Where there are more panels than can be read side by side, they stand in rows.
    Peers that differ only in their rotation share a bar: that of the fastest on each workload.

    Args:
        results: of any part but agreement.
        workloads: panels, from left to right and from above.
        title: what is timed.
        path: the SVG to write.
    """
    unit, scale = ("µs", 1.0) if results.part == "kernels" else ("ms", 1e3)
    bars = _bars(ranking(results, workloads))
    names = list(bars)
    rows = -(-len(workloads) // _PANELS_SIDE_BY_SIDE)
    columns = -(-len(workloads) // rows)
    with matplotlib.rc_context(_STYLE):
        height = 0.7 + 0.4 * rows + 0.3 * len(names) * rows
        figure = Figure(figsize=(2.4 + 2.2 * columns, height))
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for panel, workload in zip(panels.flat, workloads, strict=False):
            _draw_bars(panel, results, workload, bars, scale)
        for panel in panels.flat[len(workloads) :]:
            panel.set_axis_off()
        for first in panels[:, 0]:
            first.set_yticks(range(len(names)), names)
            for label, name in zip(first.get_yticklabels(), names, strict=True):
                label.set_fontweight("bold" if name in OURS else "normal")
        figure.suptitle(
            f"{title}, {unit} (lower is better; dashed: floor)", x=0.01, ha="left", fontsize=11
        )
        _save(figure, path)


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
        figure.suptitle(
            f"{title}: relative RMS error of bf16 against Hugging Face's in fp32",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        _save(figure, path)


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
        figure = Figure(figsize=(1 + 2.4 * len(dims), 0.9 + 2.1 * len(names)))
        panels = figure.subplots(len(names), len(dims), squeeze=False, sharex=True, sharey=True)
        for row, name in zip(panels, names, strict=True):
            for panel, head_dim in zip(row, dims, strict=True):
                chosen = [c for c in shown if (c.implementation, c.head_dim) == (name, head_dim)]
                _draw_ways(panel, sorted(chosen, key=lambda cell: cell.length), name)
                panel.set_title(f"{name}, head_dim {head_dim}", loc="left", fontsize=9)
        for panel in panels[-1]:
            panel.set_xlabel("tokens of a segment")
        figure.suptitle(
            'Time of fuse="qk" (solid) and "q" (dashed) over that of "none" (below 1 fusing wins)',
            x=0.01,
            ha="left",
            fontsize=11,
        )
        _save(figure, path)


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
        text = f" {number(time)}" if time else " –"
        panel.text(time, row, text, va="center", fontsize=8)
    floors = [record["floor_us"] for record in records.values() if record.get("floor_us")]
    if floors:
        panel.axvline(floors[0] / scale, color=_INK, linewidth=1, linestyle=(0, (3, 2)))
    panel.set_xlim(0, 1.25 * (max(times) or 1.0))
    panel.set_xticks([])
    panel.tick_params(left=False)
    panel.set_title(_size(workload), loc="left", fontsize=9)
    _clean(panel)
    panel.spines["bottom"].set_visible(False)


def _size(workload: str) -> str:
    """What tells a workload from others of its family: "448 px"."""
    told = size(workload)
    return f"{told} px" if told.isdigit() else told


def _bars(names: Sequence[str]) -> dict[str, list[str]]:
    """The implementations behind each bar, from below; those with one attention share a bar."""
    found: dict[str, list[str]] = {}
    for name in names:
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


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None})
    write_text(drawn.getvalue(), path)
