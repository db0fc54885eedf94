"""The stress checks find nothing in a right kernel and tower, and find what is wrong in others."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
pytest.importorskip("transformers")

from compare import cli, commands
from compare.common import result_files
from compare.implementations import huggingface
from compare.implementations.towers import our_towers
from compare.report.tables import stress_line, stress_table
from compare.stress import checks, guards, kernels, launched
from compare.stress import inputs as stress_inputs
from compare.stress import server as stress_server
from compare.stress.launched import (
    BACKWARD,
    EVERYWHERE,
    WARP_SPECIALIZED,
    WARP_SPECIALIZED_BACKWARD,
    WIDE,
)
from compare.stress.server import Traffic
from compare.stress.subjects import SUBJECTS, MemoryFault, Subject, Triton
from compare.workloads.arrays import torch_arguments
from pallas_kernels.launching.compile import HAVE_MOSAIC
from tests.compare import synthetic
from tests.compare.stress.in_processes import Dies, Still
from tests.triton_kernels.stand_ins import hopper
from triton_kernels import attend, fused_rope_attention_qkvpacked
from triton_kernels.launching import backward, choose, fast_path, plan

SIZES = dataclasses.replace(stress_inputs.ON_CPU, hostile=12)
# What a GPU is put through, in less of everything: of routes one to each kernel.
ON_GPU = dataclasses.replace(
    stress_inputs.ON_GPU,
    routes=stress_inputs.ON_GPU.routes[::2],
    hostile=48, runs=3, far_tokens=9000, long_segment=999, segments=500, fuse=("none",),
    lengths=(29, 32), starts=(0, 33, 65, 200),  # tokens by eights, as the kernel's route has them
)  # fmt: skip
TRITON, PALLAS = SUBJECTS
ON_HOPPER = (*EVERYWHERE, WARP_SPECIALIZED)
BACKWARD_ON_HOPPER = BACKWARD + WARP_SPECIALIZED_BACKWARD
CHECKS = {check.name: check for check in checks.CHECKS}


class Right(Subject):
    """PyTorch's reference as a kernel, or as all of them."""

    name = "reference"
    launched = frozenset(launched.kernels_here(gradients=True))

    def put(self, inputs):
        return torch_arguments(inputs)

    def attend(self, arguments, max_seqlen, grad=None, **options):
        options.pop("fuse", None)
        qkv, *rest = arguments
        qkv = qkv.detach().requires_grad_(grad is not None)
        options["implementation"] = "reference"
        out = fused_rope_attention_qkvpacked(qkv, *rest, **options)
        return out if grad is None else torch.autograd.grad(out, qkv, grad)[0]


class Wrong(Right):
    """A kernel whose results are spoilt: by (result, arguments) -> result."""

    def __init__(self, spoil):
        self.spoil = spoil

    def attend(self, arguments, max_seqlen, **options):
        return self.spoil(super().attend(arguments, max_seqlen, **options), arguments)


def findings(name, subject):
    record = checks.run_check(CHECKS[name], subject, SIZES)
    assert record.passed == (record.details["findings"] == 0)
    return record


@pytest.mark.parametrize("name", CHECKS)
def test_nothing_is_found_in_a_right_kernel(name):
    record = findings(name, Right())
    assert record.passed, record.note
    assert record.details["cases"] >= 6
    assert "{" not in record.details["tried"]


def forget_a_row(out, arguments):
    out[3] = float("nan")
    return out


def leak(out, arguments):
    return out + 0 * out.float().sum().to(out.dtype)


def forget_the_end(out, arguments):
    out[-1:] = 0
    return out


def flicker(out, arguments, noise=iter(range(10**6))):  # noqa: B008
    return out * (1 + 2**-6 * next(noise))


