"""Who compiles a kernel: the Triton package where it can, else XLA.

Pallas turns a kernel into Triton IR and leaves the rest to XLA, which compiles it with a copy of
Triton of its own. Three things are lost that way: a bound on registers, values kept within a loop,
and the L1 cache, nearly all of which XLA has the driver give up for shared memory
(cuFuncSetCacheConfig). A window kernel then waits for loads, which need L1 to land in.

The Triton package compiles the same IR to window kernels that are up to 1.8x faster. XLA launches
them like any others, as part of its CUDA graphs, which need not be recorded anew at every call.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels.kernels.dialect import plgpu
from pallas_kernels.launching.devices import local_gpu
from pallas_kernels.launching.table import Launch

# Pallas' Mosaic GPU backend has no stable interface: another in 0.10, not known of versions to
# come, and before 0.11.2 its interpreter lacks what is used here.
HAVE_MOSAIC = (0, 11, 2) <= jax.__version_info__ < (0, 13)

COMPILERS = ("triton", "xla")
# Part of what JAX tells programs apart by: what was traced for one compiler serves no other.
_chosen = jax.make_user_context(None)


def compiler() -> str:
    """Who compiles the kernels of a call that is traced now, one of COMPILERS.

    The Triton package where it is installed and there is a GPU, else XLA.
    """
    return _chosen.value or _default_compiler()


@contextlib.contextmanager
def compiling_by(name: str) -> Iterator[None]:
    """Within the context, kernels that this thread calls are compiled by one of COMPILERS.

    Raises:
        ValueError: it is none of them.
    """
    if name not in COMPILERS:
        raise ValueError(f"the compiler must be one of {COMPILERS}, got {name!r}")
    with _chosen(name):
        yield


@functools.cache
def _default_compiler() -> str:
    if importlib.util.find_spec("triton") is None or local_gpu() is None:
        return "xla"
    try:
        importlib.import_module("pallas_kernels.launching.triton_lowering")
    except (ImportError, AttributeError):  # JAX has its internals elsewhere
        return "xla"
    return "triton"


def compiler_params(launch: Launch, disable_licm: bool) -> Any:
    """What a pallas_call needs for compiler() to compile it.

    XLA knows neither a bound on registers nor how to keep values within a loop.
    """
    shared = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if compiler() == "xla":
        return plgpu.CompilerParams(**shared)
    from pallas_kernels.launching.triton_lowering import TritonParams

    return TritonParams(**shared, maxnreg=launch.maxnreg, disable_licm=disable_licm)
