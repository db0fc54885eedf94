"""What the operation should give: once in fp64, and once as the unfused computation would round.

Written without the kernels' own reference, so that a mistake there cannot hide here.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from compare.workloads.arrays import to_torch
from compare.workloads.kernels import KernelInputs

# Elements of a block of logits [heads, rows, keys]: 1 GiB in fp64, whatever the segment's length.
_LOGITS = 1 << 27

# (q, k, v, scale) of some rows and their segment -> their result
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


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
    embed = _EMBEDDINGS[inputs.embedding]
    return _by_segment(inputs, embed(q, cos, sin), embed(k, cos, sin), v, scale, _exact)


def unfused(inputs: KernelInputs, scale: float | None = None) -> torch.Tensor:
    """The operation as separate steps in the inputs' dtype: what rule 1 expects of a kernel.

    Embedding in fp32 and back to the dtype, logits and softmax sums in fp32, probabilities cast to
    the dtype, the second product summed in fp32, one division, one cast.

    Returns:
        [tokens, heads, head_dim] in the dtype of qkv.
    """
    qkv, cos, sin = (to_torch(x) for x in (inputs.qkv, inputs.cos, inputs.sin))
    dtype = qkv.dtype
    q, k, v = qkv.unbind(1)
    embed = _EMBEDDINGS[inputs.embedding]
    q, k = (embed(x.float(), cos, sin).to(dtype).float() for x in (q, k))
    steps = partial(_separate_steps, dtype=dtype)
    return _by_segment(inputs, q, k, v.float(), scale, steps).to(dtype)


def oracle_gradient(inputs: KernelInputs, scale: float | None = None) -> torch.Tensor:
    """The gradient in qkv of sum(inputs.grad * oracle), every step in fp64.

    Returns:
        [tokens, 3, heads, head_dim] fp64; 0 for tokens of no segment.
    """
    qkv, cos, sin = (to_torch(x).double() for x in (inputs.qkv, inputs.cos, inputs.sin))
    embed = _EMBEDDINGS[inputs.embedding]
    return _gradient(inputs, qkv, lambda x: embed(x, cos, sin), scale, _exact)


def unfused_gradient(inputs: KernelInputs, scale: float | None = None) -> torch.Tensor:
    """The same as the separate steps of `unfused` round it, forward and backward.

    The gradients of rotated q and k are cast to the dtype, that of the probabilities is not.

    Returns:
        [tokens, 3, heads, head_dim] in the dtype of qkv.
    """
    qkv, cos, sin = (to_torch(x) for x in (inputs.qkv, inputs.cos, inputs.sin))
    dtype = qkv.dtype
    steps = partial(_separate_steps, dtype=dtype)
    embed = _EMBEDDINGS[inputs.embedding]
    return _gradient(inputs, qkv, lambda x: embed(x.float(), cos, sin).to(dtype), scale, steps)


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


def _add(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Add sin to the even columns and cos to the odd ones."""
    return x + torch.stack([sin, cos], dim=-1).flatten(-2)[:, None]


_EMBEDDINGS = {"rope": _rotate, "sinusoidal": _add}


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)
    return torch.einsum("hqk,khd->qhd", p, v)


def _separate_steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    # On a GPU PyTorch's default for fp32 products is true fp32, and no code here changes it.
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = p.sum(-1).T[..., None]
    p = p + (p.to(dtype).float() - p).detach()  # rounded, but not its gradient
    return torch.einsum("hqk,khd->qhd", p, v) / total


def _by_segment(
    inputs: KernelInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    attend: Attend,
) -> torch.Tensor:
    heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    for rows, segment in _blocks(inputs, heads):
        out[rows] = attend(q[rows], k[segment], v[segment], scale)
    return out


def _gradient(
    inputs: KernelInputs,
    qkv: torch.Tensor,
    rotate: Callable[[torch.Tensor], torch.Tensor],
    scale: float | None,
    attend: Attend,
) -> torch.Tensor:
    """Of the operation with these steps, which rotate into a dtype and attend in fp32 or wider."""
    heads, head_dim = qkv.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    qkv.requires_grad_()
    q, k, v = qkv.unbind(1)
    used = [rotate(q), rotate(k), v]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    leaves = [x.detach().to(wide) for x in used]
    sums = [torch.zeros_like(x) for x in leaves]
    grad = to_torch(inputs.grad).to(wide)
    for rows, segment in _blocks(inputs, heads):
        places = rows, segment, segment
        block = [x[at].requires_grad_() for x, at in zip(leaves, places, strict=True)]
        found = torch.autograd.grad(attend(*block, scale), block, grad[rows])
        for total, at, part in zip(sums, places, found, strict=True):
            total[at] += part
    of_used = [total.to(x.dtype) for total, x in zip(sums, used, strict=True)]
    return torch.autograd.grad(used, qkv, of_used)[0]


def _blocks(inputs: KernelInputs, heads: int) -> Iterator[tuple[slice, slice]]:
    """Rows of bounded logits, and the segment that they are of."""
    for start, end in itertools.pairwise(inputs.cu_seqlens.tolist()):
        step = max(1, _LOGITS // max(1, heads * (end - start)))
        for first in range(start, end, step):
            yield slice(first, min(first + step, end)), slice(start, end)
