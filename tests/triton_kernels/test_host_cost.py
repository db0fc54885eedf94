"""What a warmed-up call costs the host: some microseconds, and no waiting for the GPU."""

import contextlib
import time

import pytest
import torch

import triton_kernels

pytestmark = pytest.mark.gpu

# As often as PyTorch launches a kernel of its own, of which each takes 6 microseconds on a machine
# where this one may take 30: both are slower on slower machines, and where other tests run.
MAX_LAUNCHES = 5
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


def host_us(call):
    """Microseconds of Python and launch for a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):  # too few to fill the launch queue
        call()
    return (time.perf_counter() - start) * 1e6 / 20


def test_python_and_launch(arguments):
    """The best of many, taken in turns."""
    x = torch.zeros(8, device="cuda")
    ours, theirs = [], []
    for _ in range(50):
        ours.append(host_us(lambda: attend(arguments, max_seqlen=LENGTH)))
        theirs.append(host_us(lambda: x.add_(1)))
    assert min(ours) <= MAX_LAUNCHES * min(theirs)
