"""A process for each GPU, which sees no other."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 300.0  # seconds in which all have to load and to compile

_barrier: Any = None  # of the processes of one call


def on_each_gpu(gpus: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in a process for each of so many GPUs; in one, where it is none.

    Raises:
        BrokenProcessPool: a process died; besides, whatever the function raises.
    """
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(max(gpus, 1))
    with ExitStack() as pools:
        running = []
        for number in range(max(gpus, 1)):
            pool = pools.enter_context(ProcessPoolExecutor(1, spawning, _join, (barrier,)))
            with _visible(number if gpus else None):  # as its process starts
                running.append(pool.submit(function, *arguments))
        return [each.result() for each in running]


def begin_together() -> None:
    """Wait until all processes of a call are here; elsewhere, for nobody."""
    if _barrier is not None:
        _barrier.wait(_PATIENCE)


def _join(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


@contextmanager
def _visible(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    seen = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    with mock.patch.dict(os.environ, {_VISIBLE: seen[number] if seen else str(number)}):
        yield
