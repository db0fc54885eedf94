"""Functions in processes of their own: any, on many items, and one for each GPU, which sees no
other.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def on_each(
    items: Sequence[Any],
    most: int,
    function: Callable[..., Any],
    *arguments: Any,
    variables: Mapping[str, str],
) -> Iterator[Any]:
    """Call a function on each item, with arguments behind it, in some processes at a time.

    They share the items. Yields what it returns for each, in their order.

    Raises:
        BrokenProcessPool: a process died; besides, whatever the function raises.
    """
    with _process(variables, processes=min(most, len(items)) or 1) as pool:
        for running in [pool.submit(function, item, *arguments) for item in items]:
            yield running.result()


def begin_together() -> None:
    """Wait until all processes of a call are here; elsewhere, for nobody."""
    if _barrier is not None:
        _barrier.wait(_PATIENCE)


def _process(
    variables: Mapping[str, str], barrier: Any = None, processes: int = 1
) -> ProcessPoolExecutor:
    """One process, or more, which start with the first functions that are submitted."""
    return ProcessPoolExecutor(processes, _SPAWNING, _begin, (dict(variables), barrier))


def _begin(variables: dict[str, str], barrier: Any) -> None:
    """In the new process, before what it calls imports a framework."""
    global _barrier
    os.environ.update(variables)
    _barrier = barrier


def _seeing(number: int) -> dict[str, str]:
    """The environment of a process that sees one GPU, of those that this one sees."""
    seen = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return {_VISIBLE: seen[number] if seen else str(number)}
