"""vLLM's vision towers: as vLLM comes, by its own settings, and with this project's plugin.

Each is built by vLLM itself within a whole model whose language part is as small as can be, and is
called as vLLM's workers call it.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare.common.errors import UnavailableError
from compare.implementations import huggingface
from compare.implementations.towers import Directory, TorchTower, TowerImplementation
from compare.workloads.arrays import torch_device
from compare.workloads.towers import VLLM_WORKLOADS
from flax_models import VisionConfig

WITH_OURS = "vLLM with ours"
_KERNELS = ["vllm_c", "native"]
_NORMS = {"ir_op_priority": {"rms_norm": _KERNELS, "fused_add_rms_norm": _KERNELS}}
_COMPILED, _GRAPHS = {"compile_mm_encoder": True}, {"cudagraph_mm_encoder": True}
# By name, what an engine is started with beside the model.
_SETTINGS = {
    "vLLM": {},
    "vLLM, vllm_c norms": _NORMS,
    "vLLM, compiled": {"compilation_config": _COMPILED},
    "vLLM, CUDA graphs": {"compilation_config": _GRAPHS},
    "vLLM, CUDA graphs, vllm_c norms": {"compilation_config": _GRAPHS} | _NORMS,
    "vLLM, compiled, CUDA graphs": {"compilation_config": _COMPILED | _GRAPHS},
    WITH_OURS: {},
    f"{WITH_OURS}, CUDA graphs": {"compilation_config": _GRAPHS},
}
# The others change Qwen2.5-VL's tower alone: only it has RMSNorms, and blocks that vLLM compiles.
_OF_ALL_TOWERS = ({}, {"compilation_config": _GRAPHS})

# Hugging Face's names of whole models, and a language part that takes no time to build.
_MODELS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
_TEXT = {
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 1 << 15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def check_installed() -> None:
    """Refuse what can't be measured here.

    Raises:
        UnavailableError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError(
            "vllm is not installed: install this package, with its extra compare, where vLLM is"
        )


def vllm_towers() -> list[TowerImplementation]:
    """vLLM's tower as it comes, by its own settings where they change it, and with the plugin."""
    of_qwen2_5 = frozenset(
        name for name, w in VLLM_WORKLOADS.items() if w.config.model_type == "qwen2_5_vl"
    )
    return [
        TowerImplementation(
            name,
            functools.partial(_load, ours, settings),
            ours,
            None if settings in _OF_ALL_TOWERS else of_qwen2_5,
        )
        for name, settings in _SETTINGS.items()
        for ours in [name.startswith(WITH_OURS)]
    ]


class VllmTower(TorchTower):
    """A tower within vLLM's model; its inputs are where a worker has them."""

    def __init__(self, model: Any, config: Any) -> None:
        """`config` is vLLM's, of which the model is made."""
        super().__init__(model)
        self._config = config
        self._grid: list[list[int]] = []
        self._graphs: Any = None
        weakref.finalize(self, _forget, model)

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        """Bring the inputs there; grids stay on the host."""
        return torch.tensor(pixel_values, device=torch_device()), torch.tensor(grid_thw)

    def encode(self, pixel_values: Any, grid_thw: Any) -> Any:
        """A tensor for each image, DeepStack's features in further columns."""
        call = {"pixel_values": pixel_values, "image_grid_thw": grid_thw}
        with torch.inference_mode():
            if not self._config.compilation_config.cudagraph_mm_encoder:
                return self.model.embed_multimodal(**call)
            if self._grid != (grid := grid_thw.tolist()):
                self._grid, self._graphs = grid, _recorded(self._config, self.model, grid)
            result = self._graphs.execute(call)
        if self._graphs.graph_misses:
            raise RuntimeError("vLLM did not replay its CUDA graph of this size")
        return result

    def tensor(self, result: Any) -> torch.Tensor:
        """A call's result on torch_device()."""
        return torch.cat(list(result))


def _forget(model: Any) -> None:
    """Undo what keeps Qwen2.5-VL's tower alive, whose memory would count for the next ones."""
    # In vLLM 0.26 its class has a cache of its calls.
    cached = getattr(type(model.visual), "get_rope_by_thw", None)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()
    for module in model.modules():  # compiled ones are hooked to PyTorch's compiler
        if hasattr(module, "cleanup"):
            module.cleanup()


