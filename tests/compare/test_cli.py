"""Exit statuses and sentences of `python -m compare`."""

import itertools
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compare import cli, commands
from compare.bench.ceilings import Ceilings
from compare.common import environment, result_files
from compare.common.result_files import Record
from tests.compare import synthetic

ROOT = Path(__file__).parents[2]
BENCHMARKS = [
    "kernels",
    "fusion",
    "embeddings",
    "training",
    "towers",
    "integration",
    "vllm",
    "scale",
]


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    # What the command line sets for want of a GPU must not outlive the test where there is one.
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


@pytest.fixture
def agreement(monkeypatch):
    """Stand-ins for the checks; the test says what they find."""
    from compare.agreement import kernels, towers
    from compare.workloads import photographs

    found = {"kernels": [], "towers": []}
    monkeypatch.setattr(photographs, "photographs", list)
    monkeypatch.setattr(kernels, "check_kernels", lambda: found["kernels"])
    monkeypatch.setattr(towers, "check_towers", lambda: found["towers"])
    return found


def found(records):
    """What a benchmark yields, workload by workload; of an exception it dies."""
    for _, of_workload in itertools.groupby(records, lambda r: getattr(r, "workload", None)):
        [first, *others] = of_workload
        if isinstance(first, Exception):
            raise first
        yield [first, *others]


@pytest.fixture
def gpu_benchmarks(monkeypatch, tmp_path):
    """Stand-ins for a GPU and its benchmarks, which find some records; gives where results go."""

    def find(*records):
        monkeypatch.setattr("compare.bench.ceilings.measure", lambda: Ceilings(4e12, 4e12, 8e14))
        for benchmark in (
            "compare.bench.kernels.bench_kernels",
            "compare.bench.fusion.measure_fusion",
            "compare.bench.embeddings.bench_embeddings",
            "compare.bench.towers.bench_towers",
            "compare.bench.scale.bench_scale",
        ):
            monkeypatch.setattr(benchmark, lambda *_, **__: found(records))
        monkeypatch.setattr("compare.bench.rotation.bench_rotation", lambda *_: [])
        monkeypatch.setattr(environment, "has_gpu", lambda: True)
        monkeypatch.setattr(environment, "device_name", lambda: "Imaginary GPU")
        monkeypatch.setattr(commands, "_check_pytorch", lambda: None)
        monkeypatch.setattr("compare.implementations.vllm.check_installed", lambda: None)
        monkeypatch.setattr(result_files, "DEFAULT_DIRECTORY", tmp_path / "default")
        return tmp_path / "default"

    return find


def passing(name="triton"):
    return Record("windows-448", name, relative_rms_error=1e-3, passed=True)


def failing(name="pallas"):
    return Record("windows-448", name, relative_rms_error=1.0, passed=False)


def sentence(capsys):
    """What a person reads on stderr: one line, no traceback."""
    text = capsys.readouterr().err
    assert text.startswith("compare: ")
    assert text.count("\n") == 1
    return text


def test_agreement_writes_its_file_and_succeeds(agreement, tmp_path, capsys):
    agreement["kernels"] = [passing(), replace(passing(), passed=None)]  # the last for comparison
    path = tmp_path / "a" / "agreement.json"
    assert cli.main(["agreement", "--json", str(path)]) == commands.AGREES
    assert result_files.read(path).part == "agreement"
    assert "Agreement holds: 1 checks" in capsys.readouterr().out


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_results_go_to_the_directory_named_before_or_behind_the_part(
    without_gpu, agreement, before, tmp_path
):
    named = ["--results", str(tmp_path)]
    part = ["agreement"]
    assert cli.main([*named, *part] if before else [*part, *named]) == commands.AGREES
    assert result_files.read(tmp_path / "cpu" / "agreement.json").part == "agreement"


def test_a_long_path_is_printed_on_one_line(agreement, tmp_path, capsys):
    path = tmp_path / "/".join(["directory"] * 20) / "agreement.json"
    assert cli.main(["agreement", "--json", str(path)]) == commands.AGREES
    assert f"Wrote {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["kernels", "towers"])
def test_disagreement_is_status_1_and_still_written(agreement, part, tmp_path, capsys):
    agreement["kernels"] = [passing()]
    agreement[part] = [passing(), failing()]
    path = tmp_path / "agreement.json"
    assert cli.main(["agreement", "--json", str(path)]) == commands.DISAGREES
    assert "Agreement FAILED: 1 of" in capsys.readouterr().out
    assert path.is_file()


