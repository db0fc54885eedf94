"""What the PyTorch tower asks of devices: where it lives, what fits, arrays brought over."""

import functools
import queue

import numpy as np
import torch

from compare.common.errors import one_line


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU, counting those that PyTorch keeps for later; else None."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A NumPy array as a tensor that shares its memory where it can, bfloat16 included."""
    array = np.require(array, requirements=("C", "W"))
    if array.dtype.name == "bfloat16":  # PyTorch does not know NumPy's: hand over its bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy array, the inverse of `as_tensor`; of a GPU's a copy."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("bfloat16")
    return tensor.numpy()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to a GPU, for the current stream there, and wait for the copy.

    The copy does not queue behind what the GPU has to do. Only what the upload before the last one
    found queued is waited for, because uploads that nobody has read yet take memory.
    """
    return _uploader(device).copy(tensor)


class Uploader:
    """Copies to one GPU on a stream of its own."""

    _AHEAD = 2  # uploads that need not have been read when another begins

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not one of those that PyTorch deals out over and over: passes are recorded on these.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._before: queue.Queue[torch.cuda.Event] = queue.Queue()  # what uploads found queued
        for _ in range(self._AHEAD):
            self._before.put(self._stream.record_event())

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        reader = torch.cuda.current_stream(self._device)
        before = self._before.get()
        try:
            before.synchronize()
            with torch.cuda.stream(self._stream):
                copied = tensor.to(self._device)
            copied.record_stream(reader)  # or another upload might take its memory too soon
            before = reader.record_event()
        finally:
            self._before.put(before)
        return copied


_uploader = functools.cache(Uploader)


def find_device(device: torch.device | str | None) -> torch.device:
    """A device by its name; None is the GPU if there is one, else the CPU.

    Raises:
        ValueError: PyTorch has no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
        if device.type != "cuda":
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {one_line(error)}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}' was asked for, but PyTorch finds {torch.cuda.device_count()} GPUs"
        )
    return device
