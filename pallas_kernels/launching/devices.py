"""The GPUs of this machine, as JAX knows them."""

import functools

import jax


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
