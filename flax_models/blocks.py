"""The layers of the vision towers in Flax NNX; what differs between families is `config.family`'s.

Every layer takes and returns [tokens, channels] in the tower's dtype; sums within it are fp32.
No rank or dtype is left for JAX to promote, since a program may forbid promotion.
Parameters have the names of `tower_weights` and placeholder values until they are loaded.
A backward pass computes norms and activations again (`jax.checkpoint`) from what is in memory
anyway: their fp32 intermediates would be most of what it keeps.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_models.attention import Segments, attend
from flax_models.common.config import VisionConfig
from flax_models.common.weights import Biases, unnormed_dtype
from flax_models.gated_product import gated_product
from flax_models.products import product


class Linear(nnx.Module):
    """x @ weight.T + bias, with the weight [out, in] as Hugging Face stores it."""

    def __init__(
        self, in_features: int, out_features: int, dtype: DTypeLike, use_bias: bool = True
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        # A product in x's own dtype, not in fp32: only then does XLA hand the bias to cuBLAS, which
        # adds it in fp32 and rounds once.
        y = product(x, self.weight[...], x.dtype)
        return y if self.bias is None else _add_bias(y, self.bias[...])


@jax.custom_vjp
def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias, whose gradient is summed in fp32; by itself JAX rounds after every token."""
    return y + bias[None]


def _bias_gradient(_: None, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad, grad.astype(jnp.float32).sum(axis=0).astype(grad.dtype)


_add_bias.defvjp(lambda y, bias: (_add_bias(y, bias), None), _bias_gradient)


class RMSNorm(nnx.Module):
    """x / rms(x) x weight, in fp32 and rounded once."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(self.eps, x, self.weight[...])


@partial(jax.checkpoint, static_argnums=0)
def _rms_norm(eps: float, x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    return (normed * weight.astype(jnp.float32)[None]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) x weight + bias, in fp32 and rounded once."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.bias = nnx.Param(jnp.zeros((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(self.eps, x, self.weight[...], self.bias[...])


@partial(jax.checkpoint, static_argnums=0)
def _layer_norm(eps: float, x: jax.Array, *weight_and_bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + eps)
    weight, bias = (p.astype(jnp.float32)[None] for p in weight_and_bias)
    return (normed * weight + bias).astype(x.dtype)


_NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def _norm(config: VisionConfig, features: int, dtype: DTypeLike) -> nnx.Module:
    return _NORMS[config.family.norm](features, config.norm_eps, dtype)


class PatchEmbed(nnx.Module):
    """The convolution over patches, which do not overlap: one product with flattened patches."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        bias = config.family.patch_bias
        self.proj = Linear(config.patch_dim, config.hidden_size, dtype, use_bias=bias)

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches.astype(self.proj.weight.dtype))


class PositionTable(nnx.Module):
    """A square of learned embeddings, stretched over each frame, corners onto corners.

    Between its entries it is interpolated bilinearly.
    """

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.side = config.position_table_side
        self.weight = nnx.Param(jnp.zeros((self.side**2, config.hidden_size), dtype))

    def __call__(self, positions: jax.Array, frame_sizes: jax.Array) -> jax.Array:
        """Embeddings fp32 [tokens, hidden_size] of `Layout`'s arrays of these names."""
        stretched = jnp.asarray(positions).astype(jnp.float32) * (self.side - 1)
        stretched /= jnp.maximum(frame_sizes - 1, 1).astype(jnp.float32)
        floor = jnp.floor(stretched)
        upper_share = stretched - floor
        lower_upper = jnp.arange(2)[None, None]
        entries = floor.astype(jnp.int32)[..., None] + lower_upper  # [tokens, axis, lower-upper]
        row, column = jnp.unstack(jnp.minimum(entries, self.side - 1), axis=1)
        shares = jnp.stack([1 - upper_share, upper_share], axis=-1)
        corners = (row[:, :, None] * self.side + column[:, None, :]).reshape(-1, 4)
        weights = (shares[:, 0, :, None] * shares[:, 1, None, :]).reshape(-1, 4, 1)
        # In fp32 before it is read: an entry's gradient is a sum over all that read it.
        return (self.weight[...].astype(jnp.float32)[corners] * weights).sum(axis=1)


