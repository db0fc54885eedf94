"""The strongest unfused baselines in PyTorch: a fast rotation in front of a library's attention."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compare.common.errors import UnavailableError
from compare.implementations.kernels import KernelCall, KernelImplementation
from compare.torch_tower.varlen import VarlenAttention, load_varlen
from compare.workloads.kernels import KernelWorkload

# (qkv, cos, sin) -> q and k rotated, each [tokens, heads, head_dim]
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def torch_peers() -> list[KernelImplementation]:
    """Every pair of a rotation and an attention; what cannot run here says so when prepared."""
    rotations = {"torch.compile rope": _compiled_rotation, "in-place rope": in_place_rotation}
    attentions = {
        "FA2 varlen": lambda _: load_varlen("FA2"),
        "flash-attn FA2 varlen": lambda _: load_varlen("flash-attn FA2"),
        "FA3 varlen": lambda _: load_varlen("FA3"),
        "cuDNN SDPA": _cudnn,
    }
    return [
        KernelImplementation(f"{rotation} + {attention}", "torch", partial(_pair, rotate, attend))
        for attention, attend in attentions.items()
        for rotation, rotate in rotations.items()
    ]


def _pair(
    rotation: Callable[[], Rotation],
    attention: Callable[[KernelWorkload], VarlenAttention],
    workload: KernelWorkload,
) -> KernelCall:
    attend = attention(workload)
    rotate, longest = rotation(), workload.longest

    def call(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        q, k = rotate(qkv, cos, sin)
        return attend(q, k, qkv[:, 2], cu_seqlens, longest)

    return call


def _compiled_rotation() -> Rotation:
    # Past a few shapes of one function torch.compile gives up on it: forget the ones before.
    torch.compiler.reset()
    return torch.compile(rotated, fullgraph=True, dynamic=False)


def rotated(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K rotated, each [tokens, heads, head_dim]; written to be compiled."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    qk = qkv[:, :2]
    x1, x2 = qk[..., :half].float(), qk[..., half : 2 * half].float()
    rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(qkv.dtype)
    q, k = torch.cat([rotated, qk[..., 2 * half :]], dim=-1).unbind(1)
    return q, k


def in_place_rotation() -> Rotation:
    """Our rotation kernel on packed qkv, in place."""
    from triton_kernels.launching.rotate_in_order import rotate_in_order

    def rotate(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _, heads, head_dim = qkv.shape
        # To a rotation Q and K of packed qkv are one tensor of twice as many heads.
        qk = qkv.view(tokens, 3 * heads, head_dim)[:, : 2 * heads]
        rotate_in_order(qk, qk, cos, sin)
        return qkv[:, 0], qkv[:, 1]

    return rotate


def _cudnn(workload: KernelWorkload) -> VarlenAttention:
    lengths = set(workload.lengths.tolist())
    if len(lengths) > 1:
        raise UnavailableError("cuDNN through SDPA needs segments of one length")
    length = lengths.pop()

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
