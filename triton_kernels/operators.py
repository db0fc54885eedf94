"""Registration with torch.library: opaque to torch.compile, differentiable.

First derivatives in q, k and v are kernels'. Others go through the reference: those in cos or sin,
with all that are asked for beside, and further ones.
"""

from collections.abc import Callable
from typing import Any

import torch

from triton_kernels.attention import attend, longest_segment, runs_kernel
from triton_kernels.launching.backward import attention_gradients, needs_lse
from triton_kernels.launching.fast_path import locate
from triton_kernels.reference import rope_attention_reference

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor cu_seqlens, SymInt? max_seqlen, float scale, str fuse, "
    "str implementation, bool batch_invariant"
)
_library = torch.library.Library("fused_rope_attention", "DEF")
# What waits for the GPU, which torch.compile is told: it captures no CUDA graph of it.
_WAITS = (torch.Tag.cudagraph_unsafe,)
for _suffix, _tags in (("", ()), ("_waiting", _WAITS)):
    for _qkv in ("varlen{}(Tensor q, Tensor k, Tensor v", "qkvpacked{}(Tensor qkv"):
        _library.define(f"{_qkv.format(_suffix)}, {_ARGUMENTS}) -> Tensor", tags=_tags)
    _library.define(
        f"backward{_suffix}(Tensor grad, Tensor[] tensors, Tensor cu_seqlens, Tensor[] kept, "
        "SymInt? max_seqlen, float scale, str implementation, bool[] needed) -> Tensor[]",
        tags=_tags,
    )
# The log-sum-exp of each row too, [heads, tokens], which the kernels of long segments write for a
# backward pass.
for _qkv in ("varlen_with_lse(Tensor q, Tensor k, Tensor v", "qkvpacked_with_lse(Tensor qkv"):
    _library.define(f"{_qkv}, {_ARGUMENTS}) -> (Tensor, Tensor)")


def _attend(*arguments: Any) -> torch.Tensor:
    tensors, options = arguments[:-5], arguments[-5:]
    return attend(tensors, options, *locate(tensors))


def _attend_with_lse(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = arguments[:-5], arguments[-5:]
    lse = _like_lse(*arguments)
    return attend(tensors, options, *locate(tensors), lse), lse


def _differentiate(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    kept: list[torch.Tensor],
    max_seqlen: int | None,
    scale: float,
    implementation: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    """The gradients in those of tensors, (q, k, v, cos, sin) or packed, that need one; contiguous.

    By kernels where they run, else by differentiating the reference, computed again. kept: what a
    forward pass of long segments kept, or nothing: then that pass is made again.
    """
    q, cos_or_sin = tensors[0], any(needed[-2:])
    is_empty = q.numel() == 0 or cu_seqlens.shape[0] == 1
    if not (is_empty or cos_or_sin) and runs_kernel(q.device, implementation):
        longest = longest_segment(cu_seqlens) if max_seqlen is None else max_seqlen
        if not needs_lse(q.dtype, q.shape[-1], longest):
            kept = []
        elif not kept:
            kept = _attend_with_lse(*tensors, cu_seqlens, longest, scale, "auto", "kernel", False)
        found = attention_gradients(grad, tensors, cu_seqlens, kept, longest, scale)
        return [x for x, n in zip(found, needed, strict=False) if n]
    # Dispatch modes call an operator with autograd left out.
    key, included = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with included(key.AutogradFunctionality, False), included(key.ADInplaceOrView, False):
        tensors = [x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]
        found = _pull(grad, tensors, cu_seqlens, scale, needed)
    return [x.contiguous() for x in found]


def _pull(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: float,
    needed: list[bool],
    create_graph: bool = False,
) -> list[torch.Tensor]:
    with torch.enable_grad():
        *qkv, cos, sin = tensors
        q, k, v = qkv[0].unbind(1) if len(qkv) == 1 else qkv
        out = rope_attention_reference(q, k, v, cos, sin, cu_seqlens, scale)
    wanted = [x for x, n in zip(tensors, needed, strict=True) if n]
    with torch.autocast(grad.device.type, enabled=False):  # as in the reference
        return list(torch.autograd.grad(out, wanted, grad, create_graph=create_graph))


def _like_q(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """What attention of q, or of qkv, returns in a trace."""
    return q.new_empty((q.shape[0], *q.shape[-2:]))


def _like_lse(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty((q.shape[-2], q.shape[0]), dtype=torch.float32, device=q.device)


def _like_both(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_q(*arguments), _like_lse(*arguments)


def _like_needed(
    grad: torch.Tensor, tensors: list[torch.Tensor], *arguments: Any
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, n in zip(tensors, arguments[-1], strict=True) if n]


def _save(ctx: Any, inputs: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    *tensors, cu_seqlens, max_seqlen, scale, _fuse, implementation, _batch_invariant = inputs
    kept = output if isinstance(output, tuple) else ()
    ctx.mark_non_differentiable(*kept[1:])
    ctx.save_for_backward(*tensors, cu_seqlens, *kept)
    ctx.tensors = len(tensors)
    ctx.max_seqlen, ctx.scale, ctx.implementation = max_seqlen, scale, implementation


def _backward(ctx: Any, grad: torch.Tensor, *_lse: None) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors[: ctx.tensors]
    cu_seqlens, *kept = ctx.saved_tensors[ctx.tensors :]
    needed = list(ctx.needs_input_grad[: ctx.tensors])
    if torch.is_grad_enabled():  # create_graph=True: what is computed here is differentiated again
        tensors = [x.view_as(x) for x in tensors]  # none of these is computed from another
        found = _pull(grad, tensors, cu_seqlens, ctx.scale, needed, create_graph=True)
    else:
        # The reference waits for the GPU, and so does a bound to be read.
        waits = ctx.max_seqlen is None or ctx.implementation == "reference" or any(needed[-2:])
        operators = torch.ops.fused_rope_attention
        operator = operators.backward_waiting if waits else operators.backward
        options = ctx.max_seqlen, ctx.scale, ctx.implementation
        found = operator(grad, tensors, cu_seqlens, kept, *options, needed)
    grads = iter(found)
    return (*(next(grads) if n else None for n in needed), None, None, None, None, None, None)


def _register(name: str, function: Callable, fake: Callable) -> None:
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"fused_rope_attention::{name}", fake, lib=_library)


for _name in ("backward", "backward_waiting"):
    _register(_name, _differentiate, _like_needed)
for _name, _function, _like in (
    *((_name, _attend, _like_q) for _name in ("varlen", "varlen_waiting")),
    *((_name, _attend, _like_q) for _name in ("qkvpacked", "qkvpacked_waiting")),
    *((_name, _attend_with_lse, _like_both) for _name in ("varlen_with_lse", "qkvpacked_with_lse")),
):
    _register(_name, _function, _like)
    torch.library.register_autograd(
        f"fused_rope_attention::{_name}", _backward, setup_context=_save, lib=_library
    )
