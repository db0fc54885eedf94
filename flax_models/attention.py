"""Attention within segments: by our kernel or, over whole frames, by what else is installed."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from flax_models.common.buckets import frame_length
from flax_models.common.config import VisionConfig
from flax_models.common.layout import Layout, inverse_frequencies
from pallas_kernels import fused_rope_attention_qkvpacked
from pallas_kernels.reference import rotate_reference

FRAME_ATTENTION = ("fused", "cudnn")

_CUDNN = "cudnn"  # as `jax.nn.dot_product_attention` names it
_PROBE_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """What attention needs beside q, k and v; goes through jit as a pytree.

    Attributes:
        cos, sin: [tokens, head_dim / 2] fp32, of each token's rotation angles.
        cu_seqlens: [segments + 1] int32, where each segment of tokens that see each other starts.
        max_seqlen: upper bound on a segment's length; static under jit.
        implementation: of our kernel, as in `pallas_kernels`; static under jit.
        provider: one of FRAME_ATTENTION; static under jit.
        batch_invariant: of our kernel, as in `pallas_kernels`; static under jit.
    """

    cos: jax.Array
    sin: jax.Array
    cu_seqlens: jax.Array
    max_seqlen: int = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})
    provider: str = field(default="fused", metadata={"static": True})
    batch_invariant: bool = field(default=False, metadata={"static": True})


def attend(qkv: jax.Array, segments: Segments) -> jax.Array:
    """Rotate q and k, attend within each segment.

    Args:
        qkv: [tokens, 3, heads, head_dim], as the projection writes it.
        segments: for "cudnn" as `layout_segments` returns them.

    Returns:
        [tokens, heads, head_dim] in the dtype of qkv. Rows of padding are finite if those of qkv
        are, and mean nothing.
    """
    if segments.provider == "cudnn":
        return _attend_cudnn(qkv, segments)
    return fused_rope_attention_qkvpacked(
        qkv,
        segments.cos,
        segments.sin,
        segments.cu_seqlens,
        max_seqlen=segments.max_seqlen,
        implementation=segments.implementation,
        batch_invariant=segments.batch_invariant,
    )


def _attend_cudnn(qkv: jax.Array, segments: Segments) -> jax.Array:
    q, k = (rotate_reference(qkv[:, i], segments.cos, segments.sin) for i in range(2))
    frames = len(segments.cu_seqlens) - 1
    q, k, v = (x.reshape(frames, -1, *x.shape[1:]) for x in (q, k, qkv[:, 2]))
    # A single frame may be padded; of several the padding is frames too, which see themselves.
    lengths = segments.cu_seqlens[1:] if frames == 1 else None
    out = jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation=_CUDNN
    )
    return out.reshape(qkv.shape[0], *qkv.shape[2:])


def layout_segments(
    config: VisionConfig,
    layout: Layout,
    implementation: str,
    provider: str = "fused",
    batch_invariant: bool = False,
) -> tuple[Segments, Segments]:
    """The windows of a layout, and its frames, over which `provider` attends.

    Raises:
        ValueError: a layout that the provider cannot take.
    """
    cos, sin = rotary_angles(config, layout.positions)
    options = {"implementation": implementation, "batch_invariant": batch_invariant}
    windows = Segments(cos, sin, layout.cu_window_seqlens, layout.max_window_seqlen, **options)
    frames = Segments(
        cos, sin, layout.cu_frame_seqlens, layout.max_frame_seqlen, provider=provider, **options
    )
    return windows, _of_equal_frames(frames) if provider == "cudnn" else frames


def rotary_angles(config: VisionConfig, positions: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`layout.rotary_angles` on the device: cos and sin, fp32 [tokens, head_dim / 2]."""
    positions = jnp.asarray(positions).astype(jnp.float32)
    frequencies = inverse_frequencies(config)[None, None]
    angles = positions[:, :, None] * frequencies  # [tokens, 2, head_dim / 4]
    angles = angles.reshape(len(positions), -1)
    return jnp.cos(angles), jnp.sin(angles)


def _of_equal_frames(segments: Segments) -> Segments:
    """Make sure that the segments are what cuDNN can take.

    cuDNN takes [frames, tokens of a frame, heads, head_dim]: all frames of one length, then padding
    by whole frames, or a single frame, which may be padded.

    Returns:
        The segments; with NaN for cosines, and so for results, where `cu_seqlens` hold other
        frames than that.

    Raises:
        ValueError: the tokens are no multiple of the number of frames.
    """
    tokens, cu_seqlens = len(segments.cos), segments.cu_seqlens
    frames = len(cu_seqlens) - 1
    length, end = frame_length(tokens, frames), cu_seqlens[-1]
    equal = (cu_seqlens == jnp.minimum(length * jnp.arange(frames + 1), end)).all()
    if frames > 1:
        equal &= end % length == 0
    return replace(segments, cos=jnp.where(equal, segments.cos, jnp.nan))


def check_provider(
    provider: str, config: VisionConfig, dtype: DTypeLike, device: jax.Device | None
) -> None:
    """Try attention over frames, as a tower of this configuration will call it.

    Args:
        provider: one of FRAME_ATTENTION.
        config: the tower's configuration.
        dtype: of its activations.
        device: where it lives; None: JAX's default device.

    Raises:
        ValueError: it does not run there; the message says why.
    """
    if provider == "fused":  # runs everywhere
        return
    shape = (_PROBE_TOKENS, 3, config.num_heads, config.head_dim)
    qkv = jax.device_put(jnp.zeros(shape, dtype), device)
    platform = next(iter(qkv.devices())).platform
    if platform != "gpu":
        raise ValueError(
            f"frame_attention={provider!r} needs a tower on a GPU, got device {platform!r}"
        )
    angles = jnp.zeros((_PROBE_TOKENS, config.head_dim // 2))
    segments = Segments(
        cos=angles,
        sin=angles,
        cu_seqlens=jnp.array([0, _PROBE_TOKENS], jnp.int32),
        max_seqlen=_PROBE_TOKENS,
        implementation="auto",
        provider=provider,
    )
    try:
        jax.block_until_ready(jax.jit(attend)(qkv, jax.device_put(segments, device)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"frame_attention={provider!r} does not run here, use 'fused': {error}"
        ) from error
