"""The report, from made-up results; and that the README shows the committed ones."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from compare.common import result_files
from compare.common.errors import InputError
from compare.common.result_files import Record
from compare.report import report
from compare.report.summary import summary_table
from tests.compare import synthetic

REASONED = ["Kernels", "Towers", report._title("integration")]


@pytest.fixture
def directory(tmp_path):
    synthetic.write_all(tmp_path / "results")
    return tmp_path / "results"


def test_a_devices_report_links_charts_that_are_there(directory):
    out = report.write_report(directory, directory / "report.md")
    folder = directory / "imaginary-gpu"
    assert "(imaginary-gpu/report.md)" in out.read_text()
    text = (folder / "report.md").read_text()
    charts = (
        *("windows.svg", "frames.svg", "fusion.svg", "integration.svg", "hero.svg"),
        *("tower.svg", "qwen3-tower.svg", "tower-layers.svg", "qwen3-tower-layers.svg"),
    )
    for chart in charts:
        assert f"({chart})" in text
        assert ElementTree.parse(folder / chart).getroot().tag.endswith("svg")
    assert synthetic.DEVICE in text
    assert "in 12 of 12 cells" in text
    assert "| µs of qk, q, none | 64 | 128 | 1024 |" in text
    assert "| triton, 64 | **46** / 79 / 64 |" in text  # the fastest way in bold
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    reasons = f"Without a number, and why:\n\n- {synthetic.MISSING}: not installed\n"
    assert [name for name, part in sections.items() if reasons in part] == REASONED
    assert [name for name, part in sections.items() if "and why" in part] == REASONED
    stress = sections["Under stress"]  # whose reasons stand in its table
    assert "| any cu_seqlens | triton 6,000, pallas 6,000 | nothing wrong; **pallas: 2" in stress
    assert text.count("Inputs rotate past the L2 cache.") == 1
    assert not list(directory.rglob("*.unfinished"))


def written(directory):
    """The report of the one device there."""
    report.write_report(directory, directory / "report.md")
    (text,) = [path.read_text() for path in directory.glob("*/report.md")]
    return text


def test_the_same_results_give_the_same_files(directory):
    def files():
        report.write_report(directory, directory / "report.md")
        return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    assert files() == files()


def blocks(*names):
    return "".join(f"{begin}\noutdated\n{end}" for begin, end in map(report.markers, names))


def test_a_readmes_blocks_are_renewed_and_the_rest_kept(directory, tmp_path):
    out = report.write_report(directory, tmp_path / "elsewhere.md")
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{blocks('results')}\nbelow\n")
    report.update_readme(readme, directory, out)
    once = readme.read_text()
    begin, end = report.markers("results")
    assert once.startswith(f"above\n{begin}\n- **Towers**: ")
    assert once.endswith(f"{end}\nbelow\n")
    assert "outdated" not in once
    assert "(results/imaginary-gpu/tower.svg)" in once
    assert "(results/imaginary-gpu/report.md); [all devices](elsewhere.md)" in once
    assert report.markers("summary")[0] not in once
    report.update_readme(readme, directory, out)
    assert readme.read_text() == once


def test_pages_on_vllm_show_the_first_device_that_was_measured_there(tmp_path):
    records = synthetic.timing_records(("windows", "frames"), synthetic.KERNELS)
    kernels = synthetic.as_results("kernels", [*records, *records])
    result_files.write(kernels, result_files.default_path("kernels", kernels.device, tmp_path))
    times = {"vLLM": ("torch", 60e3), "vLLM with ours": ("torch", 20e3)}
    records = synthetic.timing_records(("vllm", "vllm_qwen3"), times)
    other = replace(synthetic.as_results("vllm", records), device="B", versions={"vllm": "0.26.0"})
    result_files.write(other, result_files.default_path("vllm", "B", tmp_path))
    page = tmp_path / "page.md"
    page.write_text(blocks("attention", "sizes", "vllm"))
    renewed = report.renewed(page, tmp_path, tmp_path / report.REPORT)
    attention, sizes, vllm = (
        renewed.partition(report.markers(b)[0])[2] for b in ("attention", "sizes", "vllm")
    )
    assert "attention in windows of 64" in attention.partition("<!--")[0]
    assert "vision tower" not in attention
    assert "| 1344 | 9,216 | 144 | 9,216 | 2,304 | 7,056 | 1,764 |" in sizes
    assert "B, vLLM 0.26.0, bf16" in vllm
    assert "\nQwen3-VL 8B:\n" in vllm
    assert vllm.count("| as it comes, kernels alone | 3.00 | 3.00 | 3.00 | 3.00 |") == 2


def test_training_stands_beside_the_kernels_of_the_same_families(directory):
    kernels = result_files.read(directory / "imaginary-gpu" / "kernels.json")
    path = directory / "imaginary-gpu" / "training.json"
    records = [{**record, "peak_memory_mib": 7.25} for record in kernels.records]
    result_files.write(replace(kernels, part="training", records=records), path)
    report.write_report(directory, directory / "report.md")
    text = (path.parent / "report.md").read_text().partition("## Forward and backward\n")[2]
    assert "(training-windows.svg)" in text
    assert "| most memory of a call, MiB |" in text
    assert "| triton | 7.25 | 7.25 |" in text
    for chart in ("windows.svg", "training-windows.svg"):
        assert (path.parent / chart).is_file()


def test_losses_stand_beside_fp32s(directory):
    path = directory / "imaginary-gpu" / "training.json"
    exact = [10.0 - step for step in range(8)]
    ours = [1.01 * loss for loss in exact]

    def record(name, losses):
        return Record("losses-448", name, details={"losses": losses, "fp32_losses": exact})

    made_up = [record("Hugging Face SDPA", exact), record("accelerated", ours)]
    missing = Record("losses-448", "flax", note="no room")
    result_files.write(synthetic.as_results("training", [*made_up, missing]), path)
    report.write_report(directory, directory / "report.md")
    text = (path.parent / "report.md").read_text().partition("## Forward and backward\n")[2]
    assert "at 448 px\n\n| loss of | fp32 | Hugging Face SDPA | accelerated |" in text
    assert "| step 8 | 3 | 3 | 3.03 |" in text
    assert "| distance from fp32 | 0 | 0 | 1.00e-02 |" in text
    assert "- flax: no room" in text


def test_a_summary_of_the_results(directory, tmp_path):
    (parts,) = report.read_devices(directory).values()
    lines = summary_table(parts).splitlines()
    assert lines[0] == f"| {synthetic.DEVICE}, bf16 | 448 px | 672 px | 896 px | 1344 px |"
    # Ours of both frameworks, then the speedups, each over peers of its own framework.
    starts = [line.rsplit(" | ", 4)[:2] for line in lines[2:]]
    assert [cell for _, cell in starts] == [
        *("**2.48 / 2.64**", "10.0x / 9.4x", "5.5x / 5.2x", "11.2x / 10.6x", "6.2x / 5.8x"),
        *("**5 / 5.5**", "2.6x / 3.1x") * 2,
    ]
    assert starts[0][0].startswith("| **vision tower of Qwen2.5-VL 7B")
    assert summary_table({"towers": parts["towers"]}).count("\n") == 6
    assert summary_table({"agreement": parts["agreement"]}) == ""

    readme = tmp_path / "README.md"
    readme.write_text(blocks("summary", "results", "checks"))
    out = report.write_report(directory, directory / report.REPORT)
    report.update_readme(readme, directory, out)
    text = readme.read_text()
    summary, _, rest = text.partition(report.markers("summary")[1])
    assert "(results/imaginary-gpu/hero.svg)" in summary
    assert summary.endswith("\n".join(lines) + "\n")
    assert "12,000 cases of hostile and extreme input" in rest
    assert "**pallas: 2" in rest


def test_a_readme_shows_the_device_with_the_most_timings(directory, tmp_path):
    """Whatever its name and how many other results there are; the overview has all of them."""
    checks = [Record(f"w-{n}", "triton", dtype="bfloat16", passed=True) for n in range(999)]
    checked = synthetic.as_results("agreement", checks)
    checked = replace(checked, device="Another GPU", date="2030-01-01T00:00:00+00:00")
    result_files.write(checked, result_files.default_path("agreement", "another GPU", directory))
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    other = replace(synthetic.as_results("kernels", [record]), device="Another GPU", note="Alone.")
    result_files.write(other, result_files.default_path("kernels", "another GPU", directory))
    out = report.write_report(directory, directory / report.REPORT)
    overview = out.read_text()
    assert overview.index(f"## {synthetic.DEVICE}") < overview.index("## Another GPU")
    assert "| Another GPU, bf16 | 448 px |" in overview
    assert "(another-gpu/report.md)" in overview
    alone = (directory / "another-gpu" / report.REPORT).read_text()
    assert synthetic.DEVICE not in alone
    assert "TFLOP/s. Alone.\n" in alone
    assert not (directory / "another-gpu" / "hero.svg").exists()
    readme = tmp_path / "README.md"
    readme.write_text(blocks("summary", "results"))
    report.update_readme(readme, directory, out)
    assert synthetic.DEVICE in readme.read_text()
    assert "Another" not in readme.read_text()
    readme.write_text(blocks("checks"))
    report.update_readme(readme, directory, out)
    newest = [line[:31] for line in readme.read_text().splitlines() if line.startswith("- ")]
    assert newest == ["- Agreement, Another GPU: 999 c", "- Under stress, Imaginary GPU: "]


def test_a_stress_file_of_the_former_name_is_read(directory):
    """Before the part was called stress, it was called trust."""
    folder = directory / "imaginary-gpu"
    report.write_report(directory, directory / "report.md")
    now = (folder / "report.md").read_text()
    former = (folder / "stress.json").read_text().replace('"part": "stress"', '"part": "trust"')
    (folder / "stress.json").unlink()
    (folder / "trust.json").write_text(former)
    report.write_report(directory, directory / "report.md")
    assert (folder / "report.md").read_text() == now


def test_of_devices_with_as_many_timings_the_one_measured_last_leads(tmp_path):
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    # By the newest of a device's files, whichever part it is of.
    dates = {
        "A": {"kernels": "2026-01-04", "towers": "2026-01-03"},
        "B": {"kernels": "2026-01-02", "towers": "2026-01-06"},
        "C": {"kernels": "2026-01-05", "towers": "2026-01-01"},
    }
    for device, parts in dates.items():
        for part, date in parts.items():
            measured = replace(synthetic.as_results(part, [record]), device=device, date=date)
            result_files.write(measured, result_files.default_path(part, device, tmp_path))
    assert [folder.name for folder in report.read_devices(tmp_path)] == ["b", "c", "a"]


BEGIN, END = report.markers("results")


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}"])
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
    report.write_report(directory, directory / "report.md")
    assert not chart.exists()
    assert f"({chart.name})" not in (folder / "report.md").read_text()


def test_what_was_noted_of_a_run_stands_beside_its_ceilings(tmp_path):
    """As that some of its workloads had a run, and thereby ceilings, of their own."""
    path = result_files.default_path("towers", "x", tmp_path)
    records = synthetic.timing_records(("tower",), synthetic.TOWERS)
    noted = replace(synthetic.as_results("towers", records), note="672 px in a run of its own.")
    result_files.write(noted, path)
    text = written(tmp_path)
    assert "copy of 94 MiB 4.00 TB/s, of 1 GiB 4.20; bf16 products 800 TFLOP/s. 672 px" in text
    assert "672 px in a run of its own.\n" in text


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
    text = written(tmp_path)
    assert text.count('a call with `fuse="none"`, whose error stands here.') == 1


def test_a_part_without_any_timing_still_makes_a_report(tmp_path):
    missing = Record("windows-448", "triton", floor_us=1.0, note="no such GPU")
    path = result_files.default_path("kernels", "x", tmp_path)
    result_files.write(synthetic.as_results("kernels", [missing]), path)
    text = written(tmp_path)
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
    text = written(tmp_path)
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
    text = written(tmp_path)
    assert f"### {title}\n" in text
    assert f"![{title}](tower-layers.svg)" in text


def test_ways_of_fusing_without_one_to_set_them_against_still_make_a_report(tmp_path):
    records = [
        replace(r, median_us=None) if r.fuse == "none" else r for r in synthetic.fusion_records()
    ]
    path = result_files.default_path("fusion", "x", tmp_path)
    result_files.write(synthetic.as_results("fusion", records), path)
    text = written(tmp_path)
    assert "How much of the rotation to fuse" in text
    assert "![" not in text


def test_a_workload_without_any_timing_still_gets_a_panel(tmp_path):
    records = synthetic.timing_records(("windows",), synthetic.KERNELS)
    records = [replace(r, median_us=None) if r.workload == "windows-448" else r for r in records]
    path = result_files.default_path("kernels", "x", tmp_path)
    result_files.write(synthetic.as_results("kernels", records), path)
    assert "(windows.svg)" in written(tmp_path)


def test_no_directory_is_made_where_results_are_looked_for(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(InputError, match="no results in"):
        report.write_report(absent, absent / "report.md")
    assert not absent.exists()
