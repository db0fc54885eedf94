"""The report, from made-up results; and that the README shows the committed ones."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from compare.common import result_files
from compare.common.errors import InputError
from compare.common.result_files import Record
from compare.report import report
from compare.report.summary import glance_table
from tests.compare import synthetic

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path):
    synthetic.write_all(tmp_path / "results")
    return tmp_path / "results"


def test_report_links_charts_that_are_there(directory):
    out = report.write_report(directory, directory / "report.md")
    text = out.read_text()
    folder = directory / "imaginary-gpu"
    charts = (
        *("windows.svg", "frames.svg", "fusion.svg", "integration.svg"),
        *("tower.svg", "qwen3-tower.svg", "tower-layers.svg", "qwen3-tower-layers.svg"),
    )
    for chart in charts:
        assert f"(imaginary-gpu/{chart})" in text
        assert ElementTree.parse(folder / chart).getroot().tag.endswith("svg")
    assert synthetic.DEVICE in text
    assert "in 12 of 12 cells" in text
    assert "| µs of qk, q, none | 64 | 128 | 1024 |" in text
    assert f"{synthetic.MISSING}: not installed" in text
    assert "### Under stress" in text
    assert "| any cu_seqlens | triton 6,000, pallas 6,000 | nothing wrong; **pallas: 2" in text
    assert not list(directory.rglob("*.unfinished"))


def test_the_same_results_give_the_same_files(directory):
    def files():
        report.write_report(directory, directory / "report.md")
        return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    assert files() == files()


def test_readme_block_is_renewed_and_the_rest_kept(directory, tmp_path):
    out = report.write_report(directory, tmp_path / "elsewhere.md")
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\noutdated\n{report.END}\nbelow\n")
    report.update_readme(readme, directory, out)
    once = readme.read_text()
    assert once.startswith(f"above\n{report.BEGIN}\n### {synthetic.DEVICE}")
    assert once.endswith(f"{report.END}\nbelow\n")
    assert "outdated" not in once
    assert "(results/imaginary-gpu/windows.svg)" in once
    assert "[All of it](elsewhere.md)" in once
    report.update_readme(readme, directory, out)
    assert readme.read_text() == once


def test_a_glance_at_the_results(directory, tmp_path):
    (parts,) = report.read_devices(directory).values()
    lines = glance_table(parts).splitlines()
    assert lines[0] == f"| {synthetic.DEVICE}, bf16 | 448 px | 672 px | 896 px | 1344 px |"
    # Ours of both frameworks, then how many times as long others take, each set against its own.
    starts = [line.rsplit(" | ", 4)[:2] for line in lines[2:]]
    assert [cell for _, cell in starts] == [
        *("**2.48 / 2.64**", "5.5 / 5.2", "6.2 / 5.8", "10.0 / 9.4", "11.2 / 10.6"),
        *("**5 / 5.5**", "2.6 / 3.1") * 2,
    ]
    assert starts[0][0].startswith("| **vision tower of Qwen2.5-VL 7B")
    assert glance_table({"towers": parts["towers"]}).count("\n") == 6
    assert glance_table({"agreement": parts["agreement"]}) == ""

    readme = tmp_path / "README.md"
    glance = f"{report.GLANCE_BEGIN}\nold\n{report.GLANCE_END}\n"
    readme.write_text(f"{glance}{report.BEGIN}{report.END}")
    report.update_readme(readme, directory, directory / report.REPORT)
    assert readme.read_text().startswith(glance.replace("old", "\n".join(lines)))


def test_a_readme_has_one_devices_tables_and_a_glance_at_others(directory, tmp_path):
    """The tables of the one with the most timings, whatever their names and other results."""
    checks = [Record(f"w-{n}", "triton", dtype="bfloat16", passed=True) for n in range(999)]
    checked = replace(synthetic.as_results("agreement", checks), device="Another GPU")
    result_files.write(checked, result_files.default_path("agreement", "another GPU", directory))
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    other = replace(synthetic.as_results("kernels", [record]), device="Another GPU", note="Alone.")
    result_files.write(other, result_files.default_path("kernels", "another GPU", directory))
    readme = tmp_path / "README.md"
    out = report.write_report(directory, directory / report.REPORT)
    first = out.read_text()
    assert first.index(f"## {synthetic.DEVICE}") < first.index("## Another GPU\n\n### Agreement")
    tables, _, glance = report.readme_block(readme, directory, out).partition("### Another GPU\n\n")
    assert tables.startswith(f"### {synthetic.DEVICE}")
    assert "(results/imaginary-gpu/windows.svg)" in tables
    assert glance.startswith("| Another GPU, bf16 | 448 px |")
    assert glance.endswith("\n\n[All of it](results/report.md)")
    assert "####" not in glance
    assert "<sub>agreement (" in first.partition("## Another GPU")[2]
    assert first.rstrip().endswith("<br>\nKernels: Alone.</sub>")
    assert synthetic.DEVICE in report.glance_block(directory)
    assert "Another" not in report.glance_block(directory)


def test_details_stand_in_the_report_alone(directory, tmp_path):
    kernels = result_files.read(directory / "imaginary-gpu" / "kernels.json")
    other = Record("windows_other-1344-head72", "triton", median_us=5.0, framework="torch")
    records = [*kernels.records, other.to_json()]
    result_files.write(
        replace(kernels, records=records), directory / "imaginary-gpu" / "kernels.json"
    )
    out = report.write_report(directory, directory / report.REPORT)
    whole = out.read_text()
    block = report.readme_block(tmp_path / "README.md", directory, out)
    details = (
        *("Windowed attention, other shapes", "layer by layer", "| first call, peak memory |"),
        *("| calls in a row |", "| fastest unfused torch / triton |", "| µs of qk, q, none |"),
        *("| any cu_seqlens |", "| qwen3-tower |"),
    )
    for detail in details:
        assert detail in whole, detail
        assert detail not in block, detail
    for main in ("| windows |", "| frames |", "| tower |", "qwen3-tower.svg)", "in 12 of 12 cells"):
        assert main in whole, main
        assert main in block, main
    assert "12,000 cases of hostile input" in block
    assert "**pallas: 2" in block
    for text in (whole, block):
        assert text.count("Inputs rotate past the L2 cache.") == 1


def test_of_devices_with_as_many_timings_the_one_measured_last_leads(tmp_path):
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    for device, date in (("A", "2026-01-01"), ("B", "2026-01-03"), ("C", "2026-01-02")):
        measured = replace(synthetic.as_results("kernels", [record]), device=device, date=date)
        result_files.write(measured, result_files.default_path("kernels", device, tmp_path))
    assert [folder.name for folder in report.read_devices(tmp_path)] == ["b", "c", "a"]


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END} {report.BEGIN}"])
def test_a_readme_without_markers_is_left_alone(directory, tmp_path, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(InputError, match="followed by"):
        report.update_readme(readme, directory, directory / report.REPORT)
    assert readme.read_text() == text


def test_no_results(tmp_path):
    with pytest.raises(InputError, match=r"no results in .*kernels\.json"):
        report.read_devices(tmp_path)


def test_a_file_under_another_parts_name_is_refused(tmp_path):
    path = result_files.default_path("kernels", "x", tmp_path)
    result_files.write(synthetic.as_results("towers", []), path)
    with pytest.raises(InputError, match=r"kernels\.json holds results of towers, not of kernels"):
        report.read_devices(tmp_path)


def test_another_devices_results_in_a_folder_are_refused(directory):
    path = directory / "imaginary-gpu" / "towers.json"
    result_files.write(replace(result_files.read(path), device="Another GPU"), path)
    with pytest.raises(InputError, match=r"towers\.json is of Another GPU, but .* of Imaginary"):
        report.read_devices(directory)


@pytest.mark.parametrize("part", ["towers", "fusion"])
def test_no_earlier_chart_stands_above_a_run_without_a_time(directory, part):
    folder = directory / "imaginary-gpu"
    report.write_report(directory, directory / "report.md")
    chart = folder / {"towers": "tower.svg", "fusion": "fusion.svg"}[part]
    assert chart.is_file()
    measured = result_files.read(folder / f"{part}.json")
    records = [{**record, "median_us": None} for record in measured.records]
    result_files.write(replace(measured, records=records), folder / f"{part}.json")
    text = report.write_report(directory, directory / "report.md").read_text()
    assert not chart.exists()
    assert f"(imaginary-gpu/{chart.name})" not in text


def test_what_was_noted_of_a_run_stands_beside_its_ceilings(tmp_path):
    """As that some of its workloads had a run, and thereby ceilings, of their own."""
    path = result_files.default_path("towers", "x", tmp_path)
    records = synthetic.timing_records(("tower",), synthetic.TOWERS)
    noted = replace(synthetic.as_results("towers", records), note="672 px in a run of its own.")
    result_files.write(noted, path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert "bf16 products 800 TFLOP/s" in text
    assert text.endswith("Towers: 672 px in a run of its own.</sub>\n")


def test_a_chart_that_cannot_be_written_is_one_sentence_and_leaves_nothing(directory):
    folder = directory / "imaginary-gpu"
    (folder / "windows.svg").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*windows\.svg: Is a directory"):
        report.write_report(directory, directory / "report.md")
    assert {path.suffix for path in folder.iterdir()} == {".json", ".svg"}


def test_the_rotation_says_whose_error_stands_beside_pallas(tmp_path):
    path = result_files.default_path("kernels", "x", tmp_path)
    records = synthetic.timing_records(("windows", "rotate"), synthetic.KERNELS)
    result_files.write(synthetic.as_results("kernels", records), path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert text.count('a call with `fuse="none"`, whose error stands here.') == 1


def test_a_part_without_any_timing_still_makes_a_report(tmp_path):
    missing = Record("windows-448", "triton", floor_us=1.0, note="no such GPU")
    path = result_files.default_path("kernels", "x", tmp_path)
    result_files.write(synthetic.as_results("kernels", [missing]), path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert "triton: no such GPU" in text
    assert "![" not in text


def test_a_tower_without_any_number_still_makes_a_report(tmp_path):
    """NaN after every layer, which a result file cannot hold."""
    path = result_files.default_path("agreement", "x", tmp_path)
    records = [
        Record("tower-photographs", name, relative_rms_error=error, passed=error == 0, layer=layer)
        for name, error in (("torch", 0.0), ("flax", float("nan")))
        for layer in (0, 1, None)
    ]
    result_files.write(synthetic.as_results("agreement", records), path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert "**3 fail**" in text
    assert "| layer 1 | 0 | – |" in text
    assert (path.parent / "tower-layers.svg").is_file()


@pytest.mark.parametrize(
    ("depth", "title"),
    [
        (32, "Whole tower of Qwen2.5-VL 7B, layer by layer"),
        (4, "Small tower of 4 layers, built as that of Qwen2.5-VL 7B, layer by layer"),
    ],
)
def test_a_small_tower_is_not_called_the_whole_one(tmp_path, depth, title):
    """Without a GPU the towers that are compared have four layers."""
    records = [
        Record("tower-photographs", "torch", relative_rms_error=1e-3, passed=True, layer=layer)
        for layer in (*range(depth), None)
    ]
    path = result_files.default_path("agreement", "x", tmp_path)
    result_files.write(synthetic.as_results("agreement", records), path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert f"### {title}\n" in text
    assert f"![{title}](x/tower-layers.svg)" in text


def test_ways_of_fusing_without_one_to_set_them_against_still_make_a_report(tmp_path):
    records = [
        replace(r, median_us=None) if r.fuse == "none" else r for r in synthetic.fusion_records()
    ]
    path = result_files.default_path("fusion", "x", tmp_path)
    result_files.write(synthetic.as_results("fusion", records), path)
    text = report.write_report(tmp_path, tmp_path / "report.md").read_text()
    assert "How much of the rotation to fuse" in text
    assert "![" not in text


def test_a_workload_without_any_timing_still_gets_a_panel(tmp_path):
    records = synthetic.timing_records(("windows",), synthetic.KERNELS)
    records = [replace(r, median_us=None) if r.workload == "windows-448" else r for r in records]
    path = result_files.default_path("kernels", "x", tmp_path)
    result_files.write(synthetic.as_results("kernels", records), path)
    assert "windows.svg" in report.write_report(tmp_path, tmp_path / "report.md").read_text()


def test_no_directory_is_made_where_results_are_looked_for(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(InputError, match="no results in"):
        report.write_report(absent, absent / "report.md")
    assert not absent.exists()


def test_the_readme_shows_the_committed_results():
    readme = ROOT / "README.md"
    committed = ROOT / "compare" / "results"
    if not readme.is_file() or not list(committed.glob("*/*.json")):
        pytest.skip("no results are committed yet")
    text = readme.read_text(encoding="utf-8")
    tables = report.readme_block(readme, committed, committed / report.REPORT)
    for begin, end, block in (
        (report.BEGIN, report.END, tables),
        (report.GLANCE_BEGIN, report.GLANCE_END, report.glance_block(committed)),
    ):
        shown = text.partition(begin)[2].partition(end)[0]
        renew = "renew it: python -m compare report --readme README.md"
        assert shown.strip() == block.strip(), renew
