"""Registration with torch.library: opaque to torch.compile, differentiable by the reference."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from triton_kernels.attention import attend
from triton_kernels.launching.fast_path import locate
from triton_kernels.reference import rope_attention_reference

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor cu_seqlens, SymInt? max_seqlen, float scale, str fuse, "
    "str implementation"
)
_library = torch.library.Library("fused_rope_attention", "DEF")
_library.define(f"varlen(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> Tensor")
_library.define(f"qkvpacked(Tensor qkv, {_ARGUMENTS}) -> Tensor")
_library.define(
    "backward(Tensor grad, Tensor[] tensors, Tensor cu_seqlens, float scale, bool[] needed)"
    " -> Tensor[]"
)


def _attend(*arguments: Any) -> torch.Tensor:
    tensors, options = arguments[:-4], arguments[-4:]
    return attend(tensors, options, *locate(tensors))


def _differentiate(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: float,
    needed: list[bool],
) -> list[torch.Tensor]:
    """Differentiate the reference, computed again; tensors are (q, k, v, cos, sin) or packed.

    The results are contiguous.
    """
    with _recording():
        tensors = [x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]
        found = _pull(grad, tensors, cu_seqlens, scale, needed)
    return [x.contiguous() for x in found]


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Where an operator may differentiate, which dispatch modes call with autograd left out."""
    key = torch._C.DispatchKey
    included = torch._C._SetExcludeDispatchKeyGuard
    with included(key.AutogradFunctionality, False), included(key.ADInplaceOrView, False):
        yield


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


for _device in ("CPU", "CUDA"):
    _library.impl("varlen", _attend, _device)
    _library.impl("qkvpacked", _attend, _device)
    _library.impl("backward", _differentiate, _device)


@torch.library.register_fake("fused_rope_attention::varlen", lib=_library)
def _(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("fused_rope_attention::qkvpacked", lib=_library)
def _(qkv: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], *qkv.shape[2:]))


@torch.library.register_fake("fused_rope_attention::backward", lib=_library)
def _(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: float,
    needed: list[bool],
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, n in zip(tensors, needed, strict=True) if n]


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *tensors, cu_seqlens, _max_seqlen, scale, _fuse, _implementation = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.scale = scale


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[: len(tensors)])
    if torch.is_grad_enabled():  # create_graph=True: what is computed here is differentiated again
        tensors = [x.view_as(x) for x in tensors]  # none of these is computed from another
        found = _pull(grad, tensors, cu_seqlens, ctx.scale, needed, create_graph=True)
    else:
        found = torch.ops.fused_rope_attention.backward(
            grad, tensors, cu_seqlens, ctx.scale, needed
        )
    grads = iter(found)
    return (*(next(grads) if n else None for n in needed), None, None, None, None, None)


for _name in ("varlen", "qkvpacked"):
    torch.library.register_autograd(
        f"fused_rope_attention::{_name}", _backward, setup_context=_save, lib=_library
    )
