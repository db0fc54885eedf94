"""Libraries' attention over cu_seqlens: FlashAttention 2 and 3, from where they are installed."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from compare.common.environment import FA3_LIBRARY
from compare.common.errors import UnavailableError

# (q, k, v, cu_seqlens, max_seqlen) -> [tokens, heads, head_dim]
VarlenAttention = Callable[..., torch.Tensor]


def load_varlen(name: str) -> VarlenAttention:
    """A library's attention over cu_seqlens.

    Args:
        name: "FA2" (PyTorch's own), "flash-attn FA2" or "FA3".

    Raises:
        UnavailableError: the library is not installed.
    """
    return {"FA2": _torch_fa2, "flash-attn FA2": _package_fa2, "FA3": _fa3}[name]()


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
    return _by_names(_import("flash_attn").flash_attn_varlen_func)


def _fa3() -> VarlenAttention:
    if path := os.environ.get(FA3_LIBRARY):
        torch.ops.load_library(path)
        return _by_names(_bare_fa3(torch.ops._vllm_fa3_C.fwd.default))
    try:
        return _by_names(_import("flash_attn_interface").flash_attn_varlen_func)
    except UnavailableError:
        pass
    try:
        attend = _import("vllm.vllm_flash_attn").flash_attn_varlen_func
    except UnavailableError:
        raise UnavailableError(
            f"neither flash_attn_interface nor vllm is installed, and {FA3_LIBRARY} is not set"
        ) from None
    return _by_names(partial(attend, fa_version=3))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed ({error})") from None


def _by_names(function: Callable[..., Any]) -> VarlenAttention:
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
        return out if isinstance(out, torch.Tensor) else out[0]

    return attend


def _bare_fa3(operator: Any) -> Callable[..., Any]:
    """The operator without vLLM, by the names of its arguments: their number has changed."""
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

    def call(q: torch.Tensor, **others: Any) -> Any:
        values = {"q": q, "softmax_scale": q.shape[-1] ** -0.5, **fixed, **others}
        return operator(*(values.get(name) for name in names))

    return call
