"""Attention within segments, the twin of `flax_models.attention`.

By our kernel or, over whole frames, by what else is installed.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from compare.common.errors import one_line
from compare.torch_tower.varlen import VarlenAttention, load_varlen
from flax_models import Layout, VisionConfig
from flax_models.common.buckets import frame_length
from flax_models.common.layout import inverse_frequencies
from triton_kernels import fused_rope_attention_qkvpacked
from triton_kernels.launching.rotate_in_order import rotate_in_order
from triton_kernels.reference import rotate_reference

FRAME_ATTENTION = ("fused", "cudnn", "fa2", "fa3")

_CUDNN = SDPBackend.CUDNN_ATTENTION
_PROBE_TOKENS = 64

# The bound on a frame's tokens only chooses a kernel, and blocks compiled for one value are
# compiled anew, once, for any other: one value for all buckets, or few.
_FRAME_BOUND = 1 << 15


@dataclass(frozen=True)
class Segments:
    """What attention needs beside q, k and v.

    Attributes:
        cos, sin: [tokens, head_dim / 2] fp32, of each token's rotation angles.
        cu_seqlens: [segments + 1] int32, where each segment of tokens that see each other starts.
        max_seqlen: upper bound on a segment's length.
        implementation: of our kernel, as in `triton_kernels`.
        provider: one of FRAME_ATTENTION.
        batch_invariant: of our kernel, as in `triton_kernels`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    implementation: str
    provider: str = "fused"
    batch_invariant: bool = False


def attend(qkv: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Rotate q and k, attend within each segment.

    Args:
        qkv: [tokens, 3, heads, head_dim], as the projection writes it.
        segments: for "cudnn" as `layout_segments` returns them.

    Returns:
        [tokens, heads, head_dim] in the dtype of qkv. Rows of padding are finite if those of qkv
        are, and mean nothing.
    """
    cos, sin, cu_seqlens = segments.cos, segments.sin, segments.cu_seqlens
    if segments.provider != "fused":
        return _rotate_and_attend(qkv, cos, sin, cu_seqlens, segments.provider)
    return fused_rope_attention_qkvpacked(
        qkv,
        cos,
        sin,
        cu_seqlens,
        max_seqlen=segments.max_seqlen,
        implementation=segments.implementation,
        batch_invariant=segments.batch_invariant,
    )


# An operator, so that compiled blocks need not look into libraries.
@torch.library.custom_op("frame_attention::rotate_and_attend", mutates_args=())
def _rotate_and_attend(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor, provider: str
) -> torch.Tensor:
    rotate = rotate_by_kernel if qkv.is_cuda else rotate_reference
    heads = qkv.shape[2]
    rotated = rotate(qkv[:, :2].flatten(1, 2), cos, sin)
    q, k, v = rotated[:, :heads], rotated[:, heads:], qkv[:, 2]
    if provider == "cudnn":
        return _attend_cudnn(q, k, v, cu_seqlens).contiguous()
    # Padding as a segment of its own: no row of the result is left as the memory was.
    tokens = qkv.shape[0]
    cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), tokens)])
    return _varlen(provider)(q, k, v, cu_seqlens, tokens).contiguous()


@_rotate_and_attend.register_fake
def _(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor, provider: str
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], *qkv.shape[2:]))


def rotate_by_kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotate_reference` in one pass over memory."""
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        rotate_in_order(x, rotated, cos, sin)
    return rotated


@cache
def _varlen(provider: str) -> VarlenAttention:
    return load_varlen(provider.upper())


def _attend_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    length = q.shape[0] // (cu_seqlens.shape[0] - 1)
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(_CUDNN):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(0, 1)


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
    bound = _frame_bound(layout.max_frame_seqlen)
    frames = Segments(cos, sin, layout.cu_frame_seqlens, bound, provider=provider, **options)
    return windows, _of_equal_frames(frames) if provider == "cudnn" else frames


def rotary_angles(
    config: VisionConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layout.rotary_angles` on the device: cos and sin, fp32 [tokens, head_dim / 2]."""
    frequencies = _frequencies(config, positions.device)
    angles = positions.float()[:, :, None] * frequencies  # [tokens, 2, head_dim / 4]
    angles = angles.reshape(len(positions), -1)
    return angles.cos(), angles.sin()


@torch.compiler.assume_constant_result
def _frequencies(config: VisionConfig, device: torch.device) -> torch.Tensor:
    return _kept_frequencies(config, device)


@cache  # for good: a recorded pass reads them where they are
def _kept_frequencies(config: VisionConfig, device: torch.device) -> torch.Tensor:
    # A trace's modes would make a tensor without values, inference mode one that autograd refuses,
    # and it is kept.
    with torch.inference_mode(False), _disable_current_modes():
        return torch.from_numpy(inverse_frequencies(config)).to(device)


def _frame_bound(tokens: int) -> int:
    """_FRAME_BOUND, or for the rare frame above it the next power of two."""
    return max(_FRAME_BOUND, 1 << (tokens - 1).bit_length())


def _of_equal_frames(segments: Segments) -> Segments:
    """Make sure that the segments are what cuDNN can take, as the twin does.

    cuDNN takes [frames, heads, tokens of a frame, head_dim]: all frames of one length, then padding
    by whole frames.
    """
    tokens, cu_seqlens = len(segments.cos), segments.cu_seqlens
    frames = len(cu_seqlens) - 1
    length, end = frame_length(tokens, frames), cu_seqlens[-1]
    starts = length * torch.arange(frames + 1, device=cu_seqlens.device)
    equal = (cu_seqlens == starts.minimum(end)).all() & (end % length == 0)
    return replace(segments, cos=segments.cos.where(equal, torch.nan))


def check_provider(
    provider: str, config: VisionConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Try attention over frames, as a tower of this configuration will call it.

    Raises:
        ValueError: it does not run on the device; the message says why.
    """
    if provider == "fused":  # runs everywhere
        return
    if device.type != "cuda":
        raise ValueError(
            f"frame_attention={provider!r} needs a tower on a GPU, got device '{device}'"
        )
    shape = (_PROBE_TOKENS, 3, config.num_heads, config.head_dim)
    qkv = torch.zeros(shape, dtype=dtype, device=device)
    angles = torch.zeros((_PROBE_TOKENS, config.head_dim // 2), device=device)
    cu_seqlens = torch.tensor([0, _PROBE_TOKENS], dtype=torch.int32, device=device)
    try:
        _rotate_and_attend(qkv, angles, angles, cu_seqlens, provider)
        torch.cuda.synchronize(device)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"frame_attention={provider!r} does not run here, use 'fused': {one_line(error)}"
        ) from error
