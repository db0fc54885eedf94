"""The table at the top of a README, of what is on record and what is not."""

from compare.common.result_files import Record
from compare.report.summary import glance_table
from tests.compare import synthetic


def test_a_glance_tells_a_little_faster_from_a_little_slower_and_leaves_out_what_is_unknown():
    records = [
        Record("frames-1344", "triton", median_us=930.0, framework="torch"),
        Record("frames-1344", "in-place rope + FA3 varlen", median_us=887.0, framework="torch"),
        Record("tower-448", "torch", median_us=3e3, row_us=3e3, framework="torch"),
        Record("tower-448", "Hugging Face SDPA", median_us=6e3, row_us=6e3, framework="torch"),
    ]
    parts = {name: synthetic.as_results(name, records) for name in ("towers", "kernels")}
    text = glance_table(parts)
    assert "| 0.95 / – |\n" in f"{text}\n"
    assert "| 2.0 / – |" in text
    assert "flash attention" not in text
    assert "kernels alone" not in text


def test_a_glance_at_results_that_are_missing():
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    lines = glance_table({"kernels": synthetic.as_results("kernels", [record])}).splitlines()
    assert lines[2].endswith("| **5 / –** | **– / –** | **– / –** | **– / –** |")
    assert len(lines) == 3
