"""Whether a call is part of a program that JAX is tracing."""

import functools
from concurrent.futures import ThreadPoolExecutor

from jax.extend.core import get_opaque_trace_state

_state = functools.partial(get_opaque_trace_state, convention="flax_models")

# Asked on a thread of its own, because this module may be imported under a caller's trace.
with ThreadPoolExecutor(1) as _thread:
    _NO_TRACE = _thread.submit(_state).result()


def is_traced() -> bool:
    """Whether the caller runs under a trace, of `jax.jit` or another transformation."""
    return _state() != _NO_TRACE
