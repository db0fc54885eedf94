"""A warmed-up call does not wait for the GPU. What it costs the host, compare.bench.host times."""

import contextlib

import pytest
import torch

import triton_kernels

pytestmark = pytest.mark.gpu

SEGMENTS, LENGTH, HEADS, HEAD_DIM = 16, 64, 16, 80


@pytest.fixture
def arguments():
    tokens = SEGMENTS * LENGTH
    qkv = torch.randn(tokens, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(tokens, HEAD_DIM // 2, device="cuda")
    cu_seqlens = torch.arange(SEGMENTS + 1, dtype=torch.int32, device="cuda") * LENGTH
    return qkv, angles.cos(), angles.sin(), cu_seqlens


def attend(arguments, **options):
    with torch.inference_mode():
        return triton_kernels.fused_rope_attention_qkvpacked(*arguments, **options)


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# PyTorch says so whenever the mode is first set.
prototype = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")


@prototype
@pytest.mark.parametrize("fuse", ["auto", "qk", "q", "none"])
def test_a_warmed_up_call_does_not_wait(arguments, fuse):
    attend(arguments, max_seqlen=LENGTH, fuse=fuse)
    with waiting_is_an_error():
        attend(arguments, max_seqlen=LENGTH, fuse=fuse)


@prototype
def test_without_max_seqlen_it_has_to_wait(arguments):
    attend(arguments)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        attend(arguments)
