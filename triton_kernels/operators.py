"""What PyTorch knows of a call: its operators, opaque to torch.compile, and its derivatives.

First derivatives in q, k and v are kernels'. Others go through the reference: those in cos or sin,
with all that are asked for beside, and further ones.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from triton_kernels.attend import attend, bound, longest_segment, runs_kernel
from triton_kernels.checks import NORM_EPS, Norms
from triton_kernels.launching.backward import (
    attention_gradients,
    has_gradient_kernels,
    needs_lse,
)
from triton_kernels.launching.fast_path import goes_unseen, locate
from triton_kernels.reference import (
    normalize_reference,
    rope_attention_reference,
    spread_heads,
)

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor cu_seqlens, SymInt? max_seqlen, float scale, str fuse, "
    "str implementation, bool batch_invariant"
)
_NORMS = f"Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps={NORM_EPS}, str embed='rope'"
_library = torch.library.Library("fused_rope_attention", "DEF")
# What waits for the GPU, which torch.compile is told: it captures no CUDA graph of it.
_WAITS = (torch.Tag.cudagraph_unsafe,)
for _suffix, _tags in (("", ()), ("_waiting", _WAITS)):
    for _qkv in ("varlen{}(Tensor q, Tensor k, Tensor v", "qkvpacked{}(Tensor qkv"):
        _library.define(f"{_qkv.format(_suffix)}, {_ARGUMENTS}, {_NORMS}) -> Tensor", tags=_tags)
    _library.define(
        f"backward{_suffix}(Tensor grad, Tensor[] tensors, Tensor cu_seqlens, Tensor[] kept, "
        "SymInt? max_seqlen, float scale, str implementation, bool[] needed, str normed='', "
        f"float norm_eps={NORM_EPS}, str embed='rope') -> Tensor[]",
        tags=_tags,
    )
# The log-sum-exp of each row too, [heads, tokens], which the kernels of long segments write for a
# backward pass.
for _qkv in ("varlen_with_lse(Tensor q, Tensor k, Tensor v", "qkvpacked_with_lse(Tensor qkv"):
    _library.define(f"{_qkv}, {_ARGUMENTS}) -> (Tensor, Tensor)")


def _attend(count: int, *arguments: Any) -> torch.Tensor:
    tensors, options, further = arguments[:count], arguments[count:][:5], arguments[count + 5 :]
    norms, embed = _norms_and_embedding(*further)
    return attend(tensors, (*options, embed), *locate(tensors), norms)


def _norms_and_embedding(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    eps: float = NORM_EPS,
    embed: str = "rope",
) -> tuple[Norms | None, str]:
    """An operator's last arguments, which come without those that are the defaults."""
    return None if q is k is None else Norms(q, k, eps), embed


