"""The real vLLM on a CPU, in an environment of its own: make test-vllm.

Elsewhere there is nothing to test: nothing here is collected where vLLM is not installed.
"""

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {
        "FUSED_ROPE_VLLM": "0",  # vLLM registers it by itself, and tests when they want it
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        # For its processes too.
        "PYTHONPATH": str(Path(__file__).parent / "site"),
    }


@pytest.fixture(scope="session")
def process():
    """vLLM's distributed state, of one process."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs has it
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
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