def test_agreement_without_photographs_is_refused_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr("compare.agreement.kernels.check_kernels", lambda: pytest.fail("checked"))
    assert cli.main(["agreement"]) == commands.BAD_INPUT
    assert "the photographs come with scikit-learn" in sentence(capsys)


def test_without_a_gpu_the_main_job_is_agreement(without_gpu, agreement, tmp_path, capsys):
    agreement["towers"] = [passing("flax")]
    assert cli.main(["--results", str(tmp_path)]) == commands.AGREES
    assert "A GPU would add" in capsys.readouterr().out
    assert (
        result_files.read(tmp_path / "cpu" / "agreement.json").records[0]["implementation"]
        == "flax"
    )
    agreement["towers"] = [failing("flax")]
    assert cli.main([]) == commands.DISAGREES


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ({}, commands.AGREES),
        ({"kernels": commands.BAD_INPUT}, commands.BAD_INPUT),
        ({"agreement": commands.DISAGREES, "kernels": commands.BAD_INPUT}, commands.DISAGREES),
        ({"agreement": commands.BAD_INPUT, "towers": -9}, commands.DISAGREES),
        ({"agreement": commands.DISAGREES, "report": commands.BAD_INPUT}, commands.DISAGREES),
    ],
)
def test_what_is_wrong_outweighs_what_could_not_be_done(monkeypatch, codes, status, tmp_path):
    ran = []

    def run(command, check):
        ran.append(command[3])
        assert command[4:] == ["--results", str(tmp_path)]
        return subprocess.CompletedProcess(command, codes.get(command[3], 0))

    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["--results", str(tmp_path)]) == status
    assert ran == ["agreement", "kernels", "towers", "integration", "report"]


@pytest.mark.parametrize(
    ("ours", "passed", "status"),
    [
        (True, True, commands.AGREES),
        (True, None, commands.AGREES),
        (True, False, commands.DISAGREES),
        (False, False, commands.AGREES),
    ],
)
@pytest.mark.parametrize("part", BENCHMARKS)
def test_a_wrong_result_of_ours_fails_a_benchmark(
    gpu_benchmarks, part, ours, passed, status, tmp_path, capsys
):
    gpu_benchmarks(Record("w", "one", ours=ours, passed=passed))
    path = tmp_path / "file.json"
    assert cli.main([part, "--json", str(path)]) == status
    assert ("breaks its rule: one on w." in capsys.readouterr().out) == bool(status)
    assert {r["implementation"] for r in json.loads(path.read_text())["records"]} == {"one"}


WORKLOAD_OF = {
    "kernels": "windows-448",
    "embeddings": "rope_fp32-1x64x*",
    "training": "frames-448",
    "towers": "tower-448",
    "integration": "integration-448",
    "vllm": "vllm-448",
    "scale": "photographs-torch-1-gpu",
}


@pytest.mark.parametrize("part", WORKLOAD_OF)
@pytest.mark.parametrize("asked", [[], ["--json"], ["--results"]], ids=["", "json", "results"])
def test_a_run_on_some_workloads_leaves_the_whole_runs_file_alone(
    gpu_benchmarks, part, asked, tmp_path, capsys
):
    whole = gpu_benchmarks(Record("w", "one"))
    assert cli.main([part]) == commands.AGREES
    before = {path: path.read_bytes() for path in whole.rglob("*.json")}
    assert before
    gpu_benchmarks(Record("w", "another"))
    place = tmp_path / "mine"
    arguments = [part, "--workload", WORKLOAD_OF[part], *asked, *([str(place)] if asked else [])]
    assert cli.main(arguments) == commands.AGREES
    assert {path: path.read_bytes() for path in whole.rglob("*.json")} == before
    assert place.exists() == bool(asked)
    assert ("are not kept" in capsys.readouterr().out) == (not asked)


def test_some_workloads_are_measured_anew(gpu_benchmarks, capsys):
    whole = gpu_benchmarks(Record("v", "one"), Record("w", "one"))
    assert cli.main(["kernels"]) == commands.AGREES
    gpu_benchmarks(Record("w", "two"), Record("w", "three"))
    update = ["kernels", "--workload", "windows-448", "--update"]
    assert cli.main(update) == commands.AGREES
    [path] = whole.rglob("*.json")
    found = [(r["workload"], r["implementation"]) for r in result_files.read(path).records]
    assert found == [("v", "one"), ("w", "two"), ("w", "three")]

    path.write_text(path.read_text().replace('"driver": ', '"driver": "1.2", "other": '))
    before = path.read_bytes()
    assert cli.main(update) == commands.BAD_INPUT
    assert "cannot update results of another driver: 1.2, now " in sentence(capsys)
    assert path.read_bytes() == before