def _attend_with_lse(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = arguments[:-5], arguments[-5:]
    lse = _like_lse(*arguments)
    return attend(tensors, (*options, "rope"), *locate(tensors), lse=lse), lse


def _differentiate(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    kept: list[torch.Tensor],
    max_seqlen: int | None,
    scale: float,
    implementation: str,
    needed: list[bool],
    normed: str = "",
    norm_eps: float = NORM_EPS,
    embed: str = "rope",
) -> list[torch.Tensor]:
    """The gradients in those of tensors that need one; contiguous.

    By kernels where they run, else by differentiating the reference, computed again.

    tensors: (q, k, v, cos, sin) or packed, then the norms of what `normed` has the letters of.
    kept: what a forward pass of long segments kept, or nothing: then that pass is made again.
    """
    q, cos_or_sin = tensors[0], any(needed[len(needed) - len(normed) - 2 :][:2])
    is_empty = q.numel() == 0 or cu_seqlens.shape[0] == 1
    by_kernels = has_gradient_kernels(q.shape[-1], embed) and not (is_empty or cos_or_sin)
    if by_kernels and runs_kernel(q.device, implementation):
        longest = longest_segment(cu_seqlens) if max_seqlen is None else max_seqlen
        options = cu_seqlens, longest, scale
        if normed or (len(tensors) == 5 and tensors[1].shape != q.shape):
            return _pull_prepared(grad, tensors, kept, options, needed, normed, norm_eps)
        found = _by_kernels(grad, tensors, kept, *options)
        return [x for x, n in zip(found, needed, strict=False) if n]
    with _recorded(tensors, needed) as tensors:
        found = _pull(grad, tensors, cu_seqlens, scale, needed, normed, norm_eps, embed)
    return [x.contiguous() for x in found]


def _by_kernels(
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> Sequence[torch.Tensor]:
    """The gradients in q, k and v, of as many heads and no norms, or in qkv."""
    q = tensors[0]
    if not needs_lse(q.dtype, q.shape[-1], max_seqlen):
        kept = ()
    elif not kept:
        kept = _attend_with_lse(*tensors, cu_seqlens, max_seqlen, scale, "auto", "kernel", False)
    return attention_gradients(grad, tensors, cu_seqlens, kept, max_seqlen, scale)


@contextlib.contextmanager
def _recorded(tensors: list[torch.Tensor], needed: list[bool]) -> Iterator[list[torch.Tensor]]:
    """The tensors, of which what is computed meanwhile is recorded where they need a gradient."""
    # Dispatch modes call an operator with autograd left out.
    key, included = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with included(key.AutogradFunctionality, False), included(key.ADInplaceOrView, False):
        yield [x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]


def _unpacked(
    tensors: list[torch.Tensor], normed: str, norm_eps: float
) -> tuple[list[torch.Tensor], Norms]:
    """q, k, v, cos and sin, and the norms, of what a backward pass takes."""
    count = len(tensors) - len(normed)
    *qkv, cos, sin = tensors[:count]
    norms = dict(zip(normed, tensors[count:], strict=True))
    parts = qkv[0].unbind(1) if len(qkv) == 1 else qkv
    return [*parts, cos, sin], Norms(norms.get("q"), norms.get("k"), norm_eps)


def _pull_prepared(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    kept: Sequence[torch.Tensor],
    options: tuple[torch.Tensor, int, float],
    needed: list[bool],
    normed: str,
    norm_eps: float,
) -> list[torch.Tensor]:
    """By the kernel those in normalised heads, of K and V as many as of Q; autograd's from there.

    None in cos and sin.
    """
    with _recorded(tensors, needed) as tensors, torch.enable_grad():
        (q, k, v, *angles), norms = _unpacked(tensors, normed, norm_eps)
        if norms.q is not None:
            q = normalize_reference(q, norms.q, norm_eps).to(v.dtype)
        if norms.k is not None:
            k = normalize_reference(k, norms.k, norm_eps).to(v.dtype)
        prepared = q, *(spread_heads(x, q.shape[1]) for x in (k, v))
        found = _by_kernels(grad, [*(x.detach() for x in prepared), *angles], kept, *options)
        pairs = [pair for pair in zip(prepared, found, strict=True) if pair[0].requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        wanted = [x for x, n in zip(tensors, needed, strict=True) if n]
        with torch.autocast(grad.device.type, enabled=False):
            found = torch.autograd.grad(outputs, wanted, grads)
    return [x.contiguous() for x in found]


def _pull(
    grad: torch.Tensor,
    tensors: list[torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: float,
    needed: list[bool],
    normed: str,
    norm_eps: float,
    embed: str,
    create_graph: bool = False,
) -> list[torch.Tensor]:
    with torch.enable_grad():
        unpacked, norms = _unpacked(tensors, normed, norm_eps)
        out = rope_attention_reference(*unpacked, cu_seqlens, scale, *norms, embed)
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
    needed = arguments[5]
    return [x.new_empty(x.shape) for x, n in zip(tensors, needed, strict=True) if n]


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *inputs, q_norm, k_norm, ctx.norm_eps, ctx.embed = inputs
    _save_for_backward(ctx, inputs, {"q": q_norm, "k": k_norm})


def _save_with_lse(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.norm_eps, ctx.embed = NORM_EPS, "rope"
    ctx.mark_non_differentiable(output[1])
    _save_for_backward(ctx, inputs, {}, output)


def _save_for_backward(
    ctx: Any, inputs: Sequence, norms: dict, kept: tuple[torch.Tensor, ...] = ()
) -> None:
    *tensors, cu_seqlens, max_seqlen, scale, _fuse, implementation, _batch_invariant = inputs
    norms = {name: x for name, x in norms.items() if x is not None}
    ctx.normed, ctx.count = "".join(norms), len(tensors)
    ctx.save_for_backward(*tensors, *norms.values(), cu_seqlens, *kept)
    ctx.max_seqlen, ctx.scale, ctx.implementation = max_seqlen, scale, implementation


def _backward(ctx: Any, grad: torch.Tensor, *_lse: None) -> tuple[torch.Tensor | None, ...]:
    count = ctx.count + len(ctx.normed)
    saved = list(ctx.saved_tensors)  # checkpoints let them be asked for once
    tensors, cu_seqlens, kept = saved[:count], saved[count], saved[count + 1 :]
    needed = list(ctx.needs_input_grad[: ctx.count])
    # The reference waits for the GPU, and so does a bound to be read.
    waits = ctx.max_seqlen is None or ctx.implementation == "reference" or any(needed[-2:])
    waits = waits or not has_gradient_kernels(tensors[0].shape[-1], ctx.embed)
    # Norms stand behind all options, if they are there.
    needed += [ctx.needs_input_grad[ctx.count + 6 + "qk".index(name)] for name in ctx.normed]
    further = ctx.normed, ctx.norm_eps, ctx.embed
    if torch.is_grad_enabled():  # create_graph=True: what is computed here is differentiated again
        tensors = [x.view_as(x) for x in tensors]  # none of these is computed from another
        found = _pull(grad, tensors, cu_seqlens, ctx.scale, needed, *further, create_graph=True)
    else:
        operators = torch.ops.fused_rope_attention
        operator = operators.backward_waiting if waits else operators.backward
        if not waits and goes_unseen((grad, *tensors)):
            operator = _differentiate
        options = ctx.max_seqlen, ctx.scale, ctx.implementation
        found = operator(grad, tensors, cu_seqlens, kept, *options, needed, *further)
    found = iter(found)
    grads = [next(found) if n else None for n in needed]
    of_norms = dict(zip(ctx.normed, grads[ctx.count :], strict=True))
    behind = [None] * 6 + [of_norms.get("q"), of_norms.get("k"), None, None]
    return *grads[: ctx.count], *behind[: len(ctx.needs_input_grad) - ctx.count]


class Recorded(torch.autograd.Function):
    """What the operators of rotated heads without norms do, for calls that only autograd sees.

    By way of an operator it would take the host twice as long to record one and to go back. Its
    gradients in q, k and v are asked for, none in cos and sin, and max_seqlen is an integer.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Of an operator's arguments as they were passed, which `attend` checks."""
        *tensors, max_seqlen, scale, fuse, implementation, batch_invariant = inputs
        q = tensors[0]
        lse = _like_lse(q) if needs_lse(q.dtype, q.shape[-1], max_seqlen) else None
        options = max_seqlen, scale, fuse, implementation, batch_invariant, "rope"
        out = attend(tuple(tensors), options, *locate(tensors), lse=lse)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        ctx.norm_eps, ctx.embed = NORM_EPS, "rope"
        inputs = *tensors, bound(max_seqlen), scale, fuse, implementation, batch_invariant
        _save_for_backward(ctx, inputs, {}, () if lse is None else (out, lse))
        return out

    backward = staticmethod(_backward)


def _register(name: str, function: Callable, fake: Callable) -> None:
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"fused_rope_attention::{name}", fake, lib=_library)


for _name in ("backward", "backward_waiting"):
    _register(_name, _differentiate, _like_needed)
for _name in ("varlen", "qkvpacked", "varlen_waiting", "qkvpacked_waiting"):
    _register(_name, functools.partial(_attend, 6 if "varlen" in _name else 4), _like_q)
    torch.library.register_autograd(
        f"fused_rope_attention::{_name}", _backward, setup_context=_save, lib=_library
    )
for _name in ("varlen_with_lse", "qkvpacked_with_lse"):
    _register(_name, _attend_with_lse, _like_both)
    torch.library.register_autograd(
        f"fused_rope_attention::{_name}", _backward, setup_context=_save_with_lse, lib=_library
    )
