"""Kernels in programs for several platforms at once, as `jax.export` makes them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import DisabledSafetyCheck
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

# XLA's names for Triton IR and for PTX. Mosaic's kernels need no opting out.
_CUSTOM_CALLS = ("__gpu$xla.gpu.triton", "__gpu$xla.gpu.ptx")


def export_checks() -> list[DisabledSafetyCheck]:
    """What `jax.export.export` takes as `disabled_checks`, of programs with this package's kernels.

    JAX refuses to serialize kernels that other versions of it may not read: load what was exported
    for CUDA by the same version, or by one that you tried. Where the Triton package compiles, on a
    machine with a GPU, the kernels are PTX for its compute capability.
    """
    return [DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]


def platform_dependent(*arguments: Any, cuda: Callable[..., Any], **others: Callable) -> Any:
    """`jax.lax.platform_dependent`, whose choice for CUDA only CUDA's programs have to hold.

    JAX lowers each choice for every platform of a program, and kernels can be lowered for one.

    Args:
        arguments: pytrees of arrays.
        cuda: of the arguments, to a pytree of arrays.
        others: by platform, or `default`.
    """
    return jax.lax.platform_dependent(*arguments, cuda=functools.partial(_cuda, cuda), **others)


def _cuda(function: Callable[..., Any], *arguments: Any) -> Any:
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    results = _on_cuda.bind(*jax.tree.leaves(arguments), jaxpr=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _run(*arrays: jax.Array, jaxpr: ClosedJaxpr) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*arrays)


def _never_run(*_: jax.Array, jaxpr: ClosedJaxpr) -> list[jax.Array]:
    return [jnp.zeros(result.shape, result.dtype) for result in jaxpr.out_avals]


def _batch(
    arrays: tuple[jax.Array, ...], axes: tuple[int | None, ...], *, jaxpr: ClosedJaxpr
) -> tuple[list[jax.Array], list[int]]:
    run = jax.vmap(functools.partial(_run, jaxpr=jaxpr), in_axes=axes)
    results = _cuda(run, *arrays)
    return results, [0] * len(results)


_on_cuda = Primitive("on_cuda")
_on_cuda.multiple_results = True
_on_cuda.def_impl(_run)
_on_cuda.def_effectful_abstract_eval(lambda *_, jaxpr: (jaxpr.out_avals, jaxpr.effects))
batching.primitive_batchers[_on_cuda] = _batch
mlir.register_lowering(_on_cuda, mlir.lower_fun(_never_run, multiple_results=True))
mlir.register_lowering(_on_cuda, mlir.lower_fun(_run, multiple_results=True), platform="cuda")
