"""The real vLLM: on a CPU in an environment of its own, by make test-vllm, or where it has a GPU.

Elsewhere there is nothing to test: nothing here is collected where vLLM is not installed.
"""

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    os.environ |= {
        "FUSED_ROPE_VLLM": "0",  # vLLM registers it by itself, and tests when they want it
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # What has a GPU may have no network.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        # For its processes too.
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


def pytest_runtest_setup(item):
    """Skip what needs more GPUs than vLLM would see. tests/conftest.py, which does so elsewhere, is
    left out here: it needs packages that vLLM's environment has not.
    """
    marks = item.iter_markers("gpu")
    needed = max((mark.args[0] if mark.args else 1 for mark in marks), default=0)
    found = torch.cuda.device_count()
    if needed > found:
        gpus = "a CUDA GPU" if needed == 1 else f"{needed} CUDA GPUs"
        pytest.skip(f"needs {gpus}, and PyTorch sees {found or 'none'}")


@pytest.fixture(scope="session")
def process():
    """vLLM's distributed state, of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs has it
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, current_platform.dist_backend)
        initialize_model_parallel(1, 1)


@pytest.fixture
def lines(monkeypatch):
    """What the plugin says, which is asked for by its parts' names; undone at the end."""
    import logging

    from triton_kernels.integrations import vllm as plugin

    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    plugin._logger.addHandler(handler)
    monkeypatch.setenv(plugin.VARIABLE, "attention,norm,mlp")
    plugin._say.cache_clear()
    yield said
    plugin._logger.removeHandler(handler)
    plugin.unregister()
