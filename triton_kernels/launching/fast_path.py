"""What spares a call's host time: plans by form, and the way around PyTorch's dispatcher.

The host may take longer for a call than the GPU. What is launched follows from the form of a call's
tensors and from its options. An earlier call of both has checked them, so a later one looks its
plan up. The dispatcher costs the host as much as a launch does.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C import _dispatch_tls_local_include_set, _is_torch_function_mode_enabled
from torch.autograd import _profiler_enabled, forward_ad

from triton_kernels.launching.choose import launch_settings
from triton_kernels.launching.plan import Form, form_of
from triton_kernels.launching.table import Table

# max_seqlen, scale, fuse and implementation, as they are passed.
Options = tuple[int | None, float | None, str, str]
# What calls that launch the same have in common, but for addresses: form, options, whether they are
# aligned, whether K lies behind Q, and where launches come from.
Key = tuple[Form, Options, bool, bool, Table, bool]

# Every image size may be another form.
MOST_PLANS = 4096
_plans: dict[Hashable, Any] = {}


def key_of(
    tensors: Sequence[torch.Tensor], addresses: Sequence[int], options: Options
) -> Key | None:
    """What a call is known by, of (q, k, v, cos, sin, cu_seqlens) or (qkv, cos, ...).

    None where equal options need not be as good: 64 is a bound, 64.0 is none.
    """
    max_seqlen, scale, fuse, implementation = options
    plain = type(max_seqlen) is int and type(fuse) is type(implementation) is str
    if not plain or not (scale is None or type(scale) is float):
        return None
    form = form_of(tensors)
    dtype, _, shape, strides = form[0]
    packed = len(form) == 4
    if len(shape) != 3 + packed:  # is refused
        return None
    heads = shape[-2]
    head_row = heads * strides[-2]
    # How cu_seqlens lies makes no difference.
    if packed:
        behind = strides[1] == head_row
        bits = strides[1] * dtype.itemsize
    else:
        behind = (
            addresses[1] - addresses[0] == head_row * dtype.itemsize
            and strides == form[1][3]
            and _share_memory(tensors[1], tensors[0])
        )
        bits = 0
    for address in addresses[:-1]:
        bits |= address
    return form, options, bits % 16 == 0, behind, *launch_settings()


def _share_memory(k: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether K behind Q is so in one piece of memory.

    Tensors of one token may lie so by chance, and Triton's interpreter moves storages apart.
    """
    return k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


def recall(key: Hashable) -> Any:
    """What is remembered for a key, None if nothing is."""
    return _plans.get(key)


def remember(key: Hashable, plan: Any) -> None:
    """Remember what calls of a key launch, until there are MOST_PLANS others."""
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan


def forget() -> None:
    """Forget all plans: something that they rest on, but no key tells, has changed."""
    _plans.clear()


def _added_keys() -> int:
    """The dispatch keys that this thread adds to those of an operator's arguments, as bits."""
    return _dispatch_tls_local_include_set().raw_repr()


# Without any mode, trace or transform: asked on another thread, as this one may be in one of them.
with ThreadPoolExecutor(1) as _thread:
    _ALWAYS_ADDED = _thread.submit(_added_keys).result()


def goes_unseen(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but the caller would know of an operator's call on these tensors.

    That is so where none is of a subclass, no derivative is to be recorded, nothing observes
    operators (no compiler, trace, transform, mode or profiler), and memory holds the tensors'
    values, as it does not on "meta" or behind a lazy negation. Then the function behind the
    operator may be called directly.
    """
    if torch.compiler.is_compiling() or {type(x) for x in tensors} != {torch.Tensor}:
        return False
    if _profiler_enabled() or _is_torch_function_mode_enabled():
        return False
    if _added_keys() & ~_ALWAYS_ADDED:
        return False
    if forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled()
    for x in tensors:
        if x.is_meta or x.is_neg():
            return False
        if recording and x.requires_grad:
            return False
    return True
