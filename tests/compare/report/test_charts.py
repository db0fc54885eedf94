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
    with mock.patch.object(charts, "_save", lambda figure, _: shown.extend(figure.axes)):
        charts.timing_chart(synthetic.as_results("kernels", records), workloads, "frames", path)
    assert [panel.get_title(loc="left") for panel in shown] == [f"{i} px" for i in range(9)] + [""]
    assert [panel.axison for panel in shown] == [True] * 9 + [False]
    assert len({panel.get_position().y0 for panel in shown}) == 2
    for first in (shown[0], shown[5]):
        assert [label.get_text() for label in first.get_yticklabels()] == ["triton"]


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
    with mock.patch.object(Axes, "text") as drawn:
        charts.timing_chart(synthetic.as_results("kernels", records), workloads, "frames", path)
    assert [call.args[2] for call in drawn.call_args_list] == [" 11", " 24", " 33"]
