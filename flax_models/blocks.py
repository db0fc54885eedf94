"""The layers of a Qwen2.5-VL vision tower in Flax NNX.

Every layer takes and returns [tokens, channels] in the tower's dtype; sums and activations within
it are fp32. Parameters have the names of `tower_weights` and placeholder values until they are
loaded.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_models.config import VisionConfig
from pallas_kernels import fused_rope_attention_qkvpacked


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """What attention needs beside q, k and v; goes through jit as a pytree.

    Attributes:
        cos, sin: [tokens, head_dim / 2] fp32, of each token's rotation angles.
        cu_seqlens: [segments + 1] int32, where each segment of tokens that see each other starts.
        max_seqlen: upper bound on a segment's length; static under jit.
        implementation: of the attention, as in `pallas_kernels`; static under jit.
    """

    cos: jax.Array
    sin: jax.Array
    cu_seqlens: jax.Array
    max_seqlen: int = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})


class Linear(nnx.Module):
    """x @ weight.T + bias, with the weight [out, in] as Hugging Face stores it."""

    def __init__(
        self, in_features: int, out_features: int, dtype: DTypeLike, use_bias: bool = True
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        # The default precision of fp32 products on a GPU is TF32: an fp32 tower means fp32.
        precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        # A product in x's own dtype, not in fp32: only so does XLA hand the bias to cuBLAS, which
        # adds it in fp32 and rounds once.
        y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """x / rms(x) x weight."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        return (normed * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class PatchEmbed(nnx.Module):
    """The convolution over patches, which do not overlap: one product with flattened patches."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.proj = Linear(config.patch_dim, config.hidden_size, dtype, use_bias=False)

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches.astype(self.proj.weight.dtype))


class Attention(nnx.Module):
    """Self-attention within segments; the rotation of q and k happens in the kernel."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype)
        self.proj = Linear(config.hidden_size, config.hidden_size, dtype)

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        tokens = x.shape[0]
        attended = fused_rope_attention_qkvpacked(
            self.qkv(x).reshape(tokens, 3, self.num_heads, self.head_dim),
            segments.cos,
            segments.sin,
            segments.cu_seqlens,
            max_seqlen=segments.max_seqlen,
            implementation=segments.implementation,
        )
        return self.proj(attended.reshape(tokens, -1))


class MLP(nnx.Module):
    """down(silu(gate(x)) x up(x)), gate and up in one product; widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        width = config.aligned_intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * width, dtype)
        self.down = Linear(width, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


class Block(nnx.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, dtype)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        x += self.attn(self.norm1(x), segments)
        x += self.mlp(self.norm2(x))
        return x


class PatchMerger(nnx.Module):
    """The tokens of each merge unit, which lie side by side, into one embedding."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike) -> None:
        self.merged_size = config.merge_unit * config.hidden_size
        self.ln_q = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.fc1 = Linear(self.merged_size, self.merged_size, dtype)
        self.fc2 = Linear(self.merged_size, config.out_hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = self.fc1(self.ln_q(x).reshape(-1, self.merged_size)).astype(jnp.float32)
        return self.fc2(jax.nn.gelu(wide, approximate=False).astype(x.dtype))
