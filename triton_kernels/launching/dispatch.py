"""When a call may go around PyTorch's dispatcher, which costs the host as much as a launch does."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._C import _dispatch_tls_local_include_set, _is_torch_function_mode_enabled
from torch.autograd import _profiler_enabled, forward_ad


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
