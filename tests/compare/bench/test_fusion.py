"""The grid of segment lengths, and what is made of its times."""

import sys
from unittest import mock
from xml.etree import ElementTree

import pytest

pytest.importorskip("jax")

from compare.agreement.oracle import unfused
from compare.bench import fusion
from compare.bench.ceilings import Ceilings
from compare.bench.fusion_table import Cell, best_table, cells_of, times_table, verdict_line
from compare.implementations.kernels import KernelImplementation, pallas
from compare.workloads.kernels import KernelWorkload, variant
from tests.compare.clocks import stand_in_clocks

CEILINGS = Ceilings(4e9, 4e9, 8e14)
LENGTHS = (16, 32, 64, 128, 256, 576, 1024, 2304, 4096, 9216)


def test_the_grid():
    whole = [w for w in fusion.grid() if w.rotary_dim is None]
    shapes = [(int(w.lengths.max()), w.head_dim) for w in whole]
    assert shapes == [(length, dim) for dim in (64, 72, 80, 128) for length in LENGTHS]
    for workload in fusion.grid():
        assert 8192 <= workload.tokens <= 9216
        assert set(workload.lengths) == {workload.lengths.max()}
    partial = {(w.head_dim, w.rotary_dim) for w in fusion.grid() if w.rotary_dim}
    halves = {(64, 32), (72, 36), (80, 40), (128, 64)}
    assert partial == halves | {(64, 16), (72, 16), (80, 20), (128, 32)}
    assert len({w.name for w in fusion.grid()}) == len(fusion.grid())


def way(name, us, wrong=False):
    """An implementation that takes a made-up time; both frameworks' stand-ins run in PyTorch."""

    def prepare(workload):
        out = unfused(workload.inputs())

        def call(*arguments):
            return out * 2 if wrong else out.clone()

        call.us = us
        return call

    return KernelImplementation(name, "torch", prepare, ours=True)


TINY = variant(KernelWorkload("segments-16", "frames", ((1, 4, 4),) * 2, heads=1), head_dim=64)


def test_without_jax_its_twin_has_no_time_and_the_other_has(monkeypatch):
    stand_in_clocks(monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pallas_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)
    [records] = fusion.measure_fusion(CEILINGS, [TINY], {"qk": [way("triton", 11.0), pallas("qk")]})
    assert [record.median_us for record in records] == [11.0, None]
    assert records[1].note.startswith("not installed: ModuleNotFoundError: import of jax")
    (cell,) = cells_of([record.to_json() for record in records])
    assert (cell.implementation, cell.auto) == ("triton", "qk")


def test_every_way_is_timed_beside_its_error(monkeypatch, capsys):
    stand_in_clocks(monkeypatch)
    ways = {"qk": [way("triton", 11.0)], "q": [way("triton", 8.0, wrong=True)]}
    ways["none"] = [way("triton", 10.0)]
    [records] = fusion.measure_fusion(CEILINGS, [TINY], ways)
    assert [(r.fuse, r.median_us, r.passed) for r in records] == [
        ("qk", 11.0, True),
        ("q", None, False),
        ("none", 10.0, True),
    ]
    assert records[0].relative_rms_error < 4e-3
    (cell,) = cells_of([record.to_json() for record in records])
    assert cell == Cell("triton", 64, 64, 16, "qk", {"qk": 11.0, "none": 10.0})
    printed = capsys.readouterr().out
    assert "no time for triton q on segments-16 head_dim=64: not timed" in printed
    assert "in 0 of 1 cells. Not in: triton, 64 at 16 (none, auto 1.10 !)" in printed


def test_a_way_that_cannot_run_does_not_end_the_run(monkeypatch):
    stand_in_clocks(monkeypatch)

    def prepare(workload):
        raise ImportError("no such library")

    broken = KernelImplementation("triton", "torch", prepare, ours=True)
    [records] = fusion.measure_fusion(
        CEILINGS, [TINY], {"qk": [broken], "none": [way("triton", 10.0)]}
    )
    assert "no such library" in records[0].note
    assert records[1].median_us == 10.0


@pytest.mark.parametrize(
    ("dtype", "taken", "partial"),
    [("bfloat16", False, "q"), ("bfloat16", True, "none"), ("float32", False, "q")],
)
def test_auto_is_what_the_packages_say(monkeypatch, dtype, taken, partial):
    """Whatever GPU is here; taken: whether the warp-specialized kernel is."""
    for twin in ("pallas_kernels", "triton_kernels"):
        monkeypatch.setattr(f"{twin}.launching.choose.is_warp_specialized", lambda *_: taken)
    for implementation in fusion.our_ways()["qk"]:
        for name, expected in (
            ("segments-16 head_dim=80", "qk"),
            ("segments-9216 head_dim=80", "none"),
            ("segments-9216 head_dim=80 rotary_dim=40", partial),
        ):
            (workload,) = [w for w in fusion.grid() if w.name == name]
            assert fusion.default_fuse(implementation, variant(workload, dtype=dtype)) == expected


def cells():
    """Fusing both wins below 100 tokens, and "auto" takes it up to 64."""
    return [
        Cell(name, 80, 80, n, "qk" if n <= 64 else "none", {"qk": n, "q": 200.0, "none": 100.0})
        for name in ("triton", "pallas")
        for n in (16, 64, 256)
    ]


def test_tables():
    made_up = cells()
    assert all(cell.holds for cell in made_up)
    assert verdict_line(made_up).endswith("within 5% of the fastest way in 6 of 6 cells.")
    headings, rows = best_table(made_up)
    assert headings == ["fastest way", "16", "64", "256"]
    assert rows[0] == ["triton, 80", "qk", "qk", "none"]
    assert times_table(made_up)[1][1] == [
        "pallas, 80",
        *("16 / 200 / 100", "64 / 200 / 100", "256 / 200 / 100"),
    ]
    other = Cell("triton", 80, 80, 16, "q", {"qk": 1.0, "q": 2.0, "none": 3.0})
    assert times_table([other], best="**{}**")[1] == [["triton, 80", "**1** / 2 / 3"]]
    partial = Cell("triton", 80, 40, 64, "qk", {"none": 1.0})
    assert partial.series == "triton, 80 of which 40 rotate"
    assert not partial.holds


def test_chart(tmp_path):
    charts = pytest.importorskip("compare.report.charts")
    charts.fusion_chart(cells(), tmp_path / "fusion.svg")
    assert ElementTree.parse(tmp_path / "fusion.svg").getroot().tag.endswith("svg")
    partial = Cell("triton", 80, 40, 32, "qk", {"qk": 1.0, "none": 2.0})
    drawn = []
    with mock.patch.object(charts, "_draw_ways", lambda _, cells, __: drawn.extend(cells)):
        charts.fusion_chart([*cells(), partial], tmp_path / "fusion.svg")
    assert drawn == cells()
    with mock.patch.object(charts.Axes, "axvline") as line:
        charts.fusion_chart(cells(), tmp_path / "fusion.svg")
    assert [call.args[0] for call in line.call_args_list] == [64, 64]
    of_triton = cells()[:3]
    assert charts.crossover(of_triton, "qk") == pytest.approx(100)
    assert charts.crossover(of_triton, "q") is None
    assert charts.crossover(of_triton[:2], "qk") is None
