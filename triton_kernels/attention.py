"""The public functions, and which way a call of them takes."""

import torch

from triton_kernels.attend import Options, attend, bound
from triton_kernels.checks import (
    NORM_EPS,
    Norms,
    check_arguments,
    check_position_values,
    check_tables_or_positions,
    is_exporting,
    surely,
)
from triton_kernels.launching.backward import has_gradient_kernels, needs_lse
from triton_kernels.launching.fast_path import goes_unseen, locate
from triton_kernels.operators import Recorded


def fused_rope_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = NORM_EPS,
) -> torch.Tensor:
    """Attention within segments, with the rotary embedding of Q and K inside the kernel.

    Args:
        q, k, v: [tokens, heads, head_dim], bf16, fp16 or fp32, any strides with a contiguous last
            axis, that of tokens at most 2^23 elements; head_dim a multiple of 8 up to 16,384, and
            heads x head_dim at most 2^23. k and v may have fewer heads, which divide q's: each
            serves as many neighbours among these (grouped queries).
        cos, sin: [tokens, rotary_dim / 2] fp32, the angles of each token, applied in the split-half
            (NeoX) form; of the same strides, contiguous in the last axis. Dims of a head behind
            rotary_dim pass unrotated.
        cu_seqlens: [segments + 1] int32, contiguous, cumulative segment starts. Segments may be
            empty; tokens before the first and behind the last are padding. Where values decrease,
            which `check_cu_seqlens` finds, rows between them may be anything.
        max_seqlen: upper bound on a segment's length. None: read from cu_seqlens, which waits for
            the GPU. Rows of a segment that is longer come out right or NaN, never wrong.
        scale: factor of the logits, 2 ** -100 to 2 ** 100, which gets no gradient; default
            head_dim ** -0.5.
        fuse: "qk" rotates Q and K inside the kernel, "q" rotates K in a pass of its own, "none"
            both. "auto": "qk" where one tile holds a segment, so that no row is rotated twice;
            else "none", or "q" where rotary_dim < head_dim and head_dim is a multiple of 16, but
            for long images on Hopper GPUs, see launching/choose.py.
        implementation: "kernel" is ours (on a CPU: Triton's interpreter, if
            TRITON_INTERPRET=1 was set before Triton was imported), "reference" plain PyTorch, whose
            fp32 products are as precise as PyTorch is told to make them; "auto" the kernel where
            the tensors are on a GPU that runs it, else the reference.
        batch_invariant: have the kernels give a segment the same bits alone, in any batch and at
            any place in it, on one GPU and for tensors aligned alike. Else which kernel serves it,
            and by which tiles, follows from all that is in a call, as it always does for gradients.
            Long segments cost a second launch and the warp-specialized kernel; `python -m compare
            invariance` measures it.
        q_norm, k_norm: [head_dim], contiguous, in the dtype of q: weights of an RMSNorm of each
            head of q, or of k, where it is rotated and before that, in fp32. In longer segments
            than one tile holds, k with a norm is rotated in a pass of its own, whatever fuse says.
            Heads of more than 256 columns have none.
        norm_eps: what is added to the mean square of a head, 0 to 1.

    Returns:
        [tokens, heads, head_dim] in the dtype of q, contiguous; exactly 0 for padding.

    Raises:
        TypeError, ValueError: a dtype, shape, device, stride or keyword is not as stated above, or
            implementation="kernel" where it cannot run.
        NotImplementedError: forward-mode differentiation.
        RuntimeError: a derivative by torch.func or, with is_grads_batched, of many results at once,
            which PyTorch refuses; or a CUDA graph is captured of what waits for the GPU, which
            max_seqlen=None and a backward pass through the reference do. (torch.compile leaves
            both out of its graphs.)

    Differentiable in q, k, v, cos, sin and norms in reverse mode, repeatedly. Kernels compute the
    gradients in q, k, v and norms. Where no tile holds a segment, see `window_limit`, the result
    and a number for each of its rows are kept for them, or computed again: with norms, and if
    max_seqlen is None. If those in cos or sin are asked for as well, for heads of more than 256
    columns, and for further derivatives, the reference does.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant, "rope"
    norms = None if q_norm is None and k_norm is None else Norms(q_norm, k_norm, norm_eps)
    return _call((q, k, v, cos, sin, cu_seqlens), options, norms)


def fused_rope_attention_qkvpacked(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = NORM_EPS,
) -> torch.Tensor:
    """fused_rope_attention on qkv [tokens, 3, heads, head_dim], read in place.

    That is what a QKV projection writes; it is neither split nor copied. Everything else is as in
    fused_rope_attention.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant, "rope"
    norms = None if q_norm is None and k_norm is None else Norms(q_norm, k_norm, norm_eps)
    return _call((qkv, cos, sin, cu_seqlens), options, norms)


