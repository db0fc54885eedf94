"""Where a library is missing, there is nothing of its integration to test."""

import importlib.util
from types import SimpleNamespace

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "transformers")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """In fp32 on a GPU too, where cuDNN's in tf32 make a last bit's difference one of 1e-3."""
    from torch.backends import cudnn

    monkeypatch.setattr(cudnn, "allow_tf32", False)


@pytest.fixture
def mesh():
    """A mesh of one process on the CPU, for what is sharded."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def aligned(monkeypatch):
    """Misaligned products are avoided on a CPU too, and in fp32; returns which way calls went.

    Triton's interpreter runs the kernel then, in fp32 as well.
    """
    import torch

    from triton_kernels.integrations import mlp

    ways = set()

    def noted(way, function):
        return lambda *arguments: ways.add(way) or function(*arguments)

    monkeypatch.setattr(mlp, "is_misaligned", noted("asked", lambda *_: True))
    monkeypatch.setattr(mlp, "_aligned_operands", noted("operands", mlp._aligned_operands))
    monkeypatch.setattr(mlp, "launch_kernel", noted("kernel", mlp.launch_kernel))
    recorded = noted("recorded", mlp.RecordedMLP.apply)
    monkeypatch.setattr(mlp, "RecordedMLP", SimpleNamespace(apply=recorded))
    if not torch.cuda.is_available():
        monkeypatch.setattr(mlp, "runs_kernel", lambda _: True)
    return ways
