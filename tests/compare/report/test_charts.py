"""Charts of timings, from made-up results."""

from unittest import mock

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from compare.common.result_files import Record
from compare.report import charts
from tests.compare import synthetic


def test_many_workloads_stand_in_rows_with_names_before_each(tmp_path):
    workloads = [f"frames-{side}" for side in range(9)]
    records = [
        Record(w, "triton", framework="torch", median_us=1.0 + i) for i, w in enumerate(workloads)
    ]
    path = tmp_path / "frames.svg"
    shown = []
    with mock.patch.object(charts, "_save", lambda figure, *_: shown.extend(figure.axes)):
        charts.timing_chart(synthetic.as_results("kernels", records), workloads, "frames", path)
    assert [panel.get_title(loc="left") for panel in shown if panel.axison] == [
        f"{i} px" for i in range(9)
    ]
    assert len({panel.get_position().y0 for panel in shown}) == 3
    assert {panel.figure.get_figwidth() for panel in shown} == {9.4}
    for first in (shown[0], shown[4], shown[8]):
        assert [label.get_text() for label in first.get_yticklabels()] == ["triton"]


def test_a_chart_leaves_out_what_was_not_measured():
    """Images stand before clips; whoever has few of the times is in the table alone."""
    workloads = ["tower-448", "tower-video-16x448", "tower-672", "tower-896", "tower-1344"]
    by_name = {
        "torch": workloads,
        "Hugging Face SDPA": workloads[:4],
        "torch, FA3 frames": [workloads[1]],
    }
    records = [
        Record(workload, name, framework="torch", median_us=1e3)
        for name, measured in by_name.items()
        for workload in measured
    ]
    shown = []
    with mock.patch.object(charts, "_save", lambda figure, *_: shown.extend(figure.axes)):
        charts.timing_chart(synthetic.as_results("towers", records), workloads, "towers", None)
    titles = [panel.get_title(loc="left") for panel in shown if panel.axison]
    assert titles == ["448 px", "672 px", "896 px", "1344 px", "video-16x448"]
    for first in (shown[0], shown[4]):
        names = [label.get_text() for label in first.get_yticklabels()]
        assert names == ["Hugging Face SDPA", "torch"]  # from below


def test_the_floor_is_drawn_in_the_unit_of_the_times():
    record = Record("tower-448", "torch", framework="torch", median_us=1e3, floor_us=500.0)
    results = synthetic.as_results("towers", [record])
    with (
        mock.patch.object(charts, "_save"),
        mock.patch.object(Axes, "axvline") as line,
    ):
        charts.timing_chart(results, ["tower-448"], "towers", None)
    assert [call.args[0] for call in line.call_args_list] == [0.5]


def test_the_hero_chart_has_speedups_on_the_others_bars(tmp_path):
    bars = {"ours, PyTorch": [3.0] * 4, "Hugging Face, SDPA": [42.0] * 4}
    path = tmp_path / "hero.svg"
    charts.hero_chart(bars, "Imaginary GPU", path)
    drawn = path.read_text()
    for told in ("14.0x", "42", "1344 px", "Imaginary GPU", "ours, PyTorch"):
        assert f"{told}" in drawn
    charts.hero_chart({}, "Imaginary GPU", path)
    assert not path.exists()


def test_a_chart_shows_the_strongest_peer_of_every_workload(tmp_path):
    """Which rotation is the faster may change from one workload to the next, or one may fail."""
    times = {
        "in-place rope + FA2 varlen": (11.0, 25.0, None),
        "torch.compile rope + FA2 varlen": (12.0, 24.0, 33.0),
    }
    workloads = [f"frames-{side}" for side in (448, 672, 896)]
    records = [
        Record(workload, name, framework="torch", median_us=time)
        for name, of_name in times.items()
        for workload, time in zip(workloads, of_name, strict=True)
    ]
    path = tmp_path / "frames.svg"
    with mock.patch.object(Axes, "annotate") as drawn:
        charts.timing_chart(synthetic.as_results("kernels", records), workloads, "frames", path)
    assert [call.args[0] for call in drawn.call_args_list] == ["11", "24", "33"]
