"""One call: check what has not been seen, choose how much to fuse, plan, launch."""

import functools

import torch
import triton

from triton_kernels.checks import MAX_TOKENS, NORM_EPS, Norms, check_arguments
from triton_kernels.launching.choose import auto_fuse, launch_source
from triton_kernels.launching.fast_path import Place, form_of, plans
from triton_kernels.launching.plan import launch_plan, make_plan
from triton_kernels.reference import check_may_wait, rope_attention_reference
from triton_kernels.sinusoidal import frequency_steps

# max_seqlen, scale, fuse, implementation and batch_invariant, as they are passed, and embedding.
Options = tuple[int | None, float | None, str, str, bool, str]
INTERPRETED = triton.knobs.runtime.interpret


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
        tensors: (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...); cos and sin in fp32 or, where
            somebody else has rounded them, in the dtype of q.
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
        check_arguments(tensors, *options, norms, may_be_rounded=True)
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
        max_seqlen = bound(int(max_seqlen))  # Triton launches no numbers of NumPy's
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


def bound(max_seqlen: int | None) -> int | None:
    """One that PyTorch's operators take, whose integers have 64 bits."""
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
