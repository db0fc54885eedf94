"""What the Flax tower asks of devices: where it lives, what fits, whether it is there yet."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec


def free_memory(weight: nnx.Param) -> int | None:
    """Bytes that are free on a parameter's device; None where JAX does not know them."""
    value = weight.get_raw_value()
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
        return None
    statistics = next(iter(value.devices())).memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return None if limit is None else limit - statistics["bytes_in_use"]


def home_device(weight: nnx.Param) -> jax.Device | NamedSharding | None:
    """What a parameter is committed to: one device, or all of a mesh, where it is the same.

    None where it may be used on any, or is divided.
    """
    value = weight.get_raw_value()
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
        return None
    if not value.committed or len(value.devices()) == 1:
        return value.device if value.committed else None
    mesh = getattr(value.sharding, "mesh", None)
    return NamedSharding(mesh, PartitionSpec()) if mesh and value.is_fully_replicated else None


def upload(arrays: Any, device: Any) -> Any:
    """`jax.device_put` a pytree of arrays, and wait until they are there.

    device: a device, a sharding, a pytree of them, or None, the default device.
    """
    return arrived(jax.device_put(arrays, device))


def arrived(arrays: Any) -> Any:
    """Wait until a pytree of arrays is where it will be read.

    JAX 0.11.2 lets programs on a GPU start before what they read has been uploaded: with eight
    threads that upload, about one in a thousand, none where uploads are waited for
    (compare/results/notes/faults.md). What was found on AMD's GPUs would explain it:
    https://github.com/ROCm/xla/pull/964.
    """
    concrete = [x for x in jax.tree.leaves(arrays) if not isinstance(x, jax.core.Tracer)]
    jax.block_until_ready(concrete)
    return arrays


def find_device(device: jax.Device | str | None) -> jax.Device | None:
    """A device, or the first of a platform's name; None stays None, JAX's default.

    Raises:
        ValueError: JAX finds no such platform, or no device at all.
    """
    if device is not None and not isinstance(device, str):
        return device
    present = ", ".join(sorted({found.platform for found in _devices()}))
    try:
        return None if device is None else jax.devices(device)[0]
    except RuntimeError:
        raise ValueError(f"device {device!r} was asked for, but JAX finds only {present}") from None


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is not installed
        raise ValueError(
            f"JAX finds no device where JAX_PLATFORMS is {jax.config.jax_platforms!r}: "
            f"{str(error) or 'it is not installed'}"
        ) from None
