"""Peers for heads of any width in PyTorch: a compiled embedding in front of a batched attention.

Segments have one length, so that a call is a batch. What a backend does not take it says itself
when it is called; what would not be itself any more (it hands the call to SDPA, silently) or takes
minutes to compile says so here.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from compare.common.errors import UnavailableError
from compare.implementations.kernels import KernelCall, KernelImplementation
from compare.implementations.peers_torch import Rotation, rotated
from compare.workloads.kernels import Embedding, KernelWorkload

# (q, k, v), each [segments, heads, length, head_dim] -> the same
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SDPA = "SDPA"  # by the backend that PyTorch chooses
# Bytes of a row of K. FlexAttention's tiles hold whole heads: twice as many, in 64 rows of Q and 32
# of K and V, are beyond the shared memory of a Hopper GPU.
_FLEX_WIDEST = 1024
_FFPA_WIDTHS = range(320, 1025)
_CUTE_WIDTH = 512


def sdpa_peers(embedding: Embedding) -> list[KernelImplementation]:
    """Every attention behind the compiled embedding; with SDPA and FlexAttention all is compiled.

    FlexAttention has to be compiled, and PyTorch's choice of a backend can be; the others are
    called as they are.
    """
    backends = {
        "mem-efficient SDPA": SDPBackend.EFFICIENT_ATTENTION,
        "cuDNN SDPA": SDPBackend.CUDNN_ATTENTION,
        "math SDPA": SDPBackend.MATH,
    }
    prepared = {
        SDPA: partial(_compiled, lambda _: scaled_dot_product_attention),
        "FlexAttention": partial(_compiled, _flex),
        **{name: partial(_behind, partial(_backend, which)) for name, which in backends.items()},
        "ffpa-attn": partial(_behind, _ffpa),
        "ffpa-attn CuTeDSL": partial(_behind, partial(_ffpa, backend="cutedsl")),
    }
    return [
        KernelImplementation(f"torch.compile {embedding} + {name}", "torch", prepare)
        for name, prepare in prepared.items()
    ]


def _compiled(
    attention: Callable[[KernelWorkload], Attention], workload: KernelWorkload
) -> KernelCall:
    """The embedding and the attention as one compiled function."""
    return _fresh(_call(workload, _EMBEDDINGS[workload.embedding], attention(workload)))


def _behind(
    attention: Callable[[KernelWorkload], Attention], workload: KernelWorkload
) -> KernelCall:
    """The attention behind the compiled embedding."""
    attend = attention(workload)
    return _call(workload, _compiled_embedding(workload), attend)


@functools.lru_cache(maxsize=1)
def _compiled_embedding(workload: KernelWorkload) -> Rotation:
    """One for all attentions that are called behind it on a workload."""
    return _fresh(_EMBEDDINGS[workload.embedding])


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    # Past a few shapes of one function torch.compile gives up on it: forget the ones before.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def _call(workload: KernelWorkload, embed: Rotation, attend: Attention) -> KernelCall:
    lengths = set(workload.lengths.tolist())
    if len(lengths) > 1:
        raise UnavailableError("needs segments of one length")
    length = lengths.pop()

    def call(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        del cu_seqlens  # the layout is static here
        q, k = embed(qkv, cos, sin)
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, qkv[:, 2]))
        return attend(q, k, v).transpose(1, 2).flatten(0, 1)

    return call


def _added(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K with the sinusoidal embedding."""
    added = torch.stack([sin, cos], dim=-1).flatten(-2)[:, None, None]
    q, k = (qkv[:, :2].float() + added).to(qkv.dtype).unbind(1)
    return q, k


_EMBEDDINGS = {"rope": rotated, "sinusoidal": _added}


def _backend(backend: SDPBackend, workload: KernelWorkload) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attend


def _flex(workload: KernelWorkload) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    widest = _FLEX_WIDEST // getattr(torch, workload.dtype).itemsize
    if workload.head_dim > widest:
        raise UnavailableError(f"not tried above {widest:,} columns: its tiles hold whole heads")
    return flex_attention


def _ffpa(workload: KernelWorkload, backend: str | None = None) -> Attention:
    if backend and workload.head_dim != _CUTE_WIDTH:
        raise UnavailableError(f"hands heads of other than {_CUTE_WIDTH} columns to SDPA")
    if workload.head_dim not in _FFPA_WIDTHS:
        raise UnavailableError("hands heads below 320 or above 1,024 columns to SDPA")
    if workload.dtype == "float32":
        raise UnavailableError("takes bf16 and fp16")
    from ffpa_attn import ffpa_attn_func

    return partial(ffpa_attn_func, forward_backend=backend) if backend else ffpa_attn_func
