"""A jitted function of a module, called without walking the module at every call.

To flatten a module of hundreds of parameters takes JAX a millisecond, as long as a small image.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

_programs: weakref.WeakKeyDictionary[nnx.Module, "_Program"] = weakref.WeakKeyDictionary()


def compiled(
    function: Callable[..., Any], module: nnx.Module, settings: tuple[Any, ...]
) -> Callable[..., Any]:
    """`jax.jit(function)` with the module bound as its first argument.

    Each call reads the values that the module's parameters have by then. Which parameters there
    are, and all that is static, is read once, and again where `settings` have changed.

    Args:
        function: pure; takes the module and further pytrees.
        module: the same function belongs to all its calls.
        settings: what may change about the module beside its parameters' values.
    """
    program = _programs.get(module)
    if program is None or program.settings != settings:
        parameters = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
        run = _of_structure(function, jax.tree.structure(module))
        program = _programs[module] = _Program(settings, tuple(parameters), run)
    return program


@dataclass(frozen=True)
class _Program:
    settings: tuple[Any, ...]
    parameters: tuple[nnx.Variable, ...]
    run: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        values = [parameter.get_raw_value() for parameter in self.parameters]
        return self.run(values, *arguments)


@functools.lru_cache(maxsize=32)
def _of_structure(
    function: Callable[..., Any], structure: jax.tree_util.PyTreeDef
) -> Callable[..., Any]:
    """The jitted function of parameters' values, one for all modules of a structure."""

    def of_values(values: list[jax.Array], *arguments: Any) -> Any:
        return function(jax.tree.unflatten(structure, values), *arguments)

    return jax.jit(of_values)
