"""Rotation as a pass of its own, on stand-ins for the GPU's clocks."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("jax")

from compare.agreement.metrics import relative_rms_error
from compare.agreement.oracle import rotated, rotated_once, unfused
from compare.bench import rotation
from compare.bench.ceilings import Ceilings
from compare.bench.rotation import ROTATION_WORKLOADS, bench_rotation
from compare.implementations import kernels
from compare.implementations.kernels import KernelImplementation
from compare.workloads.arrays import torch_arguments
from compare.workloads.kernels import KernelWorkload
from tests.compare.clocks import stand_in_clocks

TINY = KernelWorkload("rotate-tiny", "windows", ((1, 4, 6),), heads=2)
CEILINGS = Ceilings(4e9, 4e9, 8e14)


def test_the_bytes_of_one_pass():
    workload = ROTATION_WORKLOADS["rotate-448"]
    assert workload.bytes_moved == 2 * (1024 * 2 * 1280 * 2) + 2 * 1024 * 40 * 4


@pytest.mark.parametrize("rotary_dim", [None, 40])
def test_the_oracles_rotation(rotary_dim):
    inputs = replace(TINY, rotary_dim=rotary_dim, dtype="float32").inputs()
    exact = rotated(inputs)
    qkv, cos, sin = (
        torch.tensor(x, dtype=torch.float64, device=exact.device)
        for x in (inputs.qkv, inputs.cos, inputs.sin)
    )
    half = inputs.cos.shape[1]
    angle = torch.atan2(sin, cos)
    for token, part, head, i in ((0, 0, 0, 0), (7, 1, 1, 3), (23, 1, 0, half - 1)):
        x1, x2 = qkv[token, part, head, [i, i + half]]
        c, s = torch.cos(angle[token, i]), torch.sin(angle[token, i])
        expected = torch.stack([x1 * c - x2 * s, x2 * c + x1 * s])
        torch.testing.assert_close(
            exact[token, part, head, [i, i + half]], expected, rtol=1e-6, atol=1e-6
        )
    assert (exact[..., 2 * half :] == qkv[:, :2, ..., 2 * half :]).all()
    assert 0 < relative_rms_error(rotated_once(inputs), exact) < 1e-6


@pytest.fixture
def pallas(monkeypatch):
    """A stand-in: the interpreter takes its time."""
    import jax.numpy as jnp

    out = jnp.asarray(unfused(TINY.inputs()).float().cpu().numpy())
    twin = KernelImplementation("pallas", "jax", lambda _: lambda *_: out, ours=True)
    monkeypatch.setattr(kernels, "pallas", lambda fuse: twin)


def test_all_are_judged_and_timed(monkeypatch, capsys, pallas):
    stand_in_clocks(monkeypatch, jax_kernel="rotate_kernel")
    [records] = bench_rotation([TINY], CEILINGS)
    assert [(r.implementation, r.median_us, r.passed) for r in records] == [
        ("triton", 10.0, True),
        ("pallas", 9.0, True),
        ("negation in place", 10.0, True),
    ]
    assert [record.ours for record in records] == [True, True, False]
    floor_us = TINY.bytes_moved / 4e9 * 1e6
    assert records[0].share_of_floor == pytest.approx(floor_us / 10)
    assert records[0].details["bytes_per_s"] == pytest.approx(TINY.bytes_moved / 10e-6)
    assert "Rotation as a pass of its own" in capsys.readouterr().out


def test_the_rotation_in_place_is_the_kernels():
    arguments = torch_arguments(TINY.inputs())
    out = rotation.in_place().prepare(TINY)(*arguments)
    assert out.data_ptr() == arguments[0].data_ptr()
    assert relative_rms_error(out, rotated(TINY.inputs())) < 4e-3


def test_the_negation_moves_as_many_bytes_in_place():
    arguments = torch_arguments(TINY.inputs())
    qkv = arguments[0]
    before = qkv.clone().view(-1)
    out = rotation.negation().prepare(TINY)(*arguments)
    assert out.data_ptr() == qkv.data_ptr()
    assert 2 * out.nbytes == TINY.bytes_moved < 2 * qkv.nbytes
    size = out.numel()
    assert (qkv.view(-1)[:size] == -before[:size]).all()
    assert (qkv.view(-1)[size:] == before[size:]).all()


def test_a_profile_without_the_kernel_is_no_time(monkeypatch, pallas):
    stand_in_clocks(monkeypatch, jax_kernel="another_kernel")
    [[_, record, _]] = bench_rotation([TINY], CEILINGS)
    assert record.median_us is None
    assert "recorded no rotate_kernel" in record.note