@pytest.mark.parametrize("part", WORKLOAD_OF)
def test_a_run_that_dies_leaves_what_it_has_measured_and_another_goes_on(
    gpu_benchmarks, part, monkeypatch
):
    monkeypatch.setattr(result_files, "_now", lambda: "2026-11-02T00:00:00+00:00")
    wanted = {"gpus": 1, "photographs": 3, "cores": 2}  # by scale
    one, two, three = (Record(name, "ours", details=wanted) for name in ("v", "w", "x"))
    whole = gpu_benchmarks(one, RuntimeError("the GPU is gone"))
    with pytest.raises(RuntimeError, match="gone"):
        cli.main([part])
    [path] = whole.rglob("*.json")

    def records():
        return [(r["workload"], r["date"][:10]) for r in result_files.read(path).records]

    assert records() == [("v", "2026-11-02")]
    assert result_files.read(path).ceilings.keys() == (
        set() if part == "scale" else Ceilings(4e12, 4e12, 8e14).to_json().keys()
    )
    monkeypatch.setattr(result_files, "_now", lambda: "2026-11-05T00:00:00+00:00")
    gpu_benchmarks(two, three)
    assert cli.main([part, "--workload", WORKLOAD_OF[part], "--update"]) == commands.AGREES
    assert records() == [("v", "2026-11-02"), ("w", "2026-11-05"), ("x", "2026-11-05")]
    assert result_files.read(path).dates == "2026-11-02 to 2026-11-05"


@pytest.mark.parametrize(("findings", "status"), [(0, commands.AGREES), (2, commands.DISAGREES)])
def test_stress_writes_its_file_and_says_what_it_found(
    monkeypatch, findings, status, tmp_path, capsys
):
    from compare.stress import checks

    def check_stress(seconds, checks, towers, processes):
        assert (len(checks), towers) == (8, None)
        assert processes == (environment.cores() if environment.has_gpu() else 1)
        assert seconds == 7.5
        return [outcome("place", "triton", "moved", 9, ["differs"] * findings)]

    outcome = checks.outcome
    monkeypatch.setattr(checks, "check_stress", check_stress)
    path = tmp_path / "stress.json"
    assert cli.main(["stress", "--seconds", "7.5", "--json", str(path)]) == status
    assert result_files.read(path).records[0]["cases"] == 9
    said = capsys.readouterr().out
    assert ("nothing: 9 cases" if findings == 0 else "in 1 of 1 checks") in said


def test_some_stress_checks_leave_what_the_file_holds_of_others(monkeypatch, tmp_path, capsys):
    from compare.stress import checks as stress

    cases = iter((1, 2))

    def check_stress(seconds, checks, towers, processes):
        names, tried = [check.name for check in checks] + ["server"] * (towers is None), next(cases)
        return [stress.outcome(name, "triton", "anything", tried, []) for name in names]

    monkeypatch.setattr(stress, "check_stress", check_stress)
    path = tmp_path / "stress.json"
    for names in (["p*", "server"], ["place", "hostile"]):
        options = [part for name in names for part in ("--check", name)]
        assert cli.main(["stress", "--json", str(path), *options]) == commands.AGREES
    found = {record["workload"]: record["cases"] for record in result_files.read(path).records}
    assert found == {"poison": 1, "server": 1, "hostile": 2, "place": 2}
    assert cli.main(["stress", "--check", "towers"]) == commands.BAD_INPUT
    assert "unknown check 'towers'; known: hostile, poison" in sentence(capsys)


def test_trust_is_another_word_for_stress_that_no_help_lists(monkeypatch, tmp_path, capsys):
    from compare.stress import checks

    found = [checks.outcome("place", "triton", "moved", 9, [])]
    monkeypatch.setattr(checks, "check_stress", lambda *_, **__: found)
    assert cli.main(["trust", "--results", str(tmp_path)]) == commands.AGREES
    (written,) = tmp_path.rglob("*.json")
    assert (written.name, result_files.read(written).part) == ("stress.json", "stress")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    helped = capsys.readouterr().out
    assert "stress" in helped
    assert "trust" not in helped


