"""The GPUs of this machine, as JAX knows them."""

import functools
import warnings

import jax

from pallas_kernels.kernels.dialect import without_triton


@functools.cache
def local_gpus() -> tuple[jax.Device, ...]:
    """The CUDA GPUs here. Where there is none, one may still be lowered for."""
    try:
        return tuple(jax.local_devices(backend="cuda"))  # "gpu" may be another vendor's
    except RuntimeError:
        return ()


def local_gpu() -> jax.Device | None:
    """The first CUDA GPU here, None where there is none."""
    return next(iter(local_gpus()), None)


def have_tensor_cores() -> bool:
    """Whether all GPUs here have them for bf16, which came with compute capability 8.0."""
    return all(float(gpu.compute_capability) >= 8.0 for gpu in local_gpus())


@functools.cache  # once a process
def warn_without_triton() -> None:
    """Say that this machine's GPU is not used as it could be; nothing where there is none."""
    if local_gpu() is not None:
        warnings.warn(
            f"{without_triton()}: XLA attends within windows and shorter images, several times "
            "slower, and activates MLPs",
            stacklevel=2,
        )
