"""Towers that are fine-tuned, behind the interface of those that encode: a call is a step.

A step is forward, backward and an update of every parameter by plain gradient descent. Its result
is the gradient of the patch embedding's product, which the whole backward pass ends in. The loss is
the squared distance of the embeddings from random ones: a row's sum, the mean of all rows.

Where losses are compared, many steps move weights that are kept in fp32, of which the tower has the
rounded ones: steps in bf16 alone are mostly lost in rounding, and a gradient twice as large as it
should be would follow fp32's losses better than the right one.
"""

import contextlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from compare.implementations import huggingface
from compare.implementations.kernels import program_memory_mib, require_jax_gpu
from compare.implementations.towers import (
    Directory,
    HuggingFaceTower,
    JaxTower,
    TorchTower,
    TowerImplementation,
)
from compare.workloads.arrays import from_jax, to_torch

_RATE = 1e-9  # so that weights stay what they are, and every step is like the first
LEARNING_RATE = 3e-5  # where losses are to fall: smoothly, as errors would grow in unsteady ones


def target(embeddings: tuple[int, ...]) -> np.ndarray:
    """What a tower is fine-tuned to return: fp32 of the embeddings' shape."""
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
        self.target: torch.Tensor | None = None

    def encode(self, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
        self._gradients(pixel_values, grid_thw)
        self.optimizer.step()
        return self.model.patch_embed.proj.weight.grad.flatten(1)

    def losses(self, pixel_values: Any, grid_thw: Any, steps: int) -> torch.Tensor:
        """Fine-tune; -> the loss before each step, fp32 [steps]."""
        kept = [parameter.detach().float() for parameter in self.parameters]
        found = []
        for _ in range(steps):
            found.append(self._gradients(pixel_values, grid_thw))
            with torch.no_grad():
                for parameter, weight in zip(self.parameters, kept, strict=True):
                    parameter.copy_(weight.add_(parameter.grad, alpha=-LEARNING_RATE))
        return torch.stack(found)

    def _gradients(self, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
        """Leave the loss' gradients in the parameters; -> the loss."""
        embeddings = self.tensor(self._embeddings(pixel_values, grid_thw))
        if self.target is None or self.target.shape != embeddings.shape:
            self.target = to_torch(target(embeddings.shape), embeddings.device)
        self.optimizer.zero_grad()
        loss = (embeddings - self.target).square().sum(1).mean()
        loss.backward()
        return loss.detach()

    def _embeddings(self, pixel_values: Any, grid_thw: Any) -> Any:
        return self.model(pixel_values, grid_thw)


class _TrainedHuggingFace(_TrainedTorch, HuggingFaceTower):
    """Hugging Face's tower, accelerated or not."""

    def _embeddings(self, pixel_values: Any, grid_thw: Any) -> Any:
        return huggingface.call(self.model, pixel_values, grid_thw)


class _TrainedJax(JaxTower):
    """A tower of ours in JAX."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._arguments: tuple[Any, ...] = ()  # of the last step, but for the tower

    def put(self, pixel_values: np.ndarray, grid_thw: np.ndarray) -> tuple[Any, Any]:
        import jax

        patches, layout = self.model.prepare(pixel_values, grid_thw)
        wanted = target((layout.num_outputs, self.model.config.out_hidden_size))
        return jax.block_until_ready(jax.device_put(((patches, layout), wanted)))

    def encode(self, pixel_values: Any, grid_thw: Any) -> Any:
        return self._step(pixel_values, grid_thw, _RATE)[1]

    def losses(self, pixel_values: Any, grid_thw: Any, steps: int) -> torch.Tensor:
        """Fine-tune; -> the loss before each step, fp32 [steps]."""
        import jax
        import jax.numpy as jnp

        self.model = jax.tree.map(lambda weight: weight.astype(jnp.float32), self.model)
        found = [self._step(pixel_values, grid_thw, LEARNING_RATE)[0] for _ in range(steps)]
        return torch.stack([self._tensor(loss) for loss in found])

    def peak_memory_mib(self) -> float:
        """What the last step's program takes, weights included: each has its own, as in PyTorch."""
        return sum(program_memory_mib(_jitted_step(), self.model, *self._arguments))

    def _step(self, pixel_values: Any, wanted: Any, rate: float) -> tuple[Any, Any]:
        self._arguments = *pixel_values, wanted, np.float32(rate)
        self.model, *found = _jitted_step()(self.model, *self._arguments)
        return tuple(found)

    def _tensor(self, array: Any) -> torch.Tensor:
        return from_jax(array)


@cache
def _jitted_step() -> Any:
    import jax

    from flax_models.compiled import COMPILER_OPTIONS

    return jax.jit(_jax_step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)


def _jax_step(
    tower: Any, patches: Any, layout: Any, wanted: Any, rate: Any
) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from flax_models import encode

    def loss(weights: Any) -> Any:
        tower = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)
        embeddings = encode(tower, patches, layout)[: len(wanted)]  # behind them is padding
        return jnp.square(embeddings - wanted).sum(1).mean()

    value, gradient = jax.value_and_grad(loss)(tower)
    moved = jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), tower, gradient)
    return moved, value, gradient.patch_embed.proj.weight[...]


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
