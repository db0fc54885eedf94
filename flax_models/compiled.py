"""A jitted function of a module, called without flattening the module at every call.

That takes JAX a millisecond for hundreds of parameters, much of a small image's time; to see that
all modules hold the same objects as before takes a twentieth of it.
"""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.extend.core import get_opaque_trace_state

# Matrix products by cuBLAS alone, which adds the bias and the residual stream in fp32 and rounds
# once. Where Triton is a choice, XLA first sets apart what Triton takes, a product with its bias,
# and leaves the sum with the stream to other kernels.
#
# By the algorithm that cuBLAS names first: those that XLA finds by trying are no faster, and the
# trial takes memory, 110 MiB for a small image.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

_programs: weakref.WeakKeyDictionary[nnx.Module, "_Program"] = weakref.WeakKeyDictionary()


def compiled(function: Callable[..., Any], module: nnx.Module) -> Callable[..., Any]:
    """`jax.jit(function)`, by COMPILER_OPTIONS, with the module bound as its first argument.

    Each call reads the values that the module's parameters have by then. Which parameters there
    are, and all that is static, is read once, and again where an attribute of the module, or of one
    within it, has become another object.

    Args:
        function: pure; takes the module and further pytrees.
        module: always given with the same function.
    """
    program = _programs.get(module)
    if program is None or not program.is_current():
        attributes = tuple(vars(node) for _, node in nnx.iter_modules(module))
        known = _values(attributes)
        parameters = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
        of_values = _of_structure(function, jax.tree.structure(module))
        program = _Program(attributes, known, tuple(parameters), *of_values)
        _programs[module] = program
    return program


def compilations() -> int:
    """A number that grows with every program that is compiled for a module."""
    structures = _of_structure.cache_info().misses
    return structures + sum(program.run._cache_size() for program in list(_programs.values()))


@dataclass(frozen=True)
class _Program:
    attributes: tuple[dict[str, Any], ...]  # of each module, as they are now
    known: list[Any]  # the values that they had when the parameters were found
    parameters: tuple[nnx.Variable, ...]
    run: Callable[..., Any]
    run_traced: Callable[..., Any]

    def is_current(self) -> bool:
        values = _values(self.attributes)
        return len(values) == len(self.known) and all(map(operator.is_, values, self.known))

    def __call__(self, *arguments: Any) -> Any:
        values = [parameter.get_raw_value() for parameter in self.parameters]
        run = self.run if _trace_state() == _NO_TRACE else self.run_traced
        return run(values, *arguments)


def _values(dictionaries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, dictionaries)))


_trace_state = functools.partial(get_opaque_trace_state, convention="flax_models")

# Asked on a thread of its own, because this module may be imported under a caller's trace.
with ThreadPoolExecutor(1) as _thread:
    _NO_TRACE = _thread.submit(_trace_state).result()


@functools.lru_cache(maxsize=32)
def _of_structure(
    function: Callable[..., Any], structure: jax.tree_util.PyTreeDef
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The jitted function of parameters' values, one for all modules of a structure.

    The second is for a caller's trace: JAX takes options for the outermost jit alone.
    """

    def of_values(values: list[jax.Array], *arguments: Any) -> Any:
        return function(jax.tree.unflatten(structure, values), *arguments)

    return jax.jit(of_values, compiler_options=COMPILER_OPTIONS), jax.jit(of_values)
