"""An MLP's gated activation, which also applies the norm before the MLP.

An RMSNorm divides each row x by its root mean square and multiplies the channels by weights. The
weights can be folded into the next product, and the division of the whole row can wait:

    norm(x) W^T = x (W diag(weights))^T / rms(x)

So the product takes the residual stream as it is, and the activation, which reads every row of the
product anyway, divides. This saves the pass over memory that a separate norm takes.

The bias of gate and up comes after the norm, so it is added here. So is the bias of the attention's
output, which the residual stream lacks: a product that adds one at its end is up to an eighth
slower on an H200 (compare/results/notes/towers.md). `tower_weights` says how both get
into the residual stream.

The twin of compare/torch_tower/gated.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_models.common.weights import Biases
from pallas_kernels.kernels.dialect import HAVE_TRITON, plgpu
from pallas_kernels.kernels.tiles import Ref, exp2
from pallas_kernels.launching.devices import have_tensor_cores
from pallas_kernels.launching.launch import run
from pallas_kernels.launching.plan import LOG2_E
from pallas_kernels.launching.platforms import platform_dependent
from pallas_kernels.launching.table import Launch, next_power_of_2

# Of a program, which has one row; a row of 3,456 channels is 16 values a thread.
_WARPS = 8


def gated_activation(
    product: jax.Array, residual: jax.Array, biases: Biases, eps: float, implementation: str
) -> jax.Array:
    """silu(gate) x up of [gate, up] = (product + biases.product) / rms + biases.output.

    Args:
        product: [tokens, 2 x width] of any floating dtype, gate and up beside each other.
        residual: [tokens, hidden] floating; rms are the root mean squares of its rows with
            biases.residual added.
        biases: see there.
        eps: of the norm, added to the mean square.
        implementation: as in `pallas_kernels`.

    Returns:
        [tokens, width] in the dtype of the residual stream; computed in fp32 and rounded once.
    """
    if not HAVE_TRITON:
        implementation = "reference"
    return differentiable(_ACTIVATION, eps, implementation, product, residual, *biases)


class Operation(NamedTuple):
    """Ways to compute one thing, each (eps, *arguments) -> array.

    Attributes:
        reference: by XLA.
        kernel: by Pallas, on a GPU.
        interpreted: on a CPU, in Pallas' interpreter.
    """

    reference: Callable[..., jax.Array]
    kernel: Callable[..., jax.Array]
    interpreted: Callable[..., jax.Array]


def differentiable(
    operation: Operation, eps: float, implementation: str, *arguments: jax.Array
) -> jax.Array:
    """Compute by an implementation, as in `pallas_kernels`; gradients are the reference's."""
    if implementation == "auto" and not have_tensor_cores():
        implementation = "reference"
    return _compute(operation, eps, implementation, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _compute(
    operation: Operation, eps: float, implementation: str, *arguments: jax.Array
) -> jax.Array:
    reference, kernel, interpreted = (functools.partial(way, eps) for way in operation)
    if implementation == "reference":
        return reference(*arguments)
    if implementation == "auto":
        return platform_dependent(*arguments, cuda=kernel, default=reference)
    return platform_dependent(*arguments, cuda=kernel, cpu=interpreted)


def _forward(operation: Operation, eps: float, implementation: str, *arguments: jax.Array) -> tuple:
    return _compute(operation, eps, implementation, *arguments), arguments


def _backward(operation: Operation, eps: float, _: str, arguments: tuple, grad: jax.Array) -> tuple:
    """Differentiate the reference, computed again from the saved arguments."""
    return jax.vjp(functools.partial(operation.reference, eps), *arguments)[1](grad)


_compute.defvjp(_forward, _backward)


def reference(eps: float, product: jax.Array, residual: jax.Array, *biases: jax.Array) -> jax.Array:
    stream_bias, product_bias, bias = biases
    scale = norm_scale(eps, residual, stream_bias)
    product, bias = product.astype(jnp.float32), bias.astype(jnp.float32)[None]
    product += product_bias.astype(jnp.float32)[None]
    gate, up = jnp.split(product * scale + bias, 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(residual.dtype)


def norm_scale(eps: float, residual: jax.Array, stream_bias: jax.Array) -> jax.Array:
    """One over the root mean square of each row, [tokens, 1] fp32."""
    x = residual.astype(jnp.float32) + stream_bias.astype(jnp.float32)[None]
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def kernel(
    eps: float, product: jax.Array, residual: jax.Array, *biases: jax.Array, interpret: bool = False
) -> jax.Array:
    tokens, width = product.shape[0], product.shape[1] // 2
    launch = Launch(block=1, block_k=1, num_warps=_WARPS, num_stages=1)
    body = functools.partial(gated_kernel, eps=eps, interpreted=interpret)
    operands = product, residual, *biases
    return run(body, tokens, (tokens, width), residual.dtype, launch, interpret, operands)


_ACTIVATION = Operation(reference, kernel, functools.partial(kernel, interpret=True))


def gated_kernel(
    product_ref: Ref, residual_ref: Ref,
    stream_bias_ref: Ref, product_bias_ref: Ref, bias_ref: Ref,
    out_ref: Ref,
    *,
    eps: float, interpreted: bool,
) -> None:  # fmt: skip
    """One program for each token."""
    hidden, width = residual_ref.shape[1], out_ref.shape[1]
    token = pl.program_id(0)
    channel = jnp.arange(next_power_of_2(hidden), dtype=jnp.int32)
    column = jnp.arange(next_power_of_2(width), dtype=jnp.int32)
    in_residual, in_width = channel < hidden, column < width

    x = load(residual_ref.at[token, channel], in_residual)
    gate = load(product_ref.at[token, column], in_width)
    up = load(product_ref.at[token, width + column], in_width)
    x += load(stream_bias_ref.at[channel], in_residual)
    gate += load(product_bias_ref.at[column], in_width)
    up += load(product_bias_ref.at[width + column], in_width)
    scale = jax.lax.rsqrt(jnp.sum(x * x) / hidden + eps)
    gate = gate * scale + load(bias_ref.at[column], in_width)
    up = up * scale + load(bias_ref.at[width + column], in_width)
    y = silu_times(gate, up, functools.partial(exp2, interpreted=interpreted))
    plgpu.store(out_ref.at[token, column], y.astype(out_ref.dtype), mask=in_width)


def silu_times(gate: jax.Array, up: jax.Array, exp2: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """silu(gate) x up in few instructions, which would otherwise take as long as the loads.

    So `exp2` is to be whatever is one instruction where this runs.
    """
    # A root takes fewer than a division. The bound keeps the power finite; a gate that it changes
    # is closed: the result is below 1e-37 times gate and up.
    root = jax.lax.rsqrt(1.0 + exp2(jnp.minimum(gate * -LOG2_E, 126.0)))
    return gate * up * (root * root)


def load(window: Ref, mask: jax.Array) -> jax.Array:
    """Values in fp32; zero where masked."""
    return plgpu.load(window, mask=mask, other=0.0).astype(jnp.float32)
