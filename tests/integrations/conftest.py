"""Where a library is missing, there is nothing of its integration to test."""

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "transformers")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def mesh():
    """A mesh of one process on the CPU, for what is sharded."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()
