"""What spares a call's host time: plans by form, and the way around PyTorch's dispatcher.

The host may take longer for a call than the GPU. What is launched follows from the form of a call's
tensors and from its options. An earlier call of both has checked them, so a later one looks its
plan up. The dispatcher costs the host as much as a launch does.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch._C import _dispatch_tls_local_include_set, _is_torch_function_mode_enabled
from torch.autograd import _profiler_enabled, forward_ad

from triton_kernels.launching.choose import launch_settings
from triton_kernels.launching.plan import Form
from triton_kernels.launching.table import Table


class Plans(dict[Any, Any]):
    """What is launched, by what it follows from; emptied when there are MOST."""

    MOST = 4096  # every image size may be another form

    def __setitem__(self, key: Any, plan: Any) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(key, plan)


plans = Plans()
_INTERPRETED = triton.knobs.runtime.interpret


# All of a call's tensors that its plan follows from: their form; whether all but cu_seqlens, which
# makes no difference, begin at a multiple of 16 bytes; whether K's heads lie behind Q's, as in a
# packed projection; and where launches come from.
Place = tuple[Form, bool, bool, Table, bool]


def form_of(tensors: Sequence[torch.Tensor]) -> Form:
    """The form of plain tensors, by which a call like an earlier one is recognised."""
    return tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tensors])


def locate(tensors: Sequence[torch.Tensor]) -> tuple[list[int], Place | None]:
    """Addresses and place of (q, k, v, cos, sin, cu_seqlens) or (qkv, cos, ...).

    None for the place of tensors that are refused, as q or qkv has not as many axes.
    """
    addresses = [x.data_ptr() for x in tensors]
    form = form_of(tensors)
    dtype, _, shape, strides = form[0]
    packed = len(form) == 4
    if len(shape) != 3 + packed:
        return addresses, None
    head_row = shape[-2] * strides[-2]
    if packed:
        qkv, cos, sin, _ = addresses
        is_behind = strides[1] == head_row
        bits = qkv | cos | sin | strides[1] * dtype.itemsize
    else:
        q, k, v, cos, sin, _ = addresses
        is_behind = k - q == head_row * dtype.itemsize and strides == form[1][3]
        # Tensors of one token may lie so by chance. A GPU does not mind, but Triton's interpreter,
        # which moves storages apart.
        if is_behind and _INTERPRETED:
            first, second = (x.untyped_storage().data_ptr() for x in tensors[:2])
            is_behind = first == second
        bits = q | k | v | cos | sin
    return addresses, (form, bits % 16 == 0, is_behind, *launch_settings())


def _added_keys() -> int:
    """The dispatch keys that this thread adds to those of an operator's arguments, as bits."""
    return _dispatch_tls_local_include_set().raw_repr()


# Without any mode, trace or transform: asked on another thread, as this one may be in one of them.
with ThreadPoolExecutor(1) as _thread:
    _ALWAYS_ADDED = _thread.submit(_added_keys).result()


def goes_unseen(tensors: Sequence[torch.Tensor], recorded: bool = False) -> bool:
    """Whether nobody but the caller would know of an operator's call on these tensors.

    That is so where none is of a subclass, no derivative is to be recorded, nothing observes
    operators (no compiler, trace, transform, mode or profiler), and memory holds the tensors'
    values, as it does not on "meta" or behind a lazy negation. Then the function behind the
    operator may be called directly. `recorded`: derivatives may be, which the caller does itself.
    """
    if torch.compiler.is_compiling():
        return False
    if _profiler_enabled() or _is_torch_function_mode_enabled():
        return False
    if _added_keys() & ~_ALWAYS_ADDED:
        return False
    if forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled() and not recorded
    for x in tensors:
        if type(x) is not torch.Tensor or x.is_meta or x.is_neg():
            return False
        if recording and x.requires_grad:
            return False
    return True
