"""Functions jitted as the tower is, and calling one on a module without flattening the module.

Flattening hundreds of parameters takes JAX a millisecond, much of a small image's time; checking
that all modules hold the same objects as before takes a twentieth of that, and is done while the
device computes.
"""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from flax_models.packed import Packed, Place, pack, unpack

# Matrix products by cuBLAS alone, which adds the bias and the residual stream in fp32 and rounds
# once. Where Triton is a choice, XLA first sets apart what Triton takes, a product with its bias,
# and leaves the residual sum to other kernels.
#
# By the algorithm that cuBLAS names first: those that XLA finds by trying are no faster, and the
# trial takes memory, 110 MiB for a small image.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

_programs: weakref.WeakKeyDictionary[nnx.Module, "_Program"] = weakref.WeakKeyDictionary()


def compiled(function: Callable[..., Any], module: nnx.Module) -> Callable[..., Any]:
    """A Jitted function with the module bound as its first argument.

    Each call reads the values that the module's parameters have by then. Which parameters there
    are, and all that is static, is read once, and again where an attribute of the module, or of one
    within it, has become another object.

    Args:
        function: pure; takes the module and further pytrees.
        module: always given with the same function.
    """
    return functools.partial(_call, function, module)


def _call(function: Callable[..., Any], module: nnx.Module, *arguments: Any) -> Any:
    program = _programs.get(module)
    if program is not None and program.has_run(arguments):
        # Launched before it is known whether it is the module's still. Of a module that has changed
        # it is dropped, or fails, as where arrays of its old parameters were donated.
        try:
            results = program(*arguments)
        except Exception:
            if program.is_current():
                raise
        else:
            if program.is_current():
                return results
    if program is None or not program.is_current():
        program = _programs[module] = _find(function, module)
    results = program(*arguments)
    program.ran.add(_signature(arguments))
    return results


def _find(function: Callable[..., Any], module: nnx.Module) -> "_Program":
    attributes = tuple(vars(node) for _, node in nnx.iter_modules(module))
    known = _values(attributes)
    parameters = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
    structure = jax.tree.structure(module)
    return _Program(function, structure, attributes, known, tuple(parameters))


def compilations() -> int:
    """A number that grows with every program that is compiled for a module."""
    structures = _of_structure.cache_info().misses
    return structures + sum(program.compilations() for program in list(_programs.values()))


_trace_state = functools.partial(get_opaque_trace_state, convention="flax_models")

# Asked on a thread of its own, because this module may be imported under a caller's trace.
with ThreadPoolExecutor(1) as _thread:
    _NO_TRACE = _thread.submit(_trace_state).result()


class Jitted:
    """`jax.jit(function)` by COMPILER_OPTIONS; without them under a caller's trace.

    JAX takes options for the outermost jit alone.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._by_options = jax.jit(function, compiler_options=COMPILER_OPTIONS)
        self._traced = jax.jit(function)

    def __call__(self, *arguments: Any) -> Any:
        return (self._by_options if _trace_state() == _NO_TRACE else self._traced)(*arguments)

    def compilations(self) -> int:
        """How many programs were compiled by COMPILER_OPTIONS."""
        return self._by_options._cache_size()


@dataclass
class _Program:
    function: Callable[..., Any]
    structure: jax.tree_util.PyTreeDef  # of the module
    attributes: tuple[dict[str, Any], ...]  # of each module within it, as they are now
    known: list[Any]  # the values that they had when the parameters were found
    parameters: tuple[nnx.Variable, ...]
    ran: set[Any] = field(default_factory=set)  # signatures of arguments, for which it is compiled
    launch: tuple[Packed, Jitted] | None = None  # what the last call packed, and what takes it

    def is_current(self) -> bool:
        values = _values(self.attributes)
        return len(values) == len(self.known) and all(map(operator.is_, values, self.known))

    def has_run(self, arguments: tuple[Any, ...]) -> bool:
        return _trace_state() == _NO_TRACE and _signature(arguments) in self.ran

    def __call__(self, *arguments: Any) -> Any:
        values = list(map(nnx.Variable.get_raw_value, self.parameters))
        if _trace_state() != _NO_TRACE:
            return self._of_places(())(values, None, *arguments)
        launch = self.launch
        if launch is None or not launch[0].holds(values):
            packed = pack(values)
            launch = self.launch = packed, self._of_places(packed.places)
        packed, run = launch
        return run(packed.others(values), packed.array, *arguments)

    def compilations(self) -> int:
        return self.launch[1].compilations() if self.launch else 0

    def _of_places(self, places: tuple[Place, ...]) -> Jitted:
        return _of_structure(self.function, self.structure, places)


def _signature(arguments: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)


def _values(dictionaries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, dictionaries)))


@functools.lru_cache(maxsize=32)
def _of_structure(*of_what: Any) -> Jitted:
    """The jitted function of parameters' values, one for all modules of a structure."""
    return Jitted(taking_values(*of_what))


def taking_values(
    function: Callable[..., Any], structure: jax.tree_util.PyTreeDef, places: tuple[Place, ...]
) -> Callable[..., Any]:
    """The function that takes a module as an array of what is packed and a list of the others."""

    def of_values(others: list[Any], packed: jax.Array | None, *arguments: Any) -> Any:
        values = others if packed is None else unpack(places, packed, others)
        return function(jax.tree.unflatten(structure, values), *arguments)

    return of_values
