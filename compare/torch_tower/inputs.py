"""What goes into the pass of a PyTorch tower: patches, and their layout on the device."""

import dataclasses
import weakref
from typing import Any

import numpy as np
import torch

from compare.torch_tower.device import as_tensor, upload
from flax_models import Layout, VisionConfig
from flax_models.common.layout import check_patches

# Arrays of a layout start at whole cache lines: Triton compiles anew for pointers less aligned.
_LINE = 16  # int32 values


def patches_tensor(
    config: VisionConfig, pixel_values: Any, layout: Layout, device: torch.device
) -> torch.Tensor:
    """Check patches against their layout; return them as a tensor.

    Those on the host are brought to a GPU in their own dtype, as it casts them faster; those on
    another GPU stay there, and those that want gradients where they are.

    Raises:
        ValueError: `pixel_values` do not match the layout.
        TypeError: they are not floating-point.
    """
    if not isinstance(pixel_values, torch.Tensor):
        pixel_values = as_tensor(np.asarray(pixel_values))
    check_patches(config, layout.num_tokens, pixel_values.shape)
    if not pixel_values.is_floating_point():
        raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
    on_host = device.type == "cuda" and not pixel_values.is_cuda
    uploadable = on_host and not pixel_values.requires_grad  # gradients do not go back through it
    # What a caller records cannot be fed from the host: the copy that follows says so.
    if uploadable and not torch.cuda.is_current_stream_capturing():
        return upload(pixel_values, device)
    return pixel_values


# Of each layout, kept for as long as it is: `plan_layout` keeps one object per grid, but no large
# ones. What was copied on one stream is for that stream: another would not wait for the transfer.
_tensors: weakref.WeakKeyDictionary[Layout, dict[torch.device, Layout]]
_tensors = weakref.WeakKeyDictionary()
_flat: weakref.WeakKeyDictionary[Layout, dict[torch.device | torch.cuda.Stream, torch.Tensor]]
_flat = weakref.WeakKeyDictionary()


def layout_tensors(layout: Layout, device: torch.device) -> Layout:
    """A layout with tensors on a device for arrays, which any stream may read.

    Raises:
        RuntimeError: they are not there yet, and the caller is recording a CUDA graph, in which
            nothing can be brought there.
    """
    copies = _tensors.setdefault(layout, {})
    if device not in copies:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the layout of grid_thw is not on the GPU, and cannot be brought there while a "
                "CUDA graph is recorded: record `encode` of what `prepare` returned before"
            )
        flat = _on_host(layout)
        # Waited for, as any stream may read it, but not behind what the GPU has to do.
        copies[device] = unflatten(layout, upload(flat, device) if device.type == "cuda" else flat)
    return copies[device]


def layout_on_device(layout: Layout, device: torch.device) -> torch.Tensor:
    """All arrays of a layout in one int32 tensor, so that a call takes one transfer and one copy.

    For use on the current stream.
    """
    on_gpu = device.type == "cuda"
    copies = _flat.setdefault(layout, {})
    reader = torch.cuda.current_stream(device) if on_gpu else device
    if reader not in copies:
        copies[reader] = _on_host(layout, pin_memory=on_gpu).to(device, non_blocking=True)
    return copies[reader]


def _on_host(layout: Layout, pin_memory: bool = False) -> torch.Tensor:
    # Filled on the CPU, whatever device the user has PyTorch create tensors on.
    flat = torch.zeros(_offsets(layout)[-1], dtype=torch.int32, device="cpu", pin_memory=pin_memory)
    for start, array in zip(_offsets(layout), layout_arrays(layout).values(), strict=False):
        flat[start : start + array.size] = as_tensor(array).view(-1)
    return flat


def unflatten(layout: Layout, flat: torch.Tensor) -> Layout:
    """A layout with views of one flat tensor, as `layout_on_device` returns it, for arrays."""
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