def fused_sinusoidal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attention within segments, with sinusoidal embeddings added to Q and K inside the kernel.

    sin is added to the even columns of each head of Q and K and cos to the odd ones, in fp32, and
    the sum is rounded to the dtype of q (Vaswani et al., Attention Is All You Need, 2017, whose
    PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same, here of
    attention's own inputs).

    Args:
        q, k, v, cu_seqlens, max_seqlen, scale, implementation, batch_invariant: as in
            fused_rope_attention. There are no norms.
        cos, sin: [tokens, head_dim / 2] fp32, of the same strides, contiguous in the last axis, see
            `sinusoidal_tables`; None where there are positions.
        positions: [tokens] int32, at least 0, of any stride, in place of cos and sin, which are
            computed inside, exact to 5e-7 at any position, of frequencies that are kept by head_dim
            and device. Negative ones are an error on a CPU; on a GPU their segments come out NaN.
        fuse: "qk" adds to Q and K inside the kernel, "q" to K in a pass of its own, "none" to both.
            "auto": "qk" where one tile holds a segment, else "none".

    Returns:
        [tokens, heads, head_dim] in the dtype of q, contiguous; exactly 0 for padding.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as fused_rope_attention; or there
            are both tables and positions, or neither.

    Differentiable in q, k, v, cos and sin in reverse mode, repeatedly, by the reference.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant
    return _call_sinusoidal((q, k, v), cos, sin, positions, cu_seqlens, options)


def fused_sinusoidal_attention_qkvpacked(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """fused_sinusoidal_attention on qkv [tokens, 3, heads, head_dim], read in place.

    Everything else is as in fused_sinusoidal_attention.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant
    return _call_sinusoidal((qkv,), cos, sin, positions, cu_seqlens, options)


def _call_sinusoidal(
    qkv: tuple[torch.Tensor, ...],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    options: tuple,
) -> torch.Tensor:
    """What both functions do."""
    check_tables_or_positions(cos, sin, positions)
    if positions is None:
        return _call((*qkv, cos, sin, cu_seqlens), (*options, "sinusoidal"), None)
    if isinstance(positions, torch.Tensor) and goes_unseen((positions,)):
        check_position_values(positions)
    return _call((*qkv, positions, positions, cu_seqlens), (*options, "positions"), None)


def _call(tensors: tuple[torch.Tensor, ...], options: Options, norms: Norms | None) -> torch.Tensor:
    """What both functions do."""
    max_seqlen, scale, fuse, implementation, batch_invariant, embed = options
    # `attend` takes rounded angles, too: here they are a mistake, which several towers have made.
    is_exact = embed == "positions" or _are_exact(*tensors[-3:-1])
    if is_exact and goes_unseen(tensors if norms is None else (*tensors, *norms.given)):
        addresses, place = locate(tensors)
        return attend(tensors, options, addresses, place, norms)
    is_plain = is_exact and norms is None and embed == "rope"
    if is_plain and type(max_seqlen) is int and goes_unseen(tensors, recorded=True):
        # Anything else that may be wrong with the arguments is found later.
        has_heads = tensors[0].ndim == (4 if len(tensors) == 4 else 3)
        if has_heads and _by_kernels(tensors, implementation):
            return Recorded.apply(*tensors, *options[:-1])
    check_arguments(tensors, *options, norms)
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
    name = "qkvpacked" if len(tensors) == 4 else "varlen"
    # What waits for the GPU is an operator of its own, of which no CUDA graph is captured.
    waits = "_waiting" if max_seqlen is None or implementation == "reference" else ""
    operator = getattr(torch.ops.fused_rope_attention, name + waits)
    options = bound(max_seqlen), scale, fuse, implementation, batch_invariant
    if embed != "rope":
        return operator.default(*tensors, *options, embed=embed)
    if norms is None:
        if not waits and _keeps_lse(tensors, max_seqlen, implementation):
            operator = getattr(torch.ops.fused_rope_attention, f"{name}_with_lse")
            return operator.default(*tensors, *options)[0]
        return operator.default(*tensors, *options)
    return operator.default(*tensors, *options, norms.q, norms.k, float(norms.eps))


def _are_exact(cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether these are tensors in fp32."""
    exact = torch.float32
    return getattr(cos, "dtype", None) is exact and getattr(sin, "dtype", None) is exact


def _keeps_lse(tensors: tuple[torch.Tensor, ...], max_seqlen: int, implementation: str) -> bool:
    """Whether a call keeps its log-sum-exps: kernels are to compute gradients of long segments.

    An exported program is mostly for inference.
    """
    if is_exporting() or not _by_kernels(tensors, implementation):
        return False
    return surely(needs_lse(tensors[0].dtype, tensors[0].shape[-1], max_seqlen))


def _by_kernels(tensors: tuple[torch.Tensor, ...], implementation: str) -> bool:
    """Whether gradients are to be recorded, all of them kernels': none in cos and sin."""
    *qkv, cos, sin, _ = tensors
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in qkv)):
        return False
    if cos.requires_grad or sin.requires_grad:
        return False
    if implementation == "auto" and not qkv[0].is_cuda:  # which is the reference
        return False
    return implementation != "reference" and has_gradient_kernels(qkv[0].shape[-1], "rope")