def _load(with_ours: bool, settings: Mapping[str, Any], directory: Directory) -> VllmTower:
    check_installed()
    config = VisionConfig.from_pretrained(directory)
    folder = _whole_model(Path(directory), config)
    with _plugin(with_ours):
        vllm_config, model = _build(folder, settings)
    if with_ours and not any(getattr(m, "is_fused", False) for m in model.modules()):
        raise UnavailableError("the plugin left this tower's attention to vLLM, as its log says")
    return VllmTower(model, vllm_config)


def _whole_model(directory: Path, config: VisionConfig) -> Path:
    """A checkpoint of a whole model around the tower in a directory, written once."""
    folder = directory / "whole"
    if folder.exists():
        return folder
    import transformers

    name, head_dim = _MODELS[config.model_type], _TEXT["head_dim"]
    tower = huggingface.load(directory, torch.bfloat16).cpu()
    whole = getattr(transformers, f"{name}Config")(
        text_config=_TEXT
        | {
            "architectures": [f"{name[:5]}ForCausalLM"],
            "hidden_size": config.out_hidden_size,
            "num_attention_heads": config.out_hidden_size // head_dim,
        },
        vision_config=tower.config.to_dict(),
        tie_word_embeddings=False,
        **{name: index for index, name in enumerate(_IDS, 1)},
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(whole)
    model.model.visual = tower
    model.model.language_model.to_empty(device="cpu")
    model.lm_head.to_empty(device="cpu")
    for parameter in [*model.model.language_model.parameters(), *model.lm_head.parameters()]:
        parameter.data.zero_()
    model.to(torch.bfloat16).save_pretrained(folder)
    sizes = {"patch_size": config.patch_size, "merge_size": config.spatial_merge_size}
    transformers.Qwen2VLImageProcessor(**sizes).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def _plugin(with_ours: bool) -> Iterator[None]:
    """What is built within has the plugin or not, whether vLLM finds it by itself or not."""
    from triton_kernels.integrations import vllm as plugin

    before = os.environ.get(plugin.VARIABLE)
    if not with_ours:
        os.environ[plugin.VARIABLE] = "0"
    plugin.unregister()
    plugin.register()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(plugin.VARIABLE, None)
        else:
            os.environ[plugin.VARIABLE] = before


def _build(folder: Path, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """vLLM's configuration and its model, as a worker has them."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 1 << 14,
        **settings,
    }
    # From 0.28 on the tower may be given bytes, and normalise them.
    if "mm_device_do_normalize" in {f.name for f in dataclasses.fields(EngineArgs)}:
        arguments["mm_device_do_normalize"] = False
    config = EngineArgs(**arguments).create_engine_config()
    config.kernel_config.ir_op_priority.set_default()  # as a worker begins
    _start_process(config)
    with set_current_vllm_config(config):
        return config, get_model(vllm_config=config)


@functools.cache
def _start_distributed() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    backend = current_platform.dist_backend
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend)
    initialize_model_parallel(1, 1)


def _start_process(config: Any) -> None:
    """vLLM's distributed state, of this process alone."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        _start_distributed()


def _recorded(config: Any, model: Any, grid: list[list[int]]) -> Any:
    """vLLM's manager of an encoder's CUDA graphs, with the one that fits a call."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    merge = model.visual.spatial_merge_size
    settings = config.compilation_config
    settings.encoder_cudagraph_token_budgets = [sum(t * h * w for t, h, w in grid) // merge**2]
    settings.encoder_cudagraph_max_vision_items_per_batch = len(grid)
    settings.encoder_cudagraph_max_frames_per_batch = sum(t for t, _, _ in grid)
    model.get_max_frames_per_video = lambda: 1  # would ask a processor, and is not used then
    with set_current_vllm_config(config):
        manager = EncoderCudaGraphManager(config, torch_device(), torch.bfloat16, model)
        manager.capture(graph_pool=torch.cuda.graph_pool_handle())
    return manager
