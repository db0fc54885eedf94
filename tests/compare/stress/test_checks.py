"""The stress checks find nothing in a right kernel and tower, and find what is wrong in others."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
pytest.importorskip("transformers")

from compare.implementations import huggingface
from compare.implementations.towers import our_towers
from compare.report.tables import stress_table
from compare.stress import checks, guards
from compare.stress import inputs as stress_inputs
from compare.stress import launched, subjects
from compare.stress import server as stress_server
from compare.stress.launched import EVERYWHERE, WARP_SPECIALIZED
from compare.stress.server import Traffic
from compare.stress.subjects import MemoryFault, Subject, Triton
from compare.workloads.arrays import torch_arguments
from tests.compare import synthetic
from triton_kernels import fused_rope_attention_qkvpacked

SIZES = dataclasses.replace(stress_inputs.ON_CPU, hostile=12)
CHECKS = {check.name: check for check in checks.CHECKS}


class Right(Subject):
    """PyTorch's reference as a kernel, or as all of them."""

    name = "reference"
    launched = frozenset((*EVERYWHERE, WARP_SPECIALIZED))

    def put(self, inputs):
        return torch_arguments(inputs)

    def attend(self, arguments, max_seqlen, **options):
        options.pop("fuse", None)
        return fused_rope_attention_qkvpacked(*arguments, implementation="reference", **options)


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
        ("numerics", overflow, "near fp16's largest"),
        ("numerics", be_four_times_as_wrong, "error"),
        ("huge", fail, "RuntimeError: launch failed"),
    ],
)
def test_what_is_wrong_is_found(name, spoil, note):
    record = findings(name, Wrong(spoil))
    assert record.details["findings"] >= 1
    assert note in record.note


def test_a_write_beside_a_tensor_is_found():
    inputs = stress_inputs.draw([5], SIZES, "float32")

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

    def into_cos(arguments, out):
        arguments[1][2, 3] += 1

    subject = Writes(lambda arguments, out: None)
    subject.attend_guarded(subject.put(inputs), 8)
    for write, message in (
        (before_the_result, "around a result"),
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
    good = checks.outcome("hostile", "triton", "anything", 1234, [])
    bad = checks.outcome("hostile", "pallas", "anything", 10, ["row 3 is NaN", "another"])
    empty = checks.outcome("place", "triton", "moved", 0, [])
    server = checks.outcome(
        "server", "torch", "calls", 9, [], host_growth_mib=3.2, device_growth_mib=-0.1
    )
    assert [good.passed, bad.passed, empty.passed] == [True, False, False]
    assert empty.note == "no case was tried"
    table = stress_table(synthetic.as_results("stress", [good, bad, server]))
    assert "| anything | triton 1,234, pallas 10 | nothing wrong; **pallas: 2 findings**" in table
    assert "row 3 is NaN" in table
    assert "| torch 9 | torch: nothing wrong, memory +3 MiB on the host and +0 on" in table


def test_without_a_checkpoint_for_the_towers_what_kernels_did_is_kept(monkeypatch):
    def fail(directory, config):
        raise OSError("no space left on the device")

    monkeypatch.setattr(huggingface, "random_checkpoint", fail)
    monkeypatch.setattr(stress_inputs, "ON_CPU", SIZES)
    monkeypatch.setattr(stress_inputs, "ON_GPU", SIZES)
    records = checks.check_stress(
        seconds=1, checks=[CHECKS["place"]], subjects=[Right()], towers=our_towers()[:1]
    )
    assert [record.passed for record in records] == [True, False]
    assert records[1].note == "OSError: no space left on the device"


@pytest.mark.gpu
def test_our_kernels_and_towers_endure(monkeypatch):
    """What `python -m compare stress` does for minutes, in less of everything."""
    sizes = dataclasses.replace(
        stress_inputs.ON_GPU,
        hostile=90, runs=5, far_tokens=9000, long_segment=999, segments=500, fuse=("none",),
        lengths=(29,), starts=(0, 33, 70),
    )  # fmt: skip
    monkeypatch.setattr(stress_inputs, "ON_GPU", sizes)
    monkeypatch.setattr(stress_server, "ON_GPU", Traffic(200, 8, 10, 1, 16))
    records = checks.check_stress(seconds=10)
    assert len(records) == 2 * len(checks.CHECKS) + 2
    assert [record for record in records if not record.passed] == []
