"""What the operation should give: once in fp64, and once as the unfused computation would round.

Written without the kernels' own reference, so that a mistake there cannot hide here.
"""

import itertools
from collections.abc import Callable

import torch

from compare.workloads.arrays import to_torch
from compare.workloads.kernels import KernelInputs

# Elements of a block of logits [heads, rows, keys]: 1 GiB in fp64, whatever the segment's length.
_LOGITS = 1 << 27


def oracle(inputs: KernelInputs, scale: float | None = None) -> torch.Tensor:
    """The operation with every step in fp64.

    Args:
        inputs: of the call; cos and sin are taken as they are, so the angles' own rounding to fp32
            is no part of the error.
        scale: factor of the logits; default head_dim ** -0.5.

    Returns:
        [tokens, heads, head_dim] fp64 on the GPU if there is one; 0 for tokens of no segment.
    """
    qkv, cos, sin = (to_torch(x).double() for x in (inputs.qkv, inputs.cos, inputs.sin))
    q, k, v = qkv.unbind(1)
    return _by_segment(inputs, _rotate(q, cos, sin), _rotate(k, cos, sin), v, scale, _exact)


def unfused(inputs: KernelInputs, scale: float | None = None) -> torch.Tensor:
    """The operation as separate steps in the inputs' dtype: what rule 1 expects of a kernel.

    Rotation in fp32 and back to the dtype, logits and softmax sums in fp32, probabilities cast to
    the dtype, the second product summed in fp32, one division, one cast.

    Returns:
        [tokens, heads, head_dim] in the dtype of qkv.
    """
    qkv, cos, sin = (to_torch(x) for x in (inputs.qkv, inputs.cos, inputs.sin))
    dtype = qkv.dtype
    q, k, v = qkv.unbind(1)
    q, k = (_rotate(x.float(), cos, sin).to(dtype).float() for x in (q, k))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        p = torch.exp(logits - logits.amax(-1, keepdim=True))
        total = p.sum(-1).T[..., None]
        return torch.einsum("hqk,khd->qhd", p.to(dtype).float(), v) / total

    # On a GPU PyTorch's default for fp32 products is true fp32, and no code here changes it.
    return _by_segment(inputs, q, k, v.float(), scale, attend).to(dtype)


def rotated(inputs: KernelInputs) -> torch.Tensor:
    """Q and K rotated in fp64: [tokens, 2, heads, head_dim]."""
    qkv, cos, sin = (to_torch(x).double() for x in (inputs.qkv, inputs.cos, inputs.sin))
    return torch.stack([_rotate(x, cos, sin) for x in qkv[:, :2].unbind(1)], dim=1)


def rotated_once(inputs: KernelInputs) -> torch.Tensor:
    """The same in fp32, rounded once to the dtype of qkv."""
    qkv, cos, sin = (to_torch(x) for x in (inputs.qkv, inputs.cos, inputs.sin))
    turned = [_rotate(x.float(), cos, sin) for x in qkv[:, :2].unbind(1)]
    return torch.stack(turned, dim=1).to(qkv.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + rotary_dim / 2]) by its angle: complex multiplication."""
    half = cos.shape[-1]
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
    turned = pairs * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)
    return torch.einsum("hqk,khd->qhd", p, v)


def _by_segment(
    inputs: KernelInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> torch.Tensor:
    heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        step = max(1, _LOGITS // max(1, heads * (end - start)))
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            out[rows] = attend(q[rows], k[start:end], v[start:end], scale)
    return out
