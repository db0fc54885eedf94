"""What goes into the compiled function of a tower: patches that fill a bucket, and their layout."""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from flax_models.common.config import VisionConfig
from flax_models.common.layout import Layout, check_patches
from flax_models.device import arrived, upload

# The bounds choose a kernel, the output a program, and so are static; whatever else varies with the
# images is data.
jax.tree_util.register_dataclass(
    Layout,
    data_fields=(
        *("window_order", "output_order", "positions", "frame_sizes"),
        *("cu_window_seqlens", "cu_frame_seqlens", "cu_image_seqlens"),
        *("num_tokens", "num_merged", "num_outputs"),
    ),
    meta_fields=("max_window_seqlen", "max_frame_seqlen", "output"),
)


def checked_patches(
    config: VisionConfig, pixel_values: ArrayLike, num_tokens: int
) -> np.ndarray | jax.Array:
    """Patches as an array, on the host if that is where they are; errors as of `pad_patches`."""
    if not isinstance(pixel_values, jax.Array):
        pixel_values = np.asarray(pixel_values)
    check_patches(config, num_tokens, pixel_values.shape)
    if not jnp.issubdtype(pixel_values.dtype, jnp.floating):
        raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
    return pixel_values


def pad_patches(
    config: VisionConfig, pixel_values: ArrayLike, layout: Layout
) -> np.ndarray | jax.Array:
    """Check patches against their layout and pad them, on the host if that is where they are.

    Those that are on their way to a device, or still computed there, are waited for.

    Returns:
        [padded tokens, patch_dim], in the dtype of pixel_values.

    Raises:
        ValueError: `pixel_values` do not match the layout.
        TypeError: they are not floating-point.
    """
    pixel_values = arrived(checked_patches(config, pixel_values, layout.num_tokens))
    padding = len(layout.window_order) - len(pixel_values)
    if padding == 0:
        return pixel_values
    if isinstance(pixel_values, jax.Array):
        return _pad_on_device(pixel_values, padding)
    return np.pad(pixel_values, ((0, padding), (0, 0)))


@functools.partial(jax.jit, static_argnums=1)
def _pad_on_device(array: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(array, ((0, padding), (0, 0)))


_on_devices: weakref.WeakKeyDictionary[Layout, dict[jax.Device | NamedSharding | None, Layout]]
_on_devices = weakref.WeakKeyDictionary()


def on_device(
    patches: np.ndarray | jax.Array, layout: Layout, device: jax.Device | NamedSharding | None
) -> tuple[jax.Array, Layout]:
    """Padded patches and their layout with all arrays on a device, uploads waited for.

    Or on several, the same. None: the default device, uncommitted. Patches that are on a device
    stay there.
    """
    if isinstance(patches, np.ndarray):
        devices = device.device_set if isinstance(device, NamedSharding) else {device}
        platforms = {x.platform if x else jax.default_backend() for x in devices}
        # A copy, as JAX on a CPU would share the caller's memory and read it after the call.
        patches = upload(patches.copy() if "cpu" in platforms else patches, device)
    return patches, _layout_on_device(layout, device)


def _layout_on_device(layout: Layout, device: jax.Device | NamedSharding | None) -> Layout:
    """Uploaded once, and kept for as long as the layout is.

    `plan_layout` keeps one object per grid, but no large ones.
    """
    copies = _on_devices.setdefault(layout, {})
    if device not in copies:
        with jax.ensure_compile_time_eval():  # under a caller's trace: a tracer must not stay here
            copies[device] = upload(layout, device)
    return copies[device]
