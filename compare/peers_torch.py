"""The strongest unfused baselines in PyTorch: a fast rotation in front of a library's attention."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compare.environment import FA3_LIBRARY
from compare.errors import UnavailableError
from compare.implementations import KernelCall, KernelImplementation
from compare.workloads import KernelWorkload

# (qkv, cos, sin) -> q and k rotated, each [tokens, heads, head_dim]
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# (q, k, v, cu_seqlens, max_seqlen) -> [tokens, heads, head_dim]
VarlenAttention = Callable[..., torch.Tensor]


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


def load_varlen(name: str) -> VarlenAttention:
    """A library's attention over cu_seqlens.

    Args:
        name: "FA2" (PyTorch's own), "flash-attn FA2" or "FA3".

    Raises:
        UnavailableError: the library is not installed.
    """
    return {"FA2": _torch_fa2, "flash-attn FA2": _package_fa2, "FA3": _fa3}[name]()


def _pair(
    rotation: Callable[[], Rotation],
    attention: Callable[[KernelWorkload], VarlenAttention],
    workload: KernelWorkload,
) -> KernelCall:
    attend = attention(workload)
    rotate = rotation()
    max_seqlen = int(workload.lengths.max())

    def call(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        q, k = rotate(qkv, cos, sin)
        return attend(q, k, qkv[:, 2], cu_seqlens, max_seqlen)

    return call


def _compiled_rotation() -> Rotation:
    # Past a few shapes of one function torch.compile gives up on it: forget the ones before.
    torch.compiler.reset()
    return torch.compile(_rotate, fullgraph=True, dynamic=False)


def _rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos.shape[-1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    qk = qkv[:, :2]
    x1, x2 = qk[..., :half].float(), qk[..., half : 2 * half].float()
    rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(qkv.dtype)
    q, k = torch.cat([rotated, qk[..., 2 * half :]], dim=-1).unbind(1)
    return q, k


def in_place_rotation() -> Rotation:
    """Our rotation kernel on packed qkv, in place."""
    from triton_kernels.attention import rotate_in_order

    def rotate(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _, heads, head_dim = qkv.shape
        # To a rotation Q and K of packed qkv are one tensor of twice as many heads.
        qk = qkv.view(tokens, 3 * heads, head_dim)[:, : 2 * heads]
        rotate_in_order(qk, qk, cos, sin)
        return qkv[:, 0], qkv[:, 1]

    return rotate


def _torch_fa2() -> VarlenAttention:
    # The operator behind torch.nn.attention.varlen.varlen_attn, which adds a kernel to every call:
    # it fills a random state that is not used.
    operator = torch.ops.aten._flash_attention_forward

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        dropout, is_causal, return_debug_mask = 0.0, False, False
        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        return operator(q, k, v, *bounds, dropout, is_causal, return_debug_mask)[0]

    return attend


def _package_fa2() -> VarlenAttention:
    return _wrap(_import("flash_attn").flash_attn_varlen_func)


def _fa3() -> VarlenAttention:
    if path := os.environ.get(FA3_LIBRARY):
        torch.ops.load_library(path)
        return _bare_fa3(torch.ops._vllm_fa3_C.fwd.default)
    try:
        return _wrap(_import("flash_attn_interface").flash_attn_varlen_func)
    except UnavailableError:
        pass
    try:
        attend = _import("vllm.vllm_flash_attn").flash_attn_varlen_func
    except UnavailableError:
        raise UnavailableError(
            f"neither flash_attn_interface nor vllm is installed, and {FA3_LIBRARY} is not set"
        ) from None
    return _wrap(partial(attend, fa_version=3))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed ({error})") from None


def _wrap(function: Callable[..., Any]) -> VarlenAttention:
    """One signature for the flash-attention family, whose members order theirs differently."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        out = function(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        return out[0] if isinstance(out, tuple) else out

    return attend


def _bare_fa3(operator: Any) -> VarlenAttention:
    """Call the operator without vLLM, by the names of its arguments: their number has changed."""
    fixed = {
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": False,
        "num_splits": 0,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    names = [argument.name for argument in operator._schema.arguments]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        values = fixed | {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "softmax_scale": q.shape[-1] ** -0.5,
        }
        return operator(*(values.get(name) for name in names))[0]

    return attend


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
