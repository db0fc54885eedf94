"""CUDA graphs of passes on one GPU: recorded once, replayed in one launch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Outputs = TypeVar("Outputs")


def can_record(device: torch.device) -> bool:
    """Whether there can be a graph, and nobody is recording one around it."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class Recorder:
    """Records passes on one GPU, into memory that they share, and has them take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
            self._finished = torch.cuda.Event()

    def record(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Record a pass; returns its replay, and what each replay writes.

        Raises:
            RuntimeError: the pass waits for the GPU, or does what else no graph can hold.
        """
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                # PyTorch keeps the workspace of a stream's first product for all later ones there,
                # also for others who are given that stream: it must not be an empty one.
                run()
            # A capture that fails would leave its stream the current one.
            with self.recorded_products(), torch.cuda.stream(caller):
                with torch.cuda.stream(self._stream):
                    run()  # whatever is compiled or loaded at first use must be there
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Other threads may go on allocating memory meanwhile.
                with torch.cuda.graph(
                    graph, self._memory, self._stream, capture_error_mode="thread_local"
                ):
                    outputs = run()
        return graph.replay, outputs

    def recorded_products(self) -> contextlib.AbstractContextManager[None]:
        """Within it products are chosen for a recording: here as outside of one."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is queued within runs after what was queued in the turn before."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._finished)
            try:
                yield
            finally:  # what a failed turn had queued runs too
                self._finished.record(stream)

    def wait(self) -> None:
        """Wait until the last turn has run."""
        self._finished.synchronize()
