"""Every tower under comparison behind one interface: ours in both frameworks, Hugging Face's."""

import contextlib
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from compare.common.errors import UnavailableError
from compare.implementations import huggingface
from compare.implementations.kernels import require_jax_gpu
from compare.workloads.arrays import from_jax, to_torch, torch_device

Directory = str | os.PathLike[str]
_MIB = 1 << 20


class Tower(ABC):
    """A loaded tower. Patches are fp32 [tokens, patch_dim], grids [images, 3] integers."""

    framework: str

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        """Bring a call's inputs to where a user of the tower holds them: patches on the GPU."""

    def encode(self, pixel_values: Any, grid_thw: Any) -> Any:
        """One call: embeddings [tokens / 4, out_hidden_size] in the framework's array.

        With DeepStack (embeddings, features), features a tuple of such arrays.
        """
        return self.model(pixel_values, grid_thw)

    @abstractmethod
    def wait(self, result: Any) -> None:
        """Wait until a call's result is there."""

    def tensor(self, result: Any) -> torch.Tensor:
        """A call's result on torch_device(); DeepStack's features in columns beside the rest."""
        embeddings, features = result if isinstance(result, tuple) else (result, ())
        return torch.cat([self._tensor(rows) for rows in (embeddings, *features)], dim=1)

    def _tensor(self, array: Any) -> torch.Tensor:
        """An array of the framework as a tensor on torch_device()."""
        return array

    def hidden_states(self, pixel_values: Any, grid_thw: Any) -> Iterator[Any]:
        """The state after each block, [tokens, hidden_size], in window order."""
        return self.model.hidden_states(pixel_values, grid_thw)

    def states(self, pixel_values: Any, grid_thw: Any) -> Iterator[torch.Tensor]:
        """The state after each block, then the embeddings of a call, all as tensors."""
        for hidden in self.hidden_states(pixel_values, grid_thw):
            yield self._tensor(hidden)
        yield self.tensor(self.encode(pixel_values, grid_thw))

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start to watch the device's memory anew, where the framework can."""

    @abstractmethod
    def peak_memory_mib(self) -> float | None:
        """Most device memory in use since then; None where it is not known."""


