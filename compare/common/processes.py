"""Functions in processes of their own: any, and one for each GPU, which sees no other."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 300.0  # seconds in which all have to load and to compile
_SPAWNING = multiprocessing.get_context("spawn")

_barrier: Any = None  # of the processes of one call


def in_a_process(
    function: Callable[..., Any], *arguments: Any, variables: Mapping[str, str]
) -> Any:
    """Call a function in a process of its own, whose environment has these variables besides.

    Raises:
        BrokenProcessPool: the process died; besides, whatever the function raises.
    """
    with _process(variables) as pool:
        return pool.submit(function, *arguments).result()


def on_each_gpu(gpus: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in a process for each of so many GPUs; in one, where it is none.

    Raises:
        BrokenProcessPool: a process died; besides, whatever the function raises.
    """
    environments = [_seeing(number) for number in range(gpus)] or [{}]
    barrier = _SPAWNING.Barrier(len(environments))
    with ExitStack() as pools:
        running = [
            pools.enter_context(_process(variables, barrier)).submit(function, *arguments)
            for variables in environments
        ]
        return [each.result() for each in running]


def begin_together() -> None:
    """Wait until all processes of a call are here; elsewhere, for nobody."""
    if _barrier is not None:
        _barrier.wait(_PATIENCE)


def _process(variables: Mapping[str, str], barrier: Any = None) -> ProcessPoolExecutor:
    """One process, which starts with the first function that is submitted."""
    return ProcessPoolExecutor(1, _SPAWNING, _begin, (dict(variables), barrier))


def _begin(variables: dict[str, str], barrier: Any) -> None:
    """In the new process, before what it calls imports a framework."""
    global _barrier
    os.environ.update(variables)
    _barrier = barrier


def _seeing(number: int) -> dict[str, str]:
    """The environment of a process that sees one GPU, of those that this one sees."""
    seen = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return {_VISIBLE: seen[number] if seen else str(number)}
