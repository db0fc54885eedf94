"""CUDA graphs of a tower: one recorded pass for each bucket and output, replayed in one launch.

A forward pass is hundreds of kernels, many of which run shorter than their launch takes.
"""

import contextlib
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch

from compare.torch_tower.inputs import layout_arrays, layout_on_device, unflatten
from flax_models import Layout
from triton_kernels.integrations import recorder
from triton_kernels.integrations.recorder import can_record

# What a tower returns: its embeddings, or a tuple of them and of what goes with them.
Outputs = torch.Tensor | tuple["Outputs", ...]
Encode = Callable[[torch.Tensor, Layout], Outputs]

# Longer passes gain nothing from a recording, which would keep their memory.
_RECORDED_TOKENS = 1 << 15

_WORKSPACE_VARIABLE = "CUBLASLT_WORKSPACE_SIZE"
_cublas_lock = threading.RLock()  # its settings are the whole process's


class GraphCache:
    """The recordings of one tower, of which the least recently used is forgotten first.

    Threads and streams may call at once. Their passes run one after the other, because all
    recordings work in the same memory: that of the largest, not the sum of all.

    Attributes:
        limit: recordings that are kept.
    """

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._recordings: OrderedDict[tuple[str | int, ...], _Recording] = OrderedDict()
        self._recorder: Recorder | None = None

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """A copy of a tower, in this process or another, records for itself."""
        return type(self), (self.limit,)

    def __len__(self) -> int:
        """The number of recordings."""
        return len(self._recordings)

    def takes(self, tokens: int, device: torch.device) -> bool:
        """Whether a pass over so many tokens is to be recorded: it gains by it, and it can be."""
        return tokens <= _RECORDED_TOKENS and can_record(device)

    def clear(self) -> None:
        """Forget all recordings, as must be done when parameters move to other memory."""
        with self._lock:
            self._forget(len(self._recordings))
            self._recorder = None

    def __call__(
        self, encode: Encode, patches: torch.Tensor, layout: Layout, weight: torch.Tensor
    ) -> Outputs:
        """Replay the pass of the layout's bucket and output, recording it first where it is new.

        Args:
            encode: the pass; must not wait for the GPU.
            patches: [layout.num_tokens, patch_dim] floating, on any device.
            layout: as `plan_layout` returns it, padded to a bucket.
            weight: a parameter; the pass gets patches of its dtype on its device.

        Returns:
            The first `layout.num_outputs` rows of everything that `encode` returns.
        """
        # Buffers made in inference mode could not be written to outside it. Leaving it turns
        # gradients on, and buffers would keep alive all that their patches were computed from.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._recorder is None:
                self._recorder = Recorder(weight.device)
            recording = self._find(encode, patches.shape[1], layout, weight)
            with self._recorder.turn():
                return recording.run(patches, layout)

    def _find(
        self, encode: Encode, patch_dim: int, layout: Layout, weight: torch.Tensor
    ) -> "_Recording":
        key = _fixed(layout)
        if key not in self._recordings:
            self._forget(len(self._recordings) - self.limit + 1)
            self._recordings[key] = _Recording(encode, patch_dim, layout, weight, self._recorder)
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _forget(self, number: int) -> None:
        if number > 0 and self._recorder is not None:
            self._recorder.wait()  # the memory may be in use again at once
        for _ in range(number):
            self._recordings.popitem(last=False)


@functools.lru_cache(maxsize=32)
def _fixed(layout: Layout) -> tuple[str | int, ...]:
    """All that a recording fixes of a layout; remembered, as layouts are."""
    lengths = map(len, layout_arrays(layout).values())
    return (layout.output, *lengths, layout.max_frame_seqlen)


class Recorder(recorder.Recorder):
    """Records passes, with products that need no workspace."""

    def record(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """As every recorder does."""
        with _products_by_cublaslt():
            return super().record(run)

    def recorded_products(self) -> contextlib.AbstractContextManager[None]:
        """Without a workspace."""
        return _no_cublas_workspace()


@contextlib.contextmanager
def _products_by_cublaslt() -> Iterator[None]:
    """Have all products go where the size of a workspace can be set.

    Left to itself PyTorch gives cuBLASLt those with a bias alone.
    """
    with _cublas_lock:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)


@contextlib.contextmanager
def _no_cublas_workspace() -> Iterator[None]:
    """Have cuBLASLt choose products that need no workspace, whatever the process has set.

    With a workspace some products deal out their tiles by a counter in it, which a fill has to zero
    before each. They are no faster for it, and in a graph the kernels around the fill are 4 to 6 us
    apart instead of 0.3 to 0.6 (compare/results/notes/host.md).
    """
    with _cublas_lock:
        before = _set_workspace(0)
        try:
            yield
        finally:
            _set_workspace(before)


def _set_workspace(size: int | str | None) -> int | str | None:
    """Set the size of cuBLAS' workspace and return the one before, None for PyTorch's default."""
    if hasattr(torch.backends.cuda, "cublaslt_workspace_size"):
        before = torch.backends.cuda.cublaslt_workspace_size()
        torch.backends.cuda.cublaslt_workspace_size(size)
        return before
    # PyTorch before 2.13 reads a variable at every product.
    before = os.environ.pop(_WORKSPACE_VARIABLE, None)
    if size is not None:
        os.environ[_WORKSPACE_VARIABLE] = str(size)
    return before


class _Recording:
    """One pass with the buffers that it reads and writes."""

    def __init__(
        self,
        encode: Encode,
        patch_dim: int,
        layout: Layout,
        weight: torch.Tensor,
        recorder: Recorder,
    ) -> None:
        self._patches = weight.new_zeros(len(layout.window_order), patch_dim)
        self._layout: Layout | None = layout  # that self._flat holds, as far as is known
        self._flat = layout_on_device(layout, weight.device).clone()
        static = unflatten(layout, self._flat)
        self._replay, self._outputs = recorder.record(lambda: encode(self._patches, static))

    def run(self, patches: torch.Tensor, layout: Layout) -> Outputs:
        """Replay with other images of the same bucket."""
        self._patches[: len(patches)].copy_(patches)
        if len(patches) < len(self._patches):
            self._patches[len(patches) :].zero_()
        if layout is not self._layout:
            self._layout = None  # until the copy is known to be queued: a call may be interrupted
            self._flat.copy_(layout_on_device(layout, self._flat.device))
            self._layout = layout
        self._replay()
        return first_rows(self._outputs, layout.num_outputs, copy=True)


def first_rows(outputs: Outputs, rows: int, *, copy: bool = False) -> Outputs:
    """The first rows of each tensor, as views or copies; where these are all, the tensor itself."""
    if isinstance(outputs, tuple):
        return tuple(first_rows(output, rows, copy=copy) for output in outputs)
    first = outputs if rows == len(outputs) else outputs[:rows]
    return first.clone() if copy else first
