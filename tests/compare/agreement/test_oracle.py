import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.agreement import oracle as oracle_module
from compare.agreement.metrics import relative_rms_error
from compare.agreement.oracle import oracle, oracle_gradient, unfused, unfused_gradient
from compare.workloads.kernels import KernelInputs, KernelWorkload
from tests import kernel_cases
from tests.rounding_contract import RoundingContract

WORKLOAD = KernelWorkload("w", "windows", ((1, 6, 10), (1, 2, 4)), heads=2, head_dim=24)


def dense_attention(inputs: KernelInputs) -> np.ndarray:
    """The whole logits matrix with -inf between segments, rotation pair by pair."""
    qkv = inputs.qkv.astype(np.float64)
    tokens, _, heads, head_dim = qkv.shape
    rotated = qkv.copy()
    half = inputs.cos.shape[1]
    for pair in range(half):
        c, s = (x[:, pair, None, None].astype(np.float64) for x in (inputs.cos, inputs.sin))
        x1, x2 = qkv[:, :2, :, pair], qkv[:, :2, :, pair + half]
        rotated[:, :2, :, pair] = x1 * c - x2 * s
        rotated[:, :2, :, pair + half] = x2 * c + x1 * s
    segment = np.searchsorted(inputs.cu_seqlens, np.arange(tokens), side="right")
    hidden = segment[:, None] != segment[None]
    out = np.empty((tokens, heads, head_dim))
    for head in range(heads):
        q, k, v = rotated[:, :, head].transpose(1, 0, 2)
        logits = np.where(hidden, -np.inf, q @ k.T / np.sqrt(head_dim))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out


@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("block", [1, 1 << 27])
def test_oracle_equals_dense_attention(monkeypatch, rotary_dim, block):
    monkeypatch.setattr(oracle_module, "_LOGITS", block)
    workload = KernelWorkload("w", "windows", WORKLOAD.grid_thw, 2, 24, rotary_dim=rotary_dim)
    inputs = workload.inputs()
    expected = torch.tensor(dense_attention(inputs))
    assert relative_rms_error(oracle(inputs).cpu(), expected) < 1e-12


@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("block", [1, 1 << 27])
def test_gradients_are_the_slopes_of_dense_attention(monkeypatch, rotary_dim, block):
    """By central differences in fp64, along a direction of q, of k and of v."""
    monkeypatch.setattr(oracle_module, "_LOGITS", block)
    workload = dataclasses.replace(WORKLOAD, rotary_dim=rotary_dim, gradients=True)
    inputs = workload.inputs()
    found = oracle_gradient(inputs).cpu().numpy()
    qkv, grad = (x.astype(np.float64) for x in (inputs.qkv, inputs.grad))
    rng = np.random.default_rng(1)
    for part in range(3):
        direction = np.zeros_like(qkv)
        direction[:, part] = rng.standard_normal(direction[:, part].shape)
        ahead, behind = (
            (grad * dense_attention(dataclasses.replace(inputs, qkv=qkv + step * direction))).sum()
            for step in (1e-5, -1e-5)
        )
        size = np.linalg.norm(found[:, part]) * np.linalg.norm(direction)
        assert abs((ahead - behind) / 2e-5 - (found * direction).sum()) < 1e-8 * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_unfused_gradients_round_as_separate_steps(dtype):
    """As those that the kernels' own tests write down, part by part, not better and not worse."""
    inputs = dataclasses.replace(WORKLOAD, dtype=dtype, gradients=True).inputs()
    case = kernel_cases.Case(inputs.qkv, inputs.cos, inputs.sin, inputs.cu_seqlens)
    exact, found = oracle_gradient(inputs).cpu(), unfused_gradient(inputs).cpu()
    assert found.dtype == getattr(torch, dtype)
    for part, steps in enumerate(kernel_cases.gradients(case, inputs.grad, exact=False)[:3]):
        separate = torch.from_numpy(steps.astype(np.float32))
        errors = [relative_rms_error(x, exact[:, part]) for x in (found[:, part], separate)]
        assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_scale_is_taken():
    inputs = WORKLOAD.inputs()
    assert relative_rms_error(oracle(inputs, 24**-0.5), oracle(inputs)) == 0
    assert relative_rms_error(oracle(inputs, 1.0), oracle(inputs)) > 0.1


class TestUnfused(RoundingContract):
    @staticmethod
    def attend(case, scale):
        return unfused(KernelInputs(*case.packed, case.longest), scale).float().cpu()


class TestUnfusedOfTheTests(RoundingContract):
    attend = staticmethod(kernel_cases.unfused)


@pytest.mark.parametrize("compute", [oracle, unfused])
def test_tokens_of_no_segment_get_zero(compute):
    inputs = WORKLOAD.inputs()
    shorter = KernelInputs(
        inputs.qkv, inputs.cos, inputs.sin, inputs.cu_seqlens[:-1].copy(), inputs.max_seqlen
    )
    out = compute(shorter)
    padding = slice(int(shorter.cu_seqlens[-1]), None)
    assert (out[padding] == 0).all()
    assert (out[: padding.start] != 0).all()


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("bfloat16", 1e-3, 4e-3), ("float16", 1e-4, 6e-4), ("float32", 1e-8, 1e-6)],
)
def test_unfused_rounds_like_its_dtype(dtype, least, most):
    workload = KernelWorkload("w", "windows", WORKLOAD.grid_thw, 2, 24, dtype)
    inputs = workload.inputs()
    out = unfused(inputs)
    assert out.dtype == getattr(torch, dtype)
    assert least < relative_rms_error(out, oracle(inputs)) < most


def test_bfloat16_reaches_torch_with_its_bits():
    from compare.workloads.arrays import to_torch

    values = np.array([1.0, -2.5, 3e38, 1e-30], dtype=ml_dtypes.bfloat16)
    assert to_torch(values, "cpu").double().tolist() == values.astype(np.float64).tolist()
