"""Tables, from made-up results."""

from dataclasses import replace

import pytest

from compare.common.console import number
from compare.common.result_files import Record
from compare.report import report
from compare.report.grouping import families, size
from compare.report.markdown import notes, speedup, table
from compare.report.tables import agreement_line, timing_tables
from compare.workloads.kernels import FRAMES_MIX, FRAMES_MIX_PARTS
from tests.compare import synthetic


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (float("nan"), "–"), (0.0, "0"), (0.05, "5.00e-02"), (0.1, "0.1")),
        *((9.996, "10"), (999.4, "999"), (999.6, "1000"), (-999.6, "-1000"), (12345.6, "12346")),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_a_bar_in_an_error_does_not_end_a_tables_cell():
    assert table(["who", "what"], [["flax", "int | None"]]).endswith("| flax | int \\| None |")


def test_a_reason_stands_once_with_whom_and_what_it_is_of():
    """Without the workloads where it is of all; those of another reason, or of others, apart."""
    records = [
        Record("w-1", "fa3", note="not installed"),
        Record("w-2", "fa3", note="not installed"),
        Record("w-2", "cudnn", note="not installed"),
        Record("w-1", "cudnn", note="out of memory"),
        Record("w-1", "triton", median_us=1.0),
    ]
    assert notes(synthetic.as_results("kernels", records)) == [
        "- fa3: not installed",
        "- cudnn (w-2): not installed",
        "- cudnn (w-1): out of memory",
    ]


def details(results, workloads):
    """The tables behind that of the times, as lines, by their first heading."""
    tables = [text.splitlines() for text in timing_tables(results, workloads)[1:]]
    return {lines[0].split(" | ")[0].removeprefix("| "): lines for lines in tables}


def timing_table(results, workloads):
    return timing_tables(results, workloads)[0]


def test_timing_table():
    records = synthetic.timing_records(("windows",), synthetic.KERNELS)
    measured = synthetic.as_results("kernels", records)
    rows = timing_table(measured, [f"windows-{side}" for side in synthetic.SIDES])
    lines = rows.splitlines()
    assert lines[0].startswith("| windows | 448, µs |")
    assert lines[2].startswith("| floor | 2.5 |")
    assert lines[3].startswith("| **triton** | **5** (50% of floor) |")
    assert lines[4].startswith("| **pallas** | **5.5** (45% of floor) |")
    # Peers by speed, each set against ours of its framework.
    assert lines[5].startswith("| in-place rope + FA2 varlen | 13 (2.6x) |")
    assert lines[7].startswith("| XLA rope + cuDNN (jax.nn) | 17 (3.1x) |")
    assert synthetic.MISSING not in rows


def test_a_spread_that_is_not_known_is_not_shown_as_none():
    """As where a profiler's events do not divide evenly among the calls."""
    times = [Record("windows-448", "pallas", median_us=5.0, relative_rms_error=3e-3)]
    times.append(replace(times[0], workload="windows-672", spread_us=0.5))
    measured = synthetic.as_results("kernels", times)
    assert timing_table(measured, ["windows-448"]).endswith("| – | 3.00e-03 |")
    assert timing_table(measured, ["windows-448", "windows-672"]).endswith("| 10.0% | 3.00e-03 |")


def test_a_row_tells_its_largest_spread_and_error():
    time = Record("windows-448", "pallas", median_us=5.0, spread_us=0.5, relative_rms_error=2e-3)
    others = [
        replace(time, workload="windows-672", relative_rms_error=3e-3),
        replace(time, workload="windows-896", spread_us=0.1),
    ]
    measured = synthetic.as_results("kernels", [time, *others])
    line = timing_table(measured, ["windows-448", "windows-672", "windows-896"]).splitlines()[-1]
    assert line.endswith("| 10.0% | 3.00e-03 |")