class TorchTower(Tower):
    """A tower of ours in PyTorch."""

    framework = "torch"

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        return to_torch(pixel_values), grid_thw

    def wait(self, result: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def reset_peak_memory(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def peak_memory_mib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / _MIB if torch.cuda.is_available() else None


class HuggingFaceTower(TorchTower):
    """Hugging Face's tower as `huggingface.load` returns it, with its inputs on the GPU."""

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        device = torch_device()
        return torch.tensor(pixel_values, device=device), torch.tensor(grid_thw, device=device)

    def encode(self, pixel_values: Any, grid_thw: Any) -> Any:
        return huggingface.encode(self.model, pixel_values, grid_thw)

    def hidden_states(self, pixel_values: Any, grid_thw: Any) -> Iterator[torch.Tensor]:
        return iter(huggingface.hidden_states(self.model, pixel_values, grid_thw))


class JaxTower(Tower):
    """A tower of ours in JAX."""

    framework = "jax"
    _peak_before = 0

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        import jax

        return jax.device_put(pixel_values), grid_thw

    def wait(self, result: Any) -> None:
        import jax

        jax.block_until_ready(result)

    def _tensor(self, array: Any) -> torch.Tensor:
        return from_jax(array)

    def reset_peak_memory(self) -> None:
        """JAX's peak is that of the process: measure from the smallest workload to the largest."""
        self._peak_before = _jax_peak() or 0

    def peak_memory_mib(self) -> float | None:
        peak = _jax_peak()
        # A peak that did not grow was another call's, perhaps another tower's.
        return peak / _MIB if peak is not None and peak > self._peak_before else None


def _jax_peak() -> int | None:
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@dataclass(frozen=True)
class TowerImplementation:
    """A named tower.

    Attributes:
        name: as in tables and result files.
        load: reads the checkpoint in bf16; raises UnavailableError or ImportError with the reason
            where it cannot run here.
        ours: held to the tower rule; the others are there to be timed.
        workloads: names of those that it is timed on; None: all.
    """

    name: str
    load: Callable[[Directory], Tower]
    ours: bool = False
    workloads: frozenset[str] | None = None


def our_towers() -> list[TowerImplementation]:
    """Our PyTorch and our Flax tower."""
    return [
        TowerImplementation("torch", _load_torch, ours=True),
        TowerImplementation("flax", _load_flax, ours=True),
    ]


def library_frame_towers() -> list[TowerImplementation]:
    """Our towers with a library's attention over whole frames, where frames weigh most."""
    workloads = frozenset({"tower-1344", "tower-video-16x448"})
    loads = {
        "torch, FA3 frames": partial(_load_torch, frame_attention="fa3"),
        "torch, cuDNN frames": partial(_load_torch, frame_attention="cudnn"),
        "flax, cuDNN frames": partial(_load_flax, frame_attention="cudnn"),
    }
    return [
        TowerImplementation(name, partial(_if_available, load), ours=True, workloads=workloads)
        for name, load in loads.items()
    ]


def hugging_face_sdpa() -> TowerImplementation:
    """The tower that users have today, whose error the tower rule allows ours."""
    return _hugging_face("Hugging Face SDPA", "SDPA")


def peer_towers() -> list[TowerImplementation]:
    """Hugging Face's tower with the attention that its users can install."""
    return [
        _hugging_face("Hugging Face FA2 varlen", "FA2"),
        _hugging_face("Hugging Face FA3 varlen", "FA3"),
    ]


def accelerated_towers() -> list[TowerImplementation]:
    """Hugging Face's tower after `accelerate(model)` alone, and with each block compiled too."""
    return [
        TowerImplementation("accelerated", _load_accelerated, ours=True),
        TowerImplementation("accelerated, compiled", _load_compiled, ours=True),
    ]


@contextlib.contextmanager
def exact_tower(directory: Directory) -> Iterator[HuggingFaceTower]:
    """Hugging Face's tower in true fp32, which every tower's error is measured against."""
    with huggingface.true_fp32():
        yield HuggingFaceTower(huggingface.load(directory, torch.float32))


def free_memory() -> None:
    """Hand back what towers that nobody holds any more have taken.

    A recording that somebody still holds must not be replayed: the workspaces of its products were
    taken before it was recorded, outside its own memory, and are handed back too.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()  # past a few variants of one function it would compile no more
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that has multiplied
        torch.cuda.empty_cache()


def _hugging_face(name: str, attention: str) -> TowerImplementation:
    return TowerImplementation(
        name,
        lambda directory: HuggingFaceTower(huggingface.load(directory, torch.bfloat16, attention)),
    )


def _load_torch(directory: Directory, frame_attention: str = "fused") -> Tower:
    from compare.torch_tower import load_vision_tower

    return TorchTower(load_vision_tower(directory, frame_attention=frame_attention))


def _load_flax(directory: Directory, frame_attention: str = "fused") -> Tower:
    from flax_models import load_vision_tower

    require_jax_gpu()
    return JaxTower(load_vision_tower(directory, frame_attention=frame_attention))


def _if_available(load: Callable[[Directory], Tower], directory: Directory) -> Tower:
    """A tower whose library may be missing here, which it says by a ValueError."""
    try:
        return load(directory)
    except ValueError as error:
        raise UnavailableError(str(error)) from None


def _load_accelerated(directory: Directory) -> HuggingFaceTower:
    from triton_kernels.integrations.transformers import accelerate

    return HuggingFaceTower(accelerate(huggingface.load(directory, torch.bfloat16)))


def _load_compiled(directory: Directory) -> HuggingFaceTower:
    tower = _load_accelerated(directory)
    for block in tower.model.blocks:
        block.compile(dynamic=True)
    return tower
