"""What is made of the times of rotated and added positions, with made-up records."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compare.common import result_files
from compare.common.result_files import Record
from compare.report import embeddings, report
from compare.report.embeddings import Cell, cells_of, targets
from compare.workloads.embeddings import EMBEDDING_WORKLOADS, Shape, parsed
from tests.compare import synthetic

NOTES = Path(report.__file__).parents[1] / "results" / "notes" / "embeddings.md"
SHAPES = (Shape(1, 64, 512), Shape(128, 64, 2048), Shape(128, 64, 512), Shape(4, 4096, 512))
# Microseconds: of ours by way, with tables and with angles inside, and of peers.
WAYS = {"qk": 10.0, "q": 12.0, "none": 20.0, "auto": 10.2}
INSIDE = {"qk": 9.0, "auto": 9.1}
PEERS = {"SDPA": ("torch", 32.0), "math SDPA": ("torch", 21.0), "XLA attention": ("jax", 40.0)}


def records(slower=1.0, auto=10.2):
    """All families of some shapes; `slower` is Pallas over Triton, `auto` the time of that way."""
    made = []
    for name in EMBEDDING_WORKLOADS:
        embedding, precision, shape = parsed(name)
        if shape not in SHAPES:
            continue
        blank = Record(name, "", floor_us=6.0, relative_rms_error=1e-6, passed=True)
        details = {"angles": "tables"} | ({"max_abs_error": 2e-5} if precision == "fp32" else {})
        sources = [("tables", WAYS | {"auto": auto})]
        sources += [("inside", INSIDE)] if embedding == "sinusoidal" else []
        for twin, framework, factor in (("triton", "torch", 1.0), ("pallas", "jax", slower)):
            made += [
                replace(
                    blank,
                    implementation=twin,
                    framework=framework,
                    fuse=fuse,
                    ours=True,
                    median_us=us * factor,
                    profiler_us=0.9 * us * factor if fuse == "auto" else None,
                    details=details | {"angles": angles},
                )
                for angles, ways in sources
                for fuse, us in ways.items()
            ]
        made += [
            replace(
                blank,
                implementation=f"torch.compile {embedding} + {peer}",
                framework=framework,
                median_us=us,
                details=details,
            )
            for peer, (framework, us) in PEERS.items()
        ]
        reason = "not installed: ModuleNotFoundError: ffpa_attn"
        made.append(replace(blank, implementation="x + ffpa-attn", note=reason, details=details))
    return made


def cells(**changes):
    return cells_of(synthetic.as_results("embeddings", records(**changes)))


def row(text, start):
    [found] = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return found.strip("| ").split(" | ")


def test_targets_hold_or_are_missed():
    text = targets(cells())
    # 32 over 10.2: above 3; of the floor nothing is asked of one segment.
    assert row(text, "fp32, 1x64x512")[1:] == [
        *("32", "10.2 / 10.2", "3.1x / 3.1x", "3x", "59%", "", "holds"),
    ]
    assert row(text, "fp32, 128x64x2048")[-3:] == ["59%", "55%", "holds"]
    assert row(text, "bf16, 128x64x2048")[-3:] == ["59%", "", "holds"]
    best = row(text, "bf16, 4x4096x512, its best backend")
    assert (best[1], best[3], best[4], best[-1]) == ("21", "2.1x / 2.1x", "2x", "holds")
    assert "bf16, 4x4096x512 |" not in text
    slow = targets(cells(auto=11.0))
    assert row(slow, "fp32, 1x64x512")[-1] == "**missed**"
    assert row(slow, "fp32, 128x64x2048")[-3:] == ["55%", "55%", "**missed**"]
    assert row(slow, "bf16, 4x4096x512")[-1] == "**missed**"


def test_bounds_tell_the_worst_cell():
    text = targets(cells(slower=1.2))
    assert (
        "Sinusoidal over RoPE, at most 1.1: holds, in 16 of 16 cells; the largest is 0.89" in text
    )
    assert "over the best way, at most 1.05: holds, in 48 of 48 cells; the largest is 1.02" in text
    assert "Pallas over Triton, by the profiler for both, at most 1.15: **missed**, in 0 of" in text
    assert "1.20 (1x64x512, RoPE, fp32, tables)" in text
    assert "**missed**, in 16 of 48 cells; the largest is 1.10" in targets(cells(auto=11.0))
    assert "of any element at most 5e-05: the largest is 2.0e-05" in text
    assert "against a rule: 0 of" in text


def test_a_time_that_is_missing_is_a_target_missed():
    made = [
        replace(r, median_us=None, profiler_us=None, passed=False) if r.ours else r
        for r in records()
    ]
    text = targets(cells_of(synthetic.as_results("embeddings", made)))
    assert row(text, "fp32, 128x64x512")[2:] == [
        *("– / –", "– / –", "1.5x", "–", "55%", "**missed**"),
    ]
    assert "Sinusoidal over RoPE: not measured." in text


def test_ours_is_the_faster_source_of_angles():
    cell = cells()["sinusoidal", "bf16", SHAPES[0]]
    assert cell.ours_us("triton") == 9.1
    assert cell.speedups(cell.peer_us("SDPA")) == pytest.approx([32 / 9.1] * 2)
    assert str(cell) == "1x64x512, sinusoidal, bf16"
    assert Cell("rope", "fp32", SHAPES[0], []).ours_us("pallas") is None


def test_tables_of_ways_and_peers():
    of = embeddings.families(cells(slower=2.0))["sinusoidal", "fp32"]
    assert [cell.shape for cell in of] == [SHAPES[0], SHAPES[2], SHAPES[1], SHAPES[3]]
    ways = row(embeddings.ways_table(of), "128x64x512")
    assert ways[1:4] == ["6", "**10** / 12 / 20 / 10.2", "**20** / 24 / 40 / 20.4"]
    assert ways[4] == "**9** / – / – / 9.1"
    assert row(embeddings.peers_table(of), "128x64x512")[1:] == [
        *("32 (3.5x)", "21 (2.3x)", "40 (2.2x)"),
    ]


def test_write_ups_stand_beside_ours():
    text = embeddings.write_ups_table(cells(slower=2.0))
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if "K beforehand, Q inside: theirs" in line)
    assert lines[at].endswith("| 1.66x | 1.45x | 1.40x | – |")
    assert lines[at + 1].endswith("| – | 1.67x / 1.67x | – | – |")
    assert lines[at + 2].endswith("| – | 1.67x / 1.67x | 1.67x / 1.67x | – |")
    assert lines[at + 4].endswith("| – | 0.012 / 0.024 | – | – |")
    assert "angles computed there: theirs | – | 2.0x | 1.9x | 1.4x |" in text
    assert "| 2.2x / 2.2x |" in text  # none by tables over qk by positions


def test_the_report_and_its_chart(tmp_path):
    results = synthetic.as_results("embeddings", records())
    path = result_files.default_path("embeddings", results.device, tmp_path)
    result_files.write(results, path)
    report.write_report(tmp_path, tmp_path / "report.md")
    text = (path.parent / "report.md").read_text()
    for title in ("RoPE in fp32", "RoPE in bf16", "Sinusoidal in fp32", "Sinusoidal in bf16"):
        assert f"### {title}" in text
    assert "(embeddings.svg)" in text
    assert "- x + ffpa-attn: not installed" in text
    chart = path.parent / "embeddings.svg"
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")

    page = tmp_path / "page.md"
    page.write_text("\n".join(m for b in ("embeddings", "write-ups") for m in report.markers(b)))
    report.update_readme(page, tmp_path, tmp_path / "report.md")
    assert "| fp32, 1x64x512 | 32 | 10.2 / 10.2 |" in page.read_text()
    assert "theirs, ms" in page.read_text()

    without = [r for r in records() if "SDPA" not in r.implementation]
    result_files.write(synthetic.as_results("embeddings", without), path)
    report.write_report(tmp_path, tmp_path / "report.md")
    assert not chart.exists()


def test_a_page_says_where_nothing_is_on_record(tmp_path):
    made = synthetic.as_results(
        "kernels", synthetic.timing_records(("windows",), synthetic.KERNELS)
    )
    result_files.write(made, result_files.default_path("kernels", made.device, tmp_path))
    text = report.renewed(NOTES, tmp_path, tmp_path / "report.md")
    assert text.count("No run of `python -m compare embeddings` is on record yet.") == 2


def test_embeddings_are_no_reason_to_show_a_device_first(tmp_path):
    times = synthetic.timing_records(("windows",), synthetic.KERNELS)
    for device, part, of_part in (("A", "kernels", times), ("B", "embeddings", records())):
        made = replace(synthetic.as_results(part, of_part), device=device)
        result_files.write(made, result_files.default_path(part, device, tmp_path))
    assert [folder.name for folder in report.read_devices(tmp_path)] == ["a", "b"]
