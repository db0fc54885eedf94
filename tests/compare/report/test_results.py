"""The committed results: what `python -m compare` reads or writes, and no more."""

import re
from pathlib import Path

import pytest

from compare.report import report

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "compare" / "results"
NOTES = sorted((RESULTS / "notes").glob("*.md"))


def test_every_json_file_is_read_by_the_report():
    devices = report.read_devices(RESULTS)
    read = {folder / f"{part}.json" for folder in devices for part in report.PARTS}
    unread = [str(path.relative_to(RESULTS)) for path in set(RESULTS.rglob("*.json")) - read]
    assert not unread, f"nothing reads {unread}: what they taught belongs into a note"


def test_what_the_code_names_in_there_is_there():
    packages = ("compare", "flax_models", "pallas_kernels", "triton_kernels", "tests")
    for module in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        for named in re.findall(r"compare/results/[\w./-]+\w", module.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{module.relative_to(ROOT)} names {named}"


def test_every_chart_is_shown():
    for chart in RESULTS.rglob("*.svg"):
        assert f"({chart.name})" in (chart.parent / report.REPORT).read_text(encoding="utf-8")


def test_the_results_are_small():
    size = sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file())
    assert size <= 3 << 20


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_a_note_is_short_and_begins_with_its_conclusion(note):
    lines = note.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    if note.stem != "README":
        assert lines[2].startswith("**Conclusion.** ")


def test_the_reports_are_of_the_committed_results():
    devices = report.read_devices(RESULTS)
    reports = {RESULTS: report.overview(devices, RESULTS)}
    reports |= {folder: report.device_report(folder, parts) for folder, parts in devices.items()}
    for folder, text in reports.items():
        committed = (folder / report.REPORT).read_text(encoding="utf-8")
        assert committed == text, "write it anew: python -m compare report"
