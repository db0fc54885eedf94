"""The public functions: check arguments, choose how much to fuse, plan, launch."""

import functools

import torch
import triton

from triton_kernels.checks import (
    MAX_TOKENS,
    NORM_EPS,
    Norms,
    check_arguments,
    check_position_values,
    check_tables_or_positions,
    surely,
)
from triton_kernels.launching.backward import has_gradient_kernels, needs_lse
from triton_kernels.launching.choose import auto_fuse, launch_source
from triton_kernels.launching.fast_path import Place, form_of, goes_unseen, locate, plans
from triton_kernels.launching.plan import launch_plan, make_plan
from triton_kernels.reference import check_may_wait, rope_attention_reference
from triton_kernels.sinusoidal import frequency_steps

# max_seqlen, scale, fuse, implementation and batch_invariant, as they are passed, and embedding.
Options = tuple[int | None, float | None, str, str, bool, str]
INTERPRETED = triton.knobs.runtime.interpret


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
    if goes_unseen(tensors if norms is None else (*tensors, *norms.given)):
        addresses, place = locate(tensors)
        return attend(tensors, options, addresses, place, norms)
    check_arguments(tensors, *options, norms)
    max_seqlen, scale, fuse, implementation, batch_invariant, embed = options
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
    name = "qkvpacked" if len(tensors) == 4 else "varlen"
    # What waits for the GPU is an operator of its own, of which no CUDA graph is captured.
    waits = "_waiting" if max_seqlen is None or implementation == "reference" else ""
    operator = getattr(torch.ops.fused_rope_attention, name + waits)
    options = _bound(max_seqlen), scale, fuse, implementation, batch_invariant
    if embed != "rope":
        return operator.default(*tensors, *options, embed=embed)
    if norms is None:
        if not waits and _keeps_lse(tensors, max_seqlen, implementation):
            operator = getattr(torch.ops.fused_rope_attention, f"{name}_with_lse")
            return operator.default(*tensors, *options)[0]
        return operator.default(*tensors, *options)
    return operator.default(*tensors, *options, norms.q, norms.k, float(norms.eps))


def _keeps_lse(tensors: tuple[torch.Tensor, ...], max_seqlen: int, implementation: str) -> bool:
    """Whether a call keeps its log-sum-exps: kernels are to compute gradients of long segments.

    Those in cos or sin are the reference's. An exported program is mostly for inference.
    """
    *qkv, cos, sin, _ = tensors
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in qkv)):
        return False
    if torch.compiler.is_exporting():
        return False
    if cos.requires_grad or sin.requires_grad:
        return False
    if implementation == "auto" and not qkv[0].is_cuda:  # which is the reference
        return False
    if not has_gradient_kernels(qkv[0].shape[-1], "rope"):
        return False
    return surely(needs_lse(qkv[0].dtype, qkv[0].shape[-1], max_seqlen))


def attend(
    tensors: tuple[torch.Tensor, ...],
    options: Options,
    addresses: list[int],
    place: Place | None,
    norms: Norms | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The computation behind the registered operators, and of calls that go around them.

    Args:
        tensors: (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...).
        options: max_seqlen, scale, fuse, implementation and batch_invariant, as they are passed,
            and one of EMBEDDINGS.
        addresses, place: of the tensors, see `locate`.
        norms: those of the heads, if there are any.
        lse: where the kernel puts the log-sum-exp of each row, see `launch_plan`.
    """
    keeps_lse = lse is not None
    max_seqlen, scale, fuse, implementation, batch_invariant, embed = options
    # Of others equal ones need not be as good: 64 is a bound, 64.0 is none.
    plain = type(max_seqlen) is int and (scale is None or type(scale) is float)
    plain = plain and type(fuse) is type(implementation) is str and type(batch_invariant) is bool
    normed = ()
    if norms is not None:
        plain = plain and type(norms.eps) is float
        normed = norms.q is None, norms.k is None, norms.eps, form_of(norms.given)
    plan = plans.get((place, options, keeps_lse, *normed)) if plain else None
    if plan is None:  # no call like this one has been checked
        check_arguments(tensors, *options, norms)
        *qkv, cos, sin, cu_seqlens = tensors
        q, k, v = qkv[0].unbind(1) if len(qkv) == 1 else qkv
        kernel = runs_kernel(q.device, implementation)
        if q.numel() == 0 or cu_seqlens.shape[0] == 1:
            return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if not kernel:
            norms = norms or Norms(None, None, NORM_EPS)
            return rope_attention_reference(q, k, v, cos, sin, cu_seqlens, scale, *norms, embed)
        if max_seqlen is None:
            max_seqlen = longest_segment(cu_seqlens)
        max_seqlen = _bound(int(max_seqlen))  # Triton launches no numbers of NumPy's
        source = launch_source(q.device.index)
        if fuse == "auto" and not batch_invariant:
            tokens, heads, head_dim = q.shape
            rotary_dim = 2 * cos.shape[1] if embed == "rope" else head_dim
            fuse = auto_fuse(q.dtype, head_dim, rotary_dim, max_seqlen, tokens, heads, source)
        # With calls that say it otherwise.
        means = max_seqlen, scale, fuse, "kernel", batch_invariant, embed
        shared = place, means, keeps_lse, *normed
        plan = plans.get(shared)
        if plan is None:
            form, aligned, is_behind, *_ = place
            means = max_seqlen, scale, fuse, batch_invariant, keeps_lse, norms, embed
            plan = make_plan(form, aligned, is_behind, source, *means)
            plans[shared] = plan
        if plain:
            plans[place, options, keeps_lse, *normed] = plan
    if embed == "positions":  # whose place and address stood in for theirs
        steps = frequency_steps(tensors[0].shape[-1], tensors[0].device)
        tensors = *tensors[:-2], steps, tensors[-1]
        addresses = [*addresses[:-2], steps.data_ptr(), addresses[-1]]
    return launch_plan(plan, tensors, addresses, norms, lse=lse)


def longest_segment(cu_seqlens: torch.Tensor) -> int:
    """The longest segment's tokens, of at least one segment; waits for the GPU."""
    check_may_wait(cu_seqlens, "max_seqlen=None, to be read from cu_seqlens,")
    return int(cu_seqlens.long().diff().max())  # hostile lengths may pass 32 bits


def _bound(max_seqlen: int | None) -> int | None:
    """A bound that PyTorch's operators take, whose integers have 64 bits."""
    return min(max_seqlen, MAX_TOKENS) if isinstance(max_seqlen, int) else max_seqlen


def runs_kernel(device: torch.device, implementation: str) -> bool:
    """Whether an implementation means the kernel for tensors on a device.

    Raises:
        ValueError: it does, and the kernel cannot run there.
    """
    on_gpu = device.type == "cuda"
    if implementation == "auto":
        return on_gpu and _has_tensor_cores(device.index)
    kernel = implementation in ("kernel", "triton")
    if kernel and not (on_gpu or INTERPRETED):
        raise ValueError(
            f"implementation={implementation!r} needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 "
            f"set before Triton is imported), got tensors on {device}"
        )
    return kernel


@functools.cache
def _has_tensor_cores(index: int | None) -> bool:
    """Whether a GPU has them for bf16, which came with compute capability 8.0."""
    return torch.cuda.get_device_capability(index) >= (8, 0)