def depend_on_the_place(out, arguments):
    row = torch.arange(len(out), device=out.device)[:, None, None]
    return out * (1 + row // 32 % 2 * 2**-6).to(out.dtype)


def depend_on_the_call(out, arguments):
    """As of a table of launches that asks how many rows there are."""
    return out * (1 + (len(out) > 150) * 2**-6)


def overflow(out, arguments):
    large = arguments[0].float().abs().max() > 1000
    return out * float("nan") if large else out


def be_four_times_as_wrong(out, arguments):
    """As unfused, which is off by a quarter of the numbers' distance."""
    return out * (1 - torch.finfo(out.dtype).eps)


def exaggerate(out, arguments):
    return out * 5


def fail(out, arguments):
    raise RuntimeError("launch failed")


@pytest.mark.parametrize(
    ("name", "spoil", "note"),
    [
        ("hostile", exaggerate, "a value that no mean of rows of v has"),
        ("hostile", forget_a_row, "NaN in a row of no segment that is longer than max_seqlen"),
        ("poison", leak, "other rows changed: nan in rows 0 to 32"),
        ("poison", lambda out, _: out + 1, "padding is not 0"),
        ("huge", forget_the_end, "from segment 3"),
        ("determinism", flicker, "run 1 differs"),
        ("place", depend_on_the_place, "29 tokens from 33 on"),
        ("invariance", depend_on_the_place, "29 tokens from 33 of 198 on"),
        ("invariance", depend_on_the_call, "other bits than from 0 of 29 on"),
        ("numerics", overflow, "near fp16's largest"),
        ("numerics", be_four_times_as_wrong, "error"),
        ("huge", fail, "RuntimeError: launch failed"),
        ("gradients", flicker, "another run differs"),
        ("gradients", leak, "other rows changed: nan in the first 32 rows"),
        ("gradients", lambda out, _: out + 1, "padding has a gradient"),
        ("gradients", forget_a_row, "no number: cu_seqlens"),
    ],
)
def test_what_is_wrong_is_found(name, spoil, note):
    record = findings(name, Wrong(spoil))
    assert record.details["findings"] >= 1
    assert note in record.note


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_batch_invariance_is_asked_for(monkeypatch, subject):
    """Two kernels serve a call that may hold long segments, of which the usual one has the latter
    serve all.
    """
    narrow = SIZES.routes[:2]
    sizes = dataclasses.replace(SIZES, routes=narrow, fuse=("none",), lengths=(20,), starts=(0, 11))
    monkeypatch.setattr(kernels, "DTYPES", {"bfloat16": kernels.DTYPES["bfloat16"]})
    record = checks.run_check(CHECKS["invariance"], subject, sizes)
    assert record.passed, record.note
    assert record.details["cases"] == 1
    assert record.details["kernels"] == {"rotate": 1, "window": 1, "stream": 1}


class ByEights(Wrong):
    """A kernel whose bits depend on how far a segment stands from a multiple of eight rows, and on
    whether there is NaN in it; the difference is one of rounding.
    """

    row_unit = 8

    def __init__(self, kernel):
        self.launched = frozenset({kernel})

    def spoil(self, out, arguments):
        starts = arguments[-1].tolist()
        for start, end in itertools.pairwise(starts):
            out[start:end] *= 1 + start % 8 * 2**-8
        out[::16, :, 0] *= 1 + 2**-7 * arguments[0].isnan().any()
        return out


@pytest.mark.parametrize("name", ["place", "poison"])
@pytest.mark.parametrize("kernel", ["stream", WARP_SPECIALIZED])
def test_the_warp_specialized_kernel_alone_may_round_otherwise(name, kernel):
    """At another distance from its copies' rows, and beside what is no number."""
    sizes = dataclasses.replace(SIZES, starts=(0, 33, 64, 65))
    found = list(CHECKS[name].run(ByEights(kernel), sizes))
    assert any(found) == (kernel == "stream")
    assert None in found


def on_hopper_gpu(gradients=False):
    """The kernels of one."""
    return ON_HOPPER + (BACKWARD_ON_HOPPER if gradients else ())


@pytest.fixture
def on_hopper(monkeypatch):
    """Launches of a Hopper GPU, which do nothing."""
    monkeypatch.setattr(choose, "_CAN_RUN", True)
    monkeypatch.setattr(attend, "launch_source", lambda _: hopper())
    monkeypatch.setattr(attend, "INTERPRETED", True)
    # In its key the kernel would look for functions that it calls, which are interpreted here.
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    for module in (plan, backward):
        monkeypatch.setattr(module, "launch_kernel", lambda *_: None)
    monkeypatch.setattr(backward, "launch_source", lambda _: hopper())
    monkeypatch.setattr(checks, "kernels_here", on_hopper_gpu)
    fast_path.plans.clear()
    yield
    fast_path.plans.clear()


class Launching(Triton):
    """The Triton kernel, whose launches count and whose results do not: zeros."""

    def attend(self, arguments, max_seqlen, **options):
        return super().attend(arguments, max_seqlen, **options).zero_()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_reaches_every_kernel(on_hopper, monkeypatch, name):
    monkeypatch.setattr(choose, "_MULTIPROCESSORS", 4)  # which fewer heads fill
    monkeypatch.setattr(kernels, "EXTREMES", dict([*kernels.EXTREMES.items()][:1]))
    routes = tuple(dataclasses.replace(x, heads=1 + (x.heads > 4)) for x in ON_GPU.routes)
    sizes = dataclasses.replace(ON_GPU, routes=routes, hostile=12, far_heads=1)
    reached = checks.run_check(CHECKS[name], Launching(), sizes).details["kernels"]
    gradients = CHECKS[name].gradients
    assert min(reached.values()) > 0
    if name == "invariance":  # whose calls are served by all others at once
        assert list(reached) == [kernel for kernel in EVERYWHERE if kernel != WIDE]
        return
    assert list(reached) == [*on_hopper_gpu(gradients)]
    # All is rotated beforehand, and each case is of one kernel.
    assert reached.pop("rotate") == sum(reached.values()) or gradients


@pytest.mark.parametrize("route", stress_inputs.ON_GPU.routes)
@pytest.mark.parametrize("fuse", stress_inputs.ON_GPU.fuse)
def test_what_a_call_launches_is_noted(on_hopper, route, fuse):
    inputs = stress_inputs.draw_for(route, ON_GPU)
    subject = Triton()
    subject.attend(subject.put(inputs), route.max_seqlen, fuse=fuse)
    rotated = {"rotate"} if fuse != "qk" else set()
    serves = WARP_SPECIALIZED if route.name == "warp-specialized" else route.name
    # Which wants both rotated.
    serves = "stream" if serves == WARP_SPECIALIZED and fuse != "none" else serves
    assert subject.launched == rotated | {serves}


@pytest.mark.parametrize(
    ("capability", "kernels"), [(None, EVERYWHERE), ((8, 0), EVERYWHERE), ((9, 0), ON_HOPPER)]
)
def test_which_kernels_a_gpu_has(monkeypatch, capability, kernels):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert launched.kernels_here() == kernels
    with_gradients = kernels + (BACKWARD if kernels == EVERYWHERE else BACKWARD_ON_HOPPER)
    assert launched.kernels_here(gradients=True) == with_gradients


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_run_on_a_hopper_gpu_that_misses_a_kernel_fails(monkeypatch, tmp_path, subject):
    sizes = dataclasses.replace(SIZES, hostile=3, fuse=("none",))  # too small for its own kernel
    monkeypatch.setattr(stress_inputs, "ON_CPU", sizes)
    monkeypatch.setattr(stress_inputs, "ON_GPU", sizes)
    monkeypatch.setattr(checks, "kernels_here", on_hopper_gpu)
    check_stress, only = checks.check_stress, {"checks": [CHECKS["hostile"]], "towers": []}

    def run(seconds, **_):  # in this one, where so much is another's
        return check_stress(seconds, subjects=[subject], **only)

    monkeypatch.setattr(checks, "check_stress", run)
    path = tmp_path / "stress.json"
    assert cli.main(["stress", "--json", str(path)]) == commands.DISAGREES
    [record] = result_files.read(path).records
    assert not record["passed"]
    assert record["note"] == "no case reached the kernel hopper_stream"
    others = {"rotate": 3, "window": 1, "stream": 1, "wide": 1}
    assert record["kernels"] == others | {"hopper_stream": 0}


def test_a_write_beside_a_tensor_is_found():
    inputs = stress_inputs.draw([5], SIZES.head_dim, "float32")

    class Writes(Triton):
        def __init__(self, write):
            self.write = write

        def attend(self, arguments, max_seqlen, **options):
            out = torch.empty(5, 1, 8)
            assert out.isnan().all()
            self.write(arguments, out)
            return out

    def before_the_result(arguments, out):
        out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0

    def behind_qkv(arguments, out):
        qkv = arguments[0]
        qkv.as_strided((1,), (1,), qkv.storage_offset() + qkv.numel())[0] = 0

    def behind_the_result(arguments, out):
        out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 0

    def into_cos(arguments, out):
        arguments[1][2, 3] += 1

    subject = Writes(lambda arguments, out: None)
    subject.attend_guarded(subject.put(inputs), 8)
    for write, message in (
        (before_the_result, "around a result"),
        (behind_the_result, "around a result"),
        (behind_qkv, "input or the memory around it"),
        (into_cos, "input or the memory around it"),
    ):
        with pytest.raises(MemoryFault, match=message):
            Writes(write).attend_guarded(subject.put(inputs), 8)


def test_guards_keep_values_and_may_unalign():
    x = torch.arange(6, dtype=torch.int32).view(2, 3)
    inside, buffer = guards.guarded(x, value=9, guard=5)
    assert torch.equal(inside, x)
    assert inside.data_ptr() % 16 == (buffer.data_ptr() + 20) % 16
    assert (buffer[:5] == 9).all()
    assert (buffer[-5:] == 9).all()


def test_only_segments_beyond_the_bound_may_be_refused():
    refusable = stress_inputs.refusable(np.array([-5, 8, 17, 12, 99]), 20, 8)
    assert refusable.tolist() == [False] * 8 + [True] * 9 + [False] * 3


@pytest.mark.parametrize(
    ("cu_seqlens", "first", "end"),
    [([1, 4, 9, 7, 12, 14], 4, 12), ([9, 0, 5, 5, 14], 0, 14), ([0, 3, 3, 20], 0, 0)],
)
def test_rows_between_values_that_decrease_excuse_their_segments(cu_seqlens, first, end):
    contested = stress_inputs.contested(np.array(cu_seqlens), 20)
    assert np.flatnonzero(contested).tolist() == list(range(first, end))


def test_hostile_segments_are_of_every_kind():
    rng = np.random.default_rng(0)
    drawn = np.stack([stress_inputs.hostile_cu_seqlens(rng, 5, 30) for _ in range(500)])
    assert drawn.dtype == np.int32
    lengths = np.diff(drawn.astype(np.int64))
    for kind in (drawn < 0, drawn > 30, drawn == 2**31 - 1, lengths < 0, lengths == 0):
        assert kind.any(axis=1).mean() > 0.1
    legal = (drawn >= 0).all(1) & (drawn <= 30).all(1) & (lengths >= 0).all(1)
    assert 0.02 < legal.mean() < 0.5


def test_the_table_tells_cases_and_findings():
    reached = {"rotate": 1000, "window": 1234}
    good = checks.outcome("hostile", "triton", "anything", 1234, [], kernels=reached)
    found, others = ["row 3 is NaN", "another"], {"window": 6, "stream": 4}
    bad = checks.outcome("hostile", "pallas", "anything", 10, found, kernels=others)
    once = checks.outcome("poison", "pallas", "anything", 1, ["padding is not 0"])
    empty = checks.outcome("place", "triton", "moved", 0, [])
    server = checks.outcome(
        "server", "torch", "calls", 9, [], host_growth_mib=3.2, device_growth_mib=-0.1
    )
    assert [good.passed, bad.passed, empty.passed] == [True, False, False]
    assert empty.note == "no case was tried"
    results = synthetic.as_results("stress", [good, bad, once, server])
    table = stress_table(results)
    cases = "triton 1,234 (rotate 1,000, window 1,234), pallas 10 (window 6, stream 4)"
    memory = "memory +3 MiB on the host and +0 on the device"
    assert table.splitlines()[2:] == [
        f"| anything | {cases} | nothing wrong; **pallas: 2 findings**, first: row 3 is NaN |",
        "| anything | pallas 1 | **pallas: 1 finding**, first: padding is not 0 |",
        f"| calls | torch 9 | torch: nothing wrong, {memory} |",
    ]
    line = stress_line(results)
    assert line.startswith("1,245 cases of ")
    told = "(rotate 1,000, window 1,240, stream 4), 9 calls of busy towers: **pallas: 2 "
    assert told in line
    assert "**pallas: 1 finding**, first: padding is not 0" in line


def test_without_a_checkpoint_for_the_towers_what_kernels_did_is_kept(monkeypatch):
    def fail(directory, config):
        raise OSError("no space left on the device")

    monkeypatch.setattr(huggingface, "random_checkpoint", fail)
    monkeypatch.setattr(stress_inputs, "ON_CPU", SIZES)
    monkeypatch.setattr(stress_inputs, "ON_GPU", SIZES)
    of = {"checks": [CHECKS["place"]], "subjects": [Right()], "towers": our_towers()[:1]}
    records = list(checks.check_stress(seconds=1, **of))
    assert [record.passed for record in records] == [True, False]
    assert records[1].note == "OSError: no space left on the device"


def test_a_kernel_that_ends_its_process_is_a_finding_and_the_others_go_on():
    for_each = {"checks": [CHECKS["place"]], "subjects": [Dies(), Still()]}
    dead, other = checks.check_stress(seconds=1, towers=[], processes=2, **for_each)
    assert (dead.implementation, dead.passed, dead.details["cases"]) == ("dies", False, 0)
    assert "terminated abruptly" in dead.note
    assert other.passed
    assert other.details["cases"] > 5


# What `python -m compare stress` does for minutes, in less of everything. A process gets a class of
# tests at a time, and JAX compiles for most of it.
MEMORY = "hostile", "poison", "huge"
BITS = "determinism", "place", "invariance"
NUMBERS = "numerics", "gradients"
TWO_DTYPES = {name: dtype for name, dtype in kernels.DTYPES.items() if name != "float16"}


def test_every_check_and_kernel_is_tried_on_a_gpu():
    names = [route.name for route in ON_GPU.routes]
    assert names == ["window", "stream", "warp-specialized", "wide"]
    assert sorted((*MEMORY, *BITS, *NUMBERS)) == sorted(CHECKS)


def kernels_endure(subject, names):
    """A class of tests: some checks of a framework's kernels."""

    @pytest.mark.long
    @pytest.mark.gpu
    class Endurance:
        @pytest.mark.parametrize("name", names)
        def test_our_kernels_endure(self, monkeypatch, name):
            if (
                launched.kernels_here() == ON_HOPPER
                and subject.name == "pallas"
                and not HAVE_MOSAIC
            ):
                pytest.skip("its warp-specialized kernel, which is to be reached, is for 0.11.2")
            monkeypatch.setattr(stress_inputs, "ON_GPU", ON_GPU)
            if name != "numerics":  # which mind fp16's range: other checks mind how wide it is
                monkeypatch.setattr(kernels, "DTYPES", TWO_DTYPES)
            of_kernels = {"checks": [CHECKS[name]], "subjects": [subject], "towers": []}
            [record] = checks.check_stress(seconds=0, **of_kernels)
            assert record.passed, record.note

    return Endurance


def tower_endures(number):
    """A class of one test, of one of our towers."""

    @pytest.mark.long
    @pytest.mark.gpu
    class Endurance:
        def test_our_towers_endure(self, monkeypatch):
            monkeypatch.setattr(stress_server, "ON_GPU", Traffic(200, 8, 6, 1, 16))
            tower = our_towers()[number]
            [record] = checks.check_stress(seconds=10, checks=[], towers=[tower])
            assert record.passed, record.note

    return Endurance


TestTritonsMemory = kernels_endure(TRITON, MEMORY)
TestPallasMemory = kernels_endure(PALLAS, MEMORY)
TestTritonsBits = kernels_endure(TRITON, BITS)
TestPallasBits = kernels_endure(PALLAS, BITS)
TestTritonsNumbers = kernels_endure(TRITON, NUMBERS)
TestPallasNumbers = kernels_endure(PALLAS, NUMBERS)
TestTorchTower, TestFlaxTower = map(tower_endures, range(2))
