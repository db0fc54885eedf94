"""Tuning: what is tried, what is chosen, and what becomes of the table."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("jax")

from compare import cli, commands
from compare.agreement.expected import Expected
from compare.agreement.oracle import unfused
from compare.bench import tune, tuning_cases
from compare.bench.tune import TWINS
from compare.bench.tuning_cases import Case
from compare.common import environment, result_files
from compare.common.errors import UnavailableError
from compare.implementations.kernels import KernelImplementation
from compare.workloads.kernels import KernelWorkload
from tests.compare.clocks import stand_in_clocks
from triton_kernels.launching.table import Gpu, Launch, Row, Shape, Table

GPU = Gpu("Imaginary GPU", "9.9")
TINY = KernelWorkload("segments-16", "frames", ((1, 4, 4),), heads=1, head_dim=64)
OLD = Launch(16, 16, 4, 1)  # what the default has


def fields(num_warps):
    return {"block": 16, "block_k": 16, "num_warps": num_warps, "num_stages": 1}


def case(*warps):
    return Case("window", 64, 16, TINY, "qk", tuple(fields(n) for n in warps))


@pytest.fixture
def times(monkeypatch, tmp_path):
    """Microseconds by the number of warps: None fails to compile, a negative number is wrong."""
    stand_in_clocks(monkeypatch)
    made_up = {}
    out = unfused(TINY.inputs())

    def candidate(twin, case, table):
        warps = table.find(GPU, Shape(case.kernel, "half", 64, 16, 32)).num_warps

        def prepare(workload):
            if made_up[warps] is None:
                raise RuntimeError("out of resource: shared memory")

            def call(*arguments):
                return out * (2 if made_up[warps] < 0 else 1)

            call.us = abs(made_up[warps])
            return call

        return KernelImplementation(twin.name, "torch", prepare, ours=True)

    table = tmp_path / "launches.json"
    table.write_text(TWINS["triton"].launch.TABLE_FILE.read_text())
    monkeypatch.setattr(TWINS["triton"].launch, "TABLE_FILE", table)
    monkeypatch.setattr(TWINS["triton"].launch, "gpu", lambda _: GPU)
    monkeypatch.setattr(tune, "candidate", candidate)
    return made_up


@pytest.mark.parametrize("bounded", [False, True])
def test_bounds_on_registers_are_tried_where_they_are_taken(monkeypatch, bounded):
    monkeypatch.setattr(tune.Twin, "bounds_registers", bounded)
    twin, choose = TWINS["triton"], TWINS["triton"].launch
    candidates = fields(8), fields(8) | {"maxnreg": 64}
    tried = tune._launches(
        twin, replace(case(), candidates=candidates), Table.read(choose.TABLE_FILE), GPU
    )
    assert [Launch(**each) in tried for each in candidates] == [True, bounded]


def tuned(*warps):
    [choice] = tune.tune(TWINS["triton"], [case(*warps)])
    return tune.renewed(TWINS["triton"], [choice]), choice


@pytest.mark.parametrize(
    ("made_up", "expected"),
    [
        ({4: 10.0, 2: 9.0, 8: 11.0}, 2),
        ({4: 10.0, 2: 9.9, 8: 11.0}, 4),  # a tie: what is in the table stays
        ({4: 10.0, 2: None, 8: 9.0}, 8),
        ({4: 10.0, 2: -1.0, 8: 9.0}, 8),
        ({4: None, 2: 20.0, 8: 30.0}, 2),
        ({4: -1.0, 2: None, 8: None}, 4),
    ],
)
def test_the_fastest_right_launch_is_chosen(times, made_up, expected, capsys):
    times.update(made_up)
    table, choice = tuned(2, 8)
    assert choice.old == OLD
    assert choice.new == OLD._replace(num_warps=expected)
    assert table.find(GPU, Shape("window", "half", 64, 16, 32)) == choice.new
    assert [record.details["num_warps"] for record in choice.records] == [4, 2, 8]
    assert sum(record.details["chosen"] for record in choice.records) == 1
    printed = " ".join(capsys.readouterr().out.split())  # lines may wrap
    assert "window, head_dim <= 64, length <= 16" in printed
    assert ("out of resource" in printed) == (None in made_up.values())
    assert ("the error breaks its rule" in printed) == any(t and t < 0 for t in made_up.values())


def test_what_the_table_has_is_tried_once(times):
    times.update({4: 1.0, 2: 2.0})
    _, choice = tuned(2, 4)
    assert [record.details["num_warps"] for record in choice.records] == [4, 2]


def test_rows_of_other_shapes_stay(times):
    times.update({4: 2.0, 2: 1.0})
    path = TWINS["triton"].launch.TABLE_FILE
    others = [
        Row("stream", OLD, "half", 80),
        Row("window", OLD, "half", None, 16),
        Row("window", OLD, "half", 128, 16),
    ]
    replaced = Row("window", OLD, "half", 48, 16)
    path.write_text(Table.read(path).with_rows(GPU, [*others, replaced]).to_text())
    table, _ = tuned(2)
    rows = table.devices[GPU.name].rows
    assert set(rows) == {*others, Row("window", OLD._replace(num_warps=2), "half", 64, 16)}


def test_candidates_are_launched_as_their_table_says():
    """The true candidates of both packages, as far as the launch that a call would look up."""
    made = case(8)
    for twin in TWINS.values():
        module = twin.launch_table
        row = tune.row_for(twin, made, module.Launch(**fields(8)))
        table = module.Table.read(twin.launch.TABLE_FILE).with_rows(GPU, [row])
        found = table.find(GPU, module.Shape("window", "half", 64, 16, 32))
        assert found.num_warps == 8
        assert table.find(GPU, module.Shape("stream", "half", 64, 256, 512)).block_k == 64


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("kernel", ["window", "rotate", "window_backward"])
def test_a_candidate_computes_what_it_should(name, kernel):
    from compare.workloads.arrays import from_jax, jax_arguments, torch_arguments

    twin = TWINS[name]
    module = twin.launch_table
    workload = replace(TINY, gradients=kernel == "window_backward")
    fuse = "none" if kernel == "rotate" else "qk"
    made = replace(case(), kernel=kernel, workload=workload, fuse=fuse)
    row = tune.row_for(twin, made, module.Launch(16, 16, 1, 1))
    table = module.Table.read(twin.launch.TABLE_FILE).with_rows(GPU, [row])
    inputs = workload.inputs()
    call = tune.candidate(twin, made, table).prepare(workload)
    in_jax = twin.framework == "jax"
    output = call(*(jax_arguments(inputs) if in_jax else torch_arguments(inputs)))
    expected = Expected.of(workload, inputs)
    assert expected.judge([from_jax(output) if in_jax else output]).passed


def test_cases_and_candidates_are_well_formed():
    """Every case has a workload of its class, and rows that a table takes."""
    assert tuple(tuning_cases.CASES) == commands.TUNED_KERNELS
    cases = tuning_cases.tuning_cases(commands.TUNED_KERNELS)
    assert len({str(made) for made in cases}) == len(cases)
    for made in cases:
        assert made.workload.head_dim <= made.max_head_dim
        assert made.workload.lengths.max() <= (made.max_length or 2**30)
        for candidate in made.candidates:
            row = Row(made.kernel, Launch(**candidate), "half", made.max_head_dim, made.max_length)
            assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert sum(len(made.candidates) for made in cases) < 310  # some minutes for both packages


@pytest.mark.parametrize("write", [False, True])
def test_the_command(times, monkeypatch, tmp_path, write, capsys):
    times.update({4: 2.0, 2: 1.0})
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(commands, "_check_pytorch", lambda: None)
    monkeypatch.setattr(tuning_cases, "tuning_cases", lambda kernels: [case(2)])
    table = TWINS["triton"].launch.TABLE_FILE
    before = table.read_text()
    arguments = ["tune", "--package", "triton", "--json", str(tmp_path / "tune.json")]
    assert cli.main([*arguments, "--write"] if write else arguments) == commands.AGREES
    found = result_files.read(tmp_path / "tune.json").records
    assert [(record["num_warps"], record["chosen"]) for record in found] == [(4, False), (2, True)]
    assert (table.read_text() != before) == write
    if write:
        assert Table.read(table).devices[GPU.name].rows[0].launch.num_warps == 2


def test_tuning_that_dies_leaves_what_it_has_tried_and_another_goes_on(
    times, monkeypatch, tmp_path
):
    times.update({4: 2.0, 2: 1.0})
    first, second = case(2), replace(case(2), max_length=32)
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(commands, "_check_pytorch", lambda: None)
    monkeypatch.setattr(tuning_cases, "tuning_cases", lambda kernels: [first, second])
    choose, table = tune._choose, TWINS["triton"].launch.TABLE_FILE

    def dies(case, tried, records):
        if case is second:
            raise KeyboardInterrupt
        return choose(case, tried, records)

    monkeypatch.setattr(tune, "_choose", dies)
    path, before = tmp_path / "tune.json", table.read_text()
    arguments = ["tune", "--write", "--package", "triton", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        cli.main(arguments)
    assert [record["class"] for record in result_files.read(path).records] == 2 * [str(first)]
    assert table.read_text() == before  # a package's table is of all its cases

    monkeypatch.setattr(tune, "_choose", choose)
    monkeypatch.setattr(tuning_cases, "tuning_cases", lambda kernels: [second])
    assert cli.main([*arguments, "--update"]) == commands.AGREES
    classes = [record["class"] for record in result_files.read(path).records]
    assert classes == 2 * [str(first)] + 2 * [str(second)]


@pytest.mark.parametrize(
    ("broken", "message"),
    [("file", "cannot write results to"), ("gpu", "JAX runs on cpu, not on the GPU")],
)
def test_what_cannot_work_is_refused_before_minutes_of_tuning(
    times, monkeypatch, tmp_path, broken, message, capsys
):
    def unavailable():
        raise UnavailableError("JAX runs on cpu, not on the GPU")

    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(commands, "_check_pytorch", lambda: None)
    monkeypatch.setattr(tune, "tune", lambda *_: pytest.fail("something was measured"))
    if broken == "file":
        (tmp_path / "file").write_text("")
        table = tmp_path / "file" / "launches.json"
        monkeypatch.setattr(TWINS["triton"].launch, "TABLE_FILE", table)
    else:
        monkeypatch.setattr(TWINS["pallas"].launch, "gpu", unavailable)
        monkeypatch.setattr(tune, "require_jax_gpu", lambda: None)
    assert cli.main(["tune", "--write", "--json", str(tmp_path / "x.json")]) == commands.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--kernel", "wave"], ["--package", "cuda"]])
def test_unknown_choices(arguments, capsys):
    assert cli.main(["tune", *arguments]) == commands.BAD_INPUT
    assert "invalid choice" in capsys.readouterr().err