def test_calls_in_a_row():
    records = synthetic.timing_records(("tower",), synthetic.TOWERS)
    measured = synthetic.as_results("towers", records)
    tables = details(measured, ["tower-448", "tower-672"])
    lines = tables["calls in a row, ms"]
    assert lines[0] == "| calls in a row, ms | 448 | 672 |"
    assert lines[2] == "| **torch** | **2.48** (0% of floor) | **5.58** (0% of floor) |"
    assert lines[4] == "| Hugging Face FA2 varlen | 13.6 (5.5x) | 30.6 (5.5x) |"
    lines = tables["kernels alone, ms"]
    assert lines[0] == "| kernels alone, ms | 448 | 672 |"
    assert len(lines) > 2
    unknown = [replace(record, row_us=None, profiler_us=None) for record in records]
    tables = details(synthetic.as_results("towers", unknown), ["tower-448"])
    assert list(tables) == ["first call, peak memory"]


@pytest.mark.parametrize(("row_us", "calls"), [(2e3, "in a row"), (None, "one by one")])
def test_rates_tell_which_calls_they_are_of(row_us, calls):
    """Result files from before calls in a row were timed hold rates of calls one by one."""
    rates = {"tokens_per_s": 3.5e5, "frames_per_s": 700.0}
    record = Record("tower-448", "torch", median_us=3e3, row_us=row_us, details=rates)
    record = replace(record, relative_rms_error=4e-3)
    tables = details(synthetic.as_results("towers", [record]), ["tower-448"])
    lines = tables[f"thousand tokens a second, calls {calls}"]
    assert lines[2] == "| torch | 350 (700 frames) |"


def ratios(records, workloads):
    tables = details(synthetic.as_results("kernels", records), workloads)
    return "\n".join(tables.get("ratio", []))


def test_ratios():
    records = synthetic.timing_records(("windows",), synthetic.KERNELS)
    text = ratios(records, ["windows-448", "windows-672"])
    assert text.splitlines() == [
        "| ratio | 448 | 672 |",
        "| --- | ---: | ---: |",
        "| pallas / triton | 1.10 | 1.10 |",
    ]
    hosted = [replace(r, details={"host_us": 21.04}) for r in records if r.workload[-3:] == "448"]
    assert "| host time of a call, triton, µs | 21 |" in ratios(hosted, ["windows-448"])
    missing = [r for r in records if r.implementation == synthetic.MISSING]
    assert ratios(missing, ["windows-448"]) == ""


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.947, "0.95x"), (1.0, "1.00x"), (1.994, "1.99x"), (13.94, "13.9x")]
)
def test_a_speedup(ratio, told):
    assert speedup(ratio) == told


def test_where_a_towers_time_goes_and_what_it_takes():
    groups = {"products": 2200.0, "other": 14.0}
    record = Record(
        "tower-448",
        "torch",
        median_us=3000.0,
        relative_rms_error=4e-3,
        profiler_us=2400.0,
        floor_us=1800.0,
        compile_s=9.591,
        peak_memory_mib=1366.9,
        details={"groups_us": groups},
    )
    peer = Record("tower-448", "Hugging Face SDPA", 9e3, compile_s=0.1, relative_rms_error=4e-3)
    measured = synthetic.as_results("towers", [record, peer])
    tables = details(measured, ["tower-448"])
    lines = tables["ms"]
    assert lines[0] == "| ms | products | other | between kernels | floor |"
    assert lines[2:] == ["| torch, 448 | 2.20 | 0.01 | 0.60 | 1.80 |"]
    lines = tables["first call, peak memory"]
    assert lines[2:] == ["| torch | 9.59 s, 1367 MiB |", "| Hugging Face SDPA | 0.10 s |"]


def test_families_and_sizes():
    records = [
        Record(name, "torch") for name in ("windows-448", "qwen3-tower-video-16x448", "tower-448")
    ]
    found = families(synthetic.as_results("towers", records))
    assert list(found) == ["windows", "qwen3-tower", "tower"]
    sizes = [size(name) for workloads in found.values() for name in workloads]
    assert sizes == ["448", "video-16x448", "448"]