class Attention(nnx.Module):
    """Self-attention within segments, without the product `proj` that the block ends it by."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike, proj_bias: bool = True) -> None:
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype)
        self.proj = Linear(config.hidden_size, config.hidden_size, dtype, proj_bias)

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        tokens = x.shape[0]
        qkv = self.qkv(x).reshape(tokens, 3, self.num_heads, self.head_dim)
        return attend(qkv, segments).reshape(tokens, -1)


@jax.checkpoint
def _quick_gelu(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(1.702 * wide)).astype(x.dtype)


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    gelu = partial(jax.nn.gelu, approximate=True)
    return jax.lax.platform_dependent(
        x,
        # In x's own dtype: XLA hands it to cuBLAS with the product and the bias only in this form.
        cuda=gelu,
        # It would round after every operation there.
        default=lambda x: gelu(x.astype(jnp.float32)).astype(x.dtype),
    )


_ACTIVATIONS = {"quick_gelu": _quick_gelu, "gelu_pytorch_tanh": _gelu}


class MLP(nnx.Module):
    """down(activation(up(x))); widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        width = config.aligned_intermediate_size
        self.activation = config.family.activation
        self.up = Linear(config.hidden_size, width, dtype)
        self.down = Linear(width, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(_ACTIVATIONS[self.activation](self.up(x)))


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) x up(x)), gate and up in one product; widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        hidden, width = config.hidden_size, config.aligned_intermediate_size
        self.gate_up = Linear(hidden, 2 * width, dtype)
        self.down = Linear(width, hidden, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(_gated(self.gate_up(x)))


@jax.checkpoint
def _gated(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.norm1 = _norm(config, config.hidden_size, dtype)
        self.attn = Attention(config, dtype)
        self.norm2 = _norm(config, config.hidden_size, dtype)
        self.mlp = (MLP if len(config.family.mlp_inputs) == 1 else GatedMLP)(config, dtype)

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        x = _add(x, self.attn.proj(self.attn(self.norm1(x), segments)))
        return _add(x, self.mlp(self.norm2(x)))


# Residual streams [tokens, hidden_size] for which cuBLAS takes a kernel that waits for them at the
# end of each tile: on an H200 a product takes 13 and 24 us longer with the sum than without, and
# the norm behind it adds them in 7 and 12 (compare/results/notes/host.md).
_SUMMED_IN_NORM = frozenset({(4096, 1280), (8192, 1280)})


def _add(residual: jax.Array, branch: jax.Array) -> jax.Array:
    """The residual sum, within the product that ends the branch unless that is slow."""
    if residual.shape in _SUMMED_IN_NORM:
        return residual + jax.lax.optimization_barrier(branch)
    return _add_in_place(residual, branch)


def _add_in_place(residual: jax.Array, product: jax.Array) -> jax.Array:
    """The sum within the product, which writes it over the residual stream.

    The barrier's result is read by the sum alone, and so XLA has cuBLAS read and write one array.
    Where it writes another, products in clusters of 2 x 4 thread blocks fail now and then on an
    H200 that several processes share (compare/results/notes/faults.md).
    """
    return jax.lax.optimization_barrier(residual) + product


def _add_product(residual: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """residual + x weight^T, rounded once: the product holds biases that may cancel in the sum."""

    def add(residual: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = residual.astype(jnp.float32) + product(x, weight, jnp.float32)
        return wide.astype(residual.dtype)

    def add_in_place(residual: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _add_in_place(residual, product(x, weight, residual.dtype))  # cuBLAS adds in fp32

    # A product that is not cuBLAS' is rounded before the sum, and its biases may be beyond fp16.
    if residual.dtype == jnp.float16:
        return add(residual, x, weight)
    return jax.lax.platform_dependent(residual, x, weight, cuda=add_in_place, default=add)


class _Product(nnx.Module):
    """Base of products that a kernel goes on from, or adds to.

    No Linear: what an adapter adds to a layer's result would miss the rest.
    """

    def __init__(self, in_features: int, out_features: int, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))


class SummedProduct(_Product):
    """residual + x weight^T."""

    def __call__(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        return _add_product(residual, x, self.weight[...])


class GatedProduct(_Product):
    """Gate and up in one product, their norm and the activation: see `gated_product`."""

    def __call__(
        self, residual: jax.Array, biases: Biases, eps: float, implementation: str
    ) -> jax.Array:
        return gated_product(residual, self.weight[...], biases, eps, implementation)


class LateNormMLP(nnx.Module):
    """norm2, MLP and residual sum of a layer, the norm as `flax_models.gated` applies it.

    Gate and up are one product; weights and widths are as `tower_weights` makes them.
    """

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        hidden, width = config.hidden_size, config.aligned_intermediate_size
        self.eps = config.norm_eps
        self.gate_up = GatedProduct(hidden, 2 * width, dtype)
        self.stream_bias = nnx.Param(jnp.zeros((hidden,), dtype))
        self.product_bias = nnx.Param(jnp.zeros((2 * width,), unnormed_dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros((2 * width,), dtype))
        self.down = SummedProduct(width, hidden, dtype)

    def __call__(self, residual: jax.Array, implementation: str) -> jax.Array:
        biases = Biases(self.stream_bias[...], self.product_bias[...], self.bias[...])
        activated = self.gate_up(residual, biases, self.eps, implementation)
        return self.down(residual, activated)


class LateNormBlock(nnx.Module):
    """One layer whose second norm is applied behind the MLP's first product.

    Both residual sums are within products, which are faster without a bias: the MLP adds that of
    the attention's output too.
    """

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.norm1 = _norm(config, config.hidden_size, dtype)
        self.attn = Attention(config, dtype, proj_bias=False)
        self.mlp = LateNormMLP(config, dtype)

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        x = _add_in_place(x, self.attn.proj(self.attn(self.norm1(x), segments)))
        return self.mlp(x, segments.implementation)


class PatchMerger(nnx.Module):
    """The tokens of each merge unit, which lie side by side, into one embedding.

    The norm is each token's or, in DeepStack's mergers (`norm_merged`), the merge unit's.
    """

    def __init__(self, config: VisionConfig, dtype: DTypeLike, norm_merged: bool = False) -> None:
        self.merged_size = config.merge_unit * config.hidden_size
        self.normed_size = self.merged_size if norm_merged else config.hidden_size
        self.norm = _norm(config, self.normed_size, dtype)
        self.fc1 = Linear(self.merged_size, self.merged_size, dtype)
        self.fc2 = Linear(self.merged_size, config.out_hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.norm(x.reshape(-1, self.normed_size))
        wide = self.fc1(normed.reshape(-1, self.merged_size)).astype(jnp.float32)
        return self.fc2(jax.nn.gelu(wide, approximate=False).astype(x.dtype))
