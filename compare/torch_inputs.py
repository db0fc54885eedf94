"""What goes into the pass of a PyTorch tower: patches, and their layout on the device."""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from compare.torch_device import as_tensor
from flax_models import Layout, VisionConfig
from flax_models.layout import check_patches

# Arrays of a layout start at whole cache lines: Triton compiles anew for pointers less aligned.
_LINE = 16  # int32 values


def patches_tensor(config: VisionConfig, pixel_values: Any, layout: Layout) -> torch.Tensor:
    """Check patches against their layout; return them as a tensor, on the device they are on.

    Raises:
        ValueError: `pixel_values` do not match the layout.
        TypeError: they are not floating-point.
    """
    if not isinstance(pixel_values, torch.Tensor):
        pixel_values = as_tensor(np.asarray(pixel_values))
    check_patches(config, layout, pixel_values.shape)
    if not pixel_values.is_floating_point():
        raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
    return pixel_values


@functools.lru_cache(maxsize=32)
def layout_tensors(layout: Layout, device: torch.device) -> Layout:
    """A layout with tensors on a device for arrays; remembered, as `plan_layout` remembers its."""
    tensors = unflatten(layout, layout_on_device(layout, device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # once: any stream may read them from now on
    return tensors


def layout_on_device(layout: Layout, device: torch.device) -> torch.Tensor:
    """All arrays of a layout in one int32 tensor, so that a call takes one transfer and one copy.

    Remembered, as `plan_layout` returns one object for each grid, but only for the current stream:
    another tower's, for instance, would not wait for the transfer.
    """
    on_gpu = device.type == "cuda"
    return _transfer(layout, device, torch.cuda.current_stream(device) if on_gpu else None)


@functools.lru_cache(maxsize=32)
def _transfer(layout: Layout, device: torch.device, _: torch.cuda.Stream | None) -> torch.Tensor:
    # On the CPU, whatever device the user has PyTorch create tensors on.
    pinned = device.type == "cuda"
    flat = torch.zeros(_offsets(layout)[-1], dtype=torch.int32, device="cpu", pin_memory=pinned)
    for start, array in zip(_offsets(layout), layout_arrays(layout).values(), strict=False):
        flat[start : start + array.size] = as_tensor(array).view(-1)
    return flat.to(device, non_blocking=True)


def unflatten(layout: Layout, flat: torch.Tensor) -> Layout:
    """A layout with views of `layout_on_device` for arrays."""
    places = zip(_offsets(layout), layout_arrays(layout).items(), strict=False)
    views = {
        name: flat[start : start + array.size].view(array.shape) for start, (name, array) in places
    }
    return dataclasses.replace(layout, **views)


def layout_arrays(layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of a layout by name."""
    return {name: value for name, value in vars(layout).items() if isinstance(value, np.ndarray)}


def _offsets(layout: Layout) -> list[int]:
    """Where each array starts in the flat tensor, and where the last one ends."""
    sizes = [-(-array.size // _LINE) * _LINE for array in layout_arrays(layout).values()]
    return [0, *np.cumsum(sizes).tolist()]
