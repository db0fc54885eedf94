"""Agreement holds for the kernels, and does not for wrong ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from compare.agreement import kernels
from compare.agreement.kernels import check_kernels
from compare.agreement.oracle import oracle, unfused
from compare.implementations.kernels import FUSE, KernelImplementation
from compare.workloads.arrays import to_torch
from compare.workloads.kernels import KernelInputs, KernelWorkload

TINY = KernelWorkload("tiny", "windows", ((1, 8, 10),), heads=1)


def stand_in(name, compute):
    """An implementation that computes from the workload's inputs, whatever it is called with."""
    return KernelImplementation(
        name, "torch", lambda workload: lambda *_: compute(workload.inputs()), ours=True
    )


def check(triton, pallas):
    twins = [stand_in("triton", triton), stand_in("pallas", pallas)]
    records = check_kernels([(TINY, ("qk",))], lambda fuse: twins)
    return {record.implementation: record for record in records}


def turned_backwards(inputs):
    return unfused(KernelInputs(inputs.qkv, inputs.cos, -inputs.sin, inputs.cu_seqlens, 64))


def leaking(inputs):
    whole = to_torch(inputs.cu_seqlens[[0, -1]]).cpu().numpy()
    return unfused(KernelInputs(inputs.qkv, inputs.cos, inputs.sin, whole, len(inputs.qkv)))


def with_nan(inputs):
    out = unfused(inputs)
    out[-1, -1, -1] = float("nan")
    return out


def failing(inputs):
    raise RuntimeError("no such kernel\nand a long explanation")


def test_our_kernels_agree(capsys):
    records = check_kernels([(TINY, ("qk", "none"))])
    assert [record.passed for record in records] == [True] * 6
    assert {record.implementation for record in records} == {
        "triton",
        "pallas",
        "pallas against triton",
    }
    assert records[2].details["bit_equal_share"] > 0.9
    assert "Kernel agreement" in capsys.readouterr().out


def test_on_a_gpu_each_pair_is_compiled_for_its_workload(monkeypatch):
    """A workload that has no answer takes its pairs along, and not those of the next."""
    other = KernelWorkload("other", "windows", ((1, 4, 4),), heads=1)
    judge = kernels.Expected.of
    jobs = []

    def compiled(all_jobs, _):
        jobs.extend(all_jobs)
        return [replace(i, name=f"{i.name} for {workload.name}") for i, workload in all_jobs]

    def no_answer(workload, *arguments):
        if workload is TINY:
            raise RuntimeError("no memory is left")
        return judge(workload, *arguments)

    monkeypatch.setattr(kernels, "has_gpu", lambda: True)
    monkeypatch.setattr(kernels, "warm_up", compiled)
    monkeypatch.setattr(kernels.Expected, "of", no_answer)
    twins = [stand_in("triton", unfused), stand_in("pallas", unfused)]
    records = check_kernels([(TINY, ("qk", "none")), (other, ("qk",))], lambda fuse: twins)
    assert [workload.name for _, workload in jobs] == ["tiny"] * 4 + ["other"] * 2
    assert [(r.implementation, r.passed) for r in records] == [
        ("oracle", False),
        ("triton for other", True),
        ("pallas for other", True),
        ("pallas for other against triton for other", True),
    ]


def test_all_but_one_element_are_not_all(capsys):
    nearly = unfused(TINY.inputs())
    nearly[0, 0, 0] *= 1 + 2**-7
    assert nearly.numel() > 2000  # of which one would round away
    check(lambda _: nearly, unfused)
    assert "99.9%" in capsys.readouterr().out
    check(unfused, unfused)
    assert "100%" in capsys.readouterr().out


def test_without_an_answer_to_judge_by_nothing_passes(monkeypatch):
    def broken(_):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(kernels.Expected, "of", broken)
    (record,) = check(unfused, unfused).values()
    assert (record.passed, record.note) == (False, "RuntimeError: the GPU is gone")


def test_what_an_earlier_call_has_left_is_no_result(monkeypatch):
    memory = unfused(TINY.inputs())
    monkeypatch.setattr(kernels, "poison", lambda _: memory.fill_(float("nan")))
    records = check(lambda _: memory, unfused)
    assert [records[name].passed for name in ("triton", "pallas")] == [False, True]


def test_every_way_of_fusing_is_the_one_that_is_called(monkeypatch):
    """All ways give the same result: agreement and times would be those of one alone."""
    calls = []

    def called(package):
        def attend(qkv, *_, fuse, implementation, **options):
            calls.append((package, fuse, implementation))
            return qkv[:, 0]

        return attend

    for package in ("triton_kernels", "pallas_kernels"):
        monkeypatch.setattr(f"{package}.fused_rope_attention_qkvpacked", called(package))
    monkeypatch.setattr(kernels, "has_gpu", lambda: False)  # where all are called once before
    check_kernels([(TINY, (*FUSE, "auto"))])
    assert calls == [
        (package, fuse, "kernel")
        for fuse in (*FUSE, "auto")
        for package in ("triton_kernels", "pallas_kernels")
    ]


@pytest.mark.parametrize("wrong", [turned_backwards, leaking, with_nan])
@pytest.mark.parametrize("side", ["triton", "pallas"])
def test_a_wrong_kernel_fails(wrong, side, capsys):
    records = check(**({"triton": unfused, "pallas": unfused} | {side: wrong}))
    assert {name for name, record in records.items() if not record.passed} == {
        side,
        "pallas against triton",
    }
    assert "FAILED" in capsys.readouterr().out


def test_a_result_of_another_shape_fails_and_the_twin_still_counts():
    records = check(lambda inputs: unfused(inputs)[:-1], unfused)
    assert records["triton"].passed is False
    assert "results differ in shape" in records["triton"].note
    assert records["pallas"].passed is True


def test_a_kernel_that_raises_fails_with_its_first_line():
    records = check(failing, unfused)
    assert records["triton"].passed is False
    assert records["triton"].note == "RuntimeError: no such kernel"
    assert records["pallas"].passed is True
    assert "pallas against triton" not in records


def test_twins_may_each_pass_and_still_differ_too_much():
    def pushed(inputs, sign):
        exact = oracle(inputs)
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
        scale = 2.4e-3 * exact.norm().cpu() / noise.norm()
        return exact + sign * (scale * noise).to(exact)

    records = check(partial(pushed, sign=1), partial(pushed, sign=-1))
    assert records["triton"].passed
    assert records["pallas"].passed
    assert not records["pallas against triton"].passed


def test_every_way_of_fusing_and_every_dtype_is_checked():
    checked = kernels.cases()
    assert {fuse for _, fuses in checked for fuse in fuses} >= {"qk", "q", "none"}
    assert {workload.dtype for workload, _ in checked} == {"bfloat16", "float16", "float32"}
    assert {workload.kind for workload, _ in checked} == {"windows", "frames"}
    assert any(workload.rotary_dim for workload, _ in checked)
