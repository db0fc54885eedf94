"""Towers that are fine-tuned, behind the interface of those that encode: a call is a step.

A step is forward, backward and an update of every parameter by plain gradient descent. Its result
is the gradient of the patch embedding's product, which the whole backward pass ends in.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from compare.implementations import huggingface
from compare.implementations.kernels import require_jax_gpu
from compare.implementations.towers import (
    Directory,
    HuggingFaceTower,
    JaxTower,
    TorchTower,
    TowerImplementation,
)
from compare.workloads.arrays import from_jax, to_torch

_RATE = 1e-9  # so that weights stay what they are, and every step is like the first


def loss_weights(embeddings: tuple[int, ...]) -> np.ndarray:
    """Of the embeddings in the loss, their weighted sum: fp32 of their shape."""
    return np.random.default_rng(0).standard_normal(embeddings, dtype=np.float32)


def training_baseline() -> TowerImplementation:
    """Hugging Face's tower as it is trained today."""
    return _hugging_face("Hugging Face SDPA", "SDPA")


def trained_towers() -> list[TowerImplementation]:
    """The accelerated tower, ours in both frameworks, and Hugging Face's on flash attention."""
    return [
        TowerImplementation("accelerated", _load_accelerated, ours=True),
        TowerImplementation("torch", _load_torch, ours=True),
        TowerImplementation("flax", _load_flax, ours=True),
        _hugging_face("Hugging Face FA2 varlen", "FA2"),
    ]


@contextlib.contextmanager
def exact_training(directory: Directory) -> Iterator[TorchTower]:
    """Hugging Face's tower trained in true fp32, its blocks computed again for want of memory."""
    with huggingface.true_fp32():
        model = huggingface.load(directory, torch.float32)
        # transformers 5.24 has renamed it.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        yield _TrainedHuggingFace(model)


class _TrainedTorch(TorchTower):
    """A tower of ours in PyTorch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.train())
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=_RATE)
        self.weights: torch.Tensor | None = None

    def encode(self, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
        embeddings = self.tensor(self._embeddings(pixel_values, grid_thw))
        if self.weights is None or self.weights.shape != embeddings.shape:
            self.weights = to_torch(loss_weights(embeddings.shape), embeddings.device)
        self.optimizer.zero_grad()
        (embeddings * self.weights).sum().backward()
        self.optimizer.step()
        return self.model.patch_embed.proj.weight.grad.flatten(1)

    def _embeddings(self, pixel_values: Any, grid_thw: Any) -> Any:
        return self.model(pixel_values, grid_thw)


class _TrainedHuggingFace(_TrainedTorch, HuggingFaceTower):
    """Hugging Face's tower, accelerated or not."""

    def _embeddings(self, pixel_values: Any, grid_thw: Any) -> Any:
        return huggingface.call(self.model, pixel_values, grid_thw)


class _TrainedJax(JaxTower):
    """A tower of ours in JAX."""

    def __init__(self, model: Any) -> None:
        import jax

        from flax_models.compiled import COMPILER_OPTIONS

        super().__init__(model)
        self._step = jax.jit(_jax_step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        import jax

        patches, layout = jax.block_until_ready(
            jax.device_put(self.model.prepare(pixel_values, grid_thw))
        )
        config = self.model.config
        return (patches, layout), loss_weights((layout.num_outputs, config.out_hidden_size))

    def encode(self, pixel_values: Any, grid_thw: Any) -> Any:
        self.model, gradient = self._step(self.model, *pixel_values, grid_thw)
        return gradient

    def _tensor(self, array: Any) -> torch.Tensor:
        return from_jax(array)


def _jax_step(tower: Any, patches: Any, layout: Any, weights: Any) -> tuple[Any, Any]:
    import jax

    from flax_models import encode

    def loss(tower: Any) -> Any:
        embeddings = encode(tower, patches, layout)[: len(weights)]  # behind them is padding
        return (embeddings * weights).sum()

    gradient = jax.grad(loss)(tower)
    moved = jax.tree.map(lambda p, g: (p - _RATE * g).astype(p.dtype), tower, gradient)
    return moved, gradient.patch_embed.proj.weight[...]


def _hugging_face(name: str, attention: str) -> TowerImplementation:
    return TowerImplementation(name, partial(_load_hugging_face, attention=attention))


def _load_hugging_face(directory: Directory, attention: str) -> TorchTower:
    return _TrainedHuggingFace(huggingface.load(directory, torch.bfloat16, attention))


def _load_accelerated(directory: Directory) -> TorchTower:
    from triton_kernels.integrations.transformers import accelerate

    return _TrainedHuggingFace(accelerate(huggingface.load(directory, torch.bfloat16)))


def _load_torch(directory: Directory) -> TorchTower:
    from compare.torch_tower import load_vision_tower

    return _TrainedTorch(load_vision_tower(directory, trainable=True))


def _load_flax(directory: Directory) -> JaxTower:
    from flax_models import load_vision_tower

    require_jax_gpu()
    return _TrainedJax(load_vision_tower(directory, trainable=True))