def test_integration_sets_hugging_face_against_the_accelerated_tower():
    records = synthetic.timing_records(("integration",), synthetic.INTEGRATION)
    measured = synthetic.as_results("integration", records)
    lines = timing_table(measured, ["integration-448"]).splitlines()
    assert lines[0].startswith("| integration | 448, ms |")
    assert lines[3].startswith("| **accelerated** | **6** (0% of floor) |")
    assert lines[4].startswith("| **accelerated, compiled** | **5** (0% of floor) |")
    assert lines[5].startswith("| Hugging Face FA2 varlen | 17 (2.8x) |")
    assert lines[6].startswith("| Hugging Face SDPA | 31 (5.2x) |")


def test_vllms_time_over_that_with_the_plugin():
    times = {
        "vLLM": ("torch", 60e3),
        "vLLM, CUDA graphs": ("torch", 45e3),
        "vLLM with ours": ("torch", 30e3),
        "vLLM with ours, CUDA graphs": ("torch", 25e3),
        "torch": ("torch", 20e3),
    }
    records = synthetic.timing_records(("vllm_qwen3",), times)
    records = [replace(r, profiler_us=None if "graphs" in r.implementation else r.profiler_us)
               for r in records]  # fmt: skip
    measured = synthetic.as_results("vllm", records)
    assert timing_table(measured, ["vllm_qwen3-448"]).splitlines()[-1] == (
        "| vLLM | 60 (2.0x) | 2.0% | 2.70e-03 |"
    )
    assert details(measured, ["vllm_qwen3-448"])["vLLM's time over ours"][2:] == [
        "| as it comes, calls in a row | 2.00 |",
        "| as it comes, kernels alone | 2.00 |",
        "| each by its best setting, calls in a row | 1.80 |",
        "| each by its best setting, kernels alone | 2.00 |",
    ]
    (_, section) = report._sections(measured)
    assert section.title == "vLLM's tower of Qwen3-VL 8B"


def test_twins_are_compared_by_one_clock():
    records = synthetic.timing_records(("windows",), synthetic.KERNELS)
    blind = [replace(r, profiler_us=None) for r in records if r.implementation == "triton"]
    others = [r for r in records if r.implementation != "triton"]
    assert "pallas / triton" not in ratios([*blind, *others], ["windows-448"])


def test_the_mix_is_held_against_its_parts():
    names = (*FRAMES_MIX_PARTS, FRAMES_MIX)
    times = dict(zip(names, (100.0, 50.0, 165.0), strict=True))
    records = [
        Record(name, "triton", median_us=time, relative_rms_error=2e-3)
        for name, time in times.items()
    ]
    text = ratios(records, names[1:])
    assert "| triton / its parts one by one | – | 1.10 |" in text
    assert "its parts" not in ratios(records[1:], names[1:])


def test_failures_show():
    failed = [Record("w", name, passed=False) for name in ("triton", "triton", "pallas")]
    records = [*synthetic.agreement_records(), *failed]
    line = agreement_line(synthetic.as_results("agreement", records))
    assert "**3 fail** (triton on w, pallas on w)" in line


def test_the_largest_error_is_unknown_where_one_is():
    """A kernel that fails has none, and NaN is not written: neither counts as 0."""
    records = synthetic.agreement_records()
    nan = Record("w", "triton", relative_rms_error=float("nan"), dtype="bfloat16", passed=False)
    half = replace(nan, implementation="pallas against triton", dtype="float16")
    half = replace(half, relative_rms_error=0.5)
    records = [nan, half, *(r for r in records if r.implementation != "pallas")]
    line = agreement_line(synthetic.as_results("agreement", records))
    assert line.endswith("in bf16: triton –, pallas –, pallas against triton 2.70e-03.")