def test_a_folder_of_as_many_photographs_as_asked(gpu_benchmarks, monkeypatch, capsys):
    gpu_benchmarks()
    asked = []
    monkeypatch.setattr(
        "compare.bench.scale.bench_scale", lambda workloads, sizes: asked.append(sizes) or []
    )
    assert cli.main(["scale", "--photographs", "300"]) == cli.main(["scale"]) == commands.AGREES
    assert [sizes.photographs for sizes in asked] == [300, 20_000]
    assert cli.main(["scale", "--photographs", "0"]) == commands.BAD_INPUT
    assert "expected a positive integer, got '0'" in sentence(capsys)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_stress_takes_a_positive_time(seconds, capsys):
    assert cli.main(["stress", "--seconds", seconds]) == commands.BAD_INPUT
    assert "expected a positive number" in sentence(capsys)


@pytest.mark.parametrize("part", BENCHMARKS)
def test_benchmarks_need_a_gpu(without_gpu, part, capsys):
    assert cli.main([part]) == commands.BAD_INPUT
    assert f"{part} measures on a CUDA GPU, and this machine has none" in sentence(capsys)


@pytest.mark.parametrize("part", WORKLOAD_OF)
def test_an_unknown_workload_is_named(part, capsys):
    assert cli.main([part, "--workload", "windows-7"]) == commands.BAD_INPUT
    assert "unknown workload 'windows-7'; known: " in sentence(capsys)


@pytest.mark.parametrize("arguments", [["dance"], ["--fast"], ["kernels", "--json"]])
def test_arguments_that_do_not_exist(arguments, capsys):
    assert cli.main(arguments) == commands.BAD_INPUT
    assert "--help lists what there is" in sentence(capsys)


def test_a_place_that_cannot_be_written_is_refused_first(agreement, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        cli.main(["agreement", "--json", str(tmp_path / "file" / "a.json")]) == commands.BAD_INPUT
    )
    assert "cannot write results to" in sentence(capsys)


def test_report_from_unreadable_results(tmp_path, capsys):
    assert cli.main(["report", "--results", str(tmp_path)]) == commands.BAD_INPUT
    assert "no results in" in sentence(capsys)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "kernels.json").write_text("{")
    assert cli.main(["report", "--results", str(tmp_path)]) == commands.BAD_INPUT
    assert "cannot read results from" in sentence(capsys)


def test_report_and_readme(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    synthetic.write_all(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:begin --><!-- results:end -->")
    page = tmp_path / "page.md"
    page.write_text("<!-- vllm:begin --><!-- vllm:end -->")
    arguments = ["--results", str(tmp_path), "report", "--readme", str(page), str(readme)]
    assert cli.main(arguments) == commands.AGREES
    assert (tmp_path / "report.md").is_file()
    assert "![" in readme.read_text()
    assert "No run of `python -m compare vllm`" in page.read_text()
    readme.write_bytes(b"\xff")
    (tmp_path / "report.md").unlink()
    assert cli.main(arguments) == commands.BAD_INPUT
    assert "cannot read" in sentence(capsys)
    assert not (tmp_path / "report.md").exists()


FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("users", "fraction"),
    [
        ({"TRITON_INTERPRET": "0"}, {FRACTION: ".5"}),
        ({"TRITON_INTERPRET": "0", FRACTION: ".2"}, {FRACTION: ".2"}),
        ({"TRITON_INTERPRET": "0", OLD_FRACTION: ".2"}, {OLD_FRACTION: ".2"}),
    ],
)
def test_configure_keeps_what_the_user_set(monkeypatch, users, fraction):
    """And sets one name of JAX's fraction alone: it refuses both together."""
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(os, "environ", dict(users))
    environment.configure()
    assert os.environ == users | fraction


def test_the_module_runs_and_imports_no_framework_for_help():
    code = (
        "import sys; from compare.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert not {'torch', 'jax', 'triton', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "compare", "dance"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == commands.BAD_INPUT
    assert done.stderr.startswith("compare: ")


def test_control_c_is_no_traceback(without_gpu, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_everything", interrupt)
    monkeypatch.setattr(environment, "configure", lambda: None)
    monkeypatch.setattr("sys.argv", ["compare"])
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    exits = []
    monkeypatch.setattr("os._exit", exits.append)
    runpy.run_path(ROOT / "compare" / "__main__.py", run_name="__main__")
    assert exits == [130]
    assert capsys.readouterr().err == "compare: interrupted\n"


DROPPED = """
import signal, sys, time
from compare.__main__ import interrupt_again

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it

class Dropping:
    def __del__(self):
        raise KeyboardInterrupt

sys.unraisablehook = interrupt_again
try:
    Dropping()
    time.sleep(60)
except KeyboardInterrupt:
    print("came again")
"""


def test_an_interrupt_that_python_drops_comes_again():
    run = subprocess.run(
        [sys.executable, "-c", DROPPED],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert run.stdout == "came again\n"
    assert run.stderr == ""
