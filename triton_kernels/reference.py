"""The unfused computation in plain PyTorch: the oracle, the CPU path, the differentiable path."""

import itertools

import torch

from triton_kernels.checks import NORM_EPS
from triton_kernels.sinusoidal import sinusoidal_tables

# Rows of Q whose logits exist at once: bounds the memory of a long segment.
QUERY_BLOCK = 1024


def check_may_wait(x: torch.Tensor, what: str) -> None:
    """Raise a RuntimeError if a CUDA graph is captured, in which nothing may wait for the GPU."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} waits for the GPU: no CUDA graph can be captured of it")


def rotate_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = NORM_EPS,
) -> torch.Tensor:
    """Norm, if there is a weight, and split-half (NeoX) rotation in fp32; then x's dtype.

    x [tokens, heads, head_dim]; cos and sin [tokens, rotary_dim / 2] fp32; weight [head_dim]. The
    dims behind rotary_dim pass unrotated. x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin (Su et al.,
    RoFormer, 2021, in the layout of GPT-NeoX).
    """
    half, dtype = cos.shape[-1], x.dtype
    if weight is not None:
        x = normalize_reference(x, weight, eps)
    cos, sin = cos[:, None], sin[:, None]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return torch.cat([rotated.to(dtype), rest.to(dtype)], dim=-1)


def embed_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    embed: str,
    weight: torch.Tensor | None = None,
    eps: float = NORM_EPS,
) -> torch.Tensor:
    """What is done to Q or K: rotate_reference, or sin added to even and cos to odd columns, in
    fp32; then x's dtype. cos and sin [tokens, head_dim / 2].
    """
    if embed == "rope":
        return rotate_reference(x, cos, sin, weight, eps)
    added = torch.stack([sin, cos], dim=-1).flatten(1)
    return (x.float() + added[:, None]).to(x.dtype)


def normalize_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head, in fp32; x [tokens, heads, head_dim], weight [head_dim]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rope_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = NORM_EPS,
    embed: str = "rope",
) -> torch.Tensor:
    """Normalise and rotate, then attend segment by segment; shapes as fused_rope_attention's.

    embed "sinusoidal" does what fused_sinusoidal_attention does instead, "positions" by positions,
    which then stand in place of cos and of sin.

    Logits and softmax in fp32, probabilities cast to the dtype of v, the second product summed in
    fp32; products of fp32 tensors are as exact as torch.set_float32_matmul_precision says. Tokens
    of no segment get 0; a value of cu_seqlens that is below an earlier one counts as that one, and
    one outside the tensors as their nearer end. Waits for the GPU.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    check_may_wait(q, "the reference, by which gradients are computed too,")
    tokens = q.shape[0]
    if embed == "positions":
        negative = (cos < 0)[:, None]
        cos, sin = (
            x.masked_fill(negative, float("nan")) for x in sinusoidal_tables(cos, q.shape[-1])
        )
    q = embed_reference(q, cos, sin, embed, q_norm, norm_eps)
    k = embed_reference(k, cos, sin, embed, k_norm, norm_eps)
    bounds = list(itertools.accumulate(cu_seqlens.clamp(0, tokens).tolist(), max))
    lengths = [end - start for start, end in itertools.pairwise([0, *bounds, tokens])]
    # Split and joined, each once: the derivative of a slice, or of writing to one, is as large as
    # the whole tensor, and there may be a segment for every few tokens.
    before, *segments, behind = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    # Of no rows, but makes the result depend on all three: without segments gradients are 0, not
    # None.
    nothing = q[:0] + spread_heads(k[:0] + v[:0], q.shape[1])
    with torch.autocast(q.device.type, enabled=False):  # there the products would be in bf16
        attended = [_attend(*segment, scale) for segment in segments if len(segment[0])]
    return torch.cat([nothing, torch.zeros_like(before[0]), *attended, torch.zeros_like(behind[0])])


def spread_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [tokens, kv_heads, head_dim] with each of its heads as often as it serves one of Q's."""
    if x.shape[1] == heads:
        return x
    # Whose derivative is a sum: of repeat_interleave it would add in any order.
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1).flatten(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One segment, not empty."""
    # In fp32 here, so that blocks' gradients, and those of heads that serve several, are summed so.
    k, v = (spread_heads(x.float(), q.shape[1]) for x in (k, v))
    return torch.cat([_attend_block(rows, k, v, scale) for rows in q.split(QUERY_BLOCK)])


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    p = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
    normalizer = p.sum(-1).T[..., None]
    return (torch.einsum("hqk,khd->qhd", p.to(q.dtype).float(), v) / normalizer).to(q.dtype)
