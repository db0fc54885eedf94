"""Carrying arrays between NumPy, PyTorch and JAX with their bits unchanged."""

from typing import Any

import numpy as np
import torch

from compare.common.environment import has_gpu
from compare.torch_tower.device import as_tensor
from compare.workloads.kernels import DTYPES, KernelInputs, KernelWorkload

# qkv, cos, sin, cu_seqlens of one framework: what every kernel implementation is called with. The
# result's gradient is behind them where that in qkv is asked for.
KernelArguments = tuple[Any, ...]


def torch_device() -> torch.device:
    """The device that PyTorch's side of the comparison runs on."""
    return torch.device("cuda" if has_gpu() and torch.cuda.is_available() else "cpu")


def to_torch(array: np.ndarray, device: torch.device | str | None = None) -> torch.Tensor:
    """A copy of a NumPy array, bfloat16 included, on a device (default: torch_device())."""
    device = torch_device() if device is None else device
    return as_tensor(array).to(device, copy=True)


def from_jax(array: Any) -> torch.Tensor:
    """A JAX array as a tensor on torch_device()."""
    return to_torch(np.asarray(array))


def poison(arguments: KernelArguments, results: int = 1) -> None:
    """Leave NaN in freed memory of the size of results, which is where the next ones will lie.

    An implementation that leaves a part of its result unwritten then gives NaN, not what happens to
    be right because an earlier call wrote it.
    """
    qkv, _, _, _, *grad = arguments
    like = qkv if grad else qkv[:, 0]
    filled = [like * float("nan") for _ in range(results)]
    for array in filled:
        array.ravel()[-1].item()  # waits
    del filled


def torch_arguments(inputs: KernelInputs) -> KernelArguments:
    """A workload's inputs as tensors on torch_device()."""
    return tuple(map(to_torch, _arguments(inputs)))


def jax_arguments(inputs: KernelInputs) -> KernelArguments:
    """A workload's inputs as JAX arrays on the default device."""
    import jax.numpy as jnp

    return tuple(map(jnp.array, _arguments(inputs)))


def _arguments(inputs: KernelInputs) -> list[np.ndarray]:
    arguments = [inputs.qkv, inputs.cos, inputs.sin, inputs.cu_seqlens]
    return arguments if inputs.grad is None else [*arguments, inputs.grad]


def arguments_of(inputs: KernelInputs, framework: str) -> KernelArguments:
    """A workload's inputs in the arrays of "torch" or "jax"."""
    return jax_arguments(inputs) if framework == "jax" else torch_arguments(inputs)


def blank_arguments(workload: KernelWorkload, framework: str) -> KernelArguments:
    """Arguments of a workload's shapes and segments, but zero: cheap, for compiling."""
    tokens = workload.tokens
    qkv = np.zeros((tokens, 3, workload.heads, workload.head_dim), DTYPES[workload.dtype])
    angles = np.zeros((tokens, workload.rotated_dims // 2), np.float32)
    grad = qkv[:, 0] if workload.gradients else None
    blank = KernelInputs(qkv, angles, angles, workload.cu_seqlens, workload.longest, grad)
    return arguments_of(blank, framework)
