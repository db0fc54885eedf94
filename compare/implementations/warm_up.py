"""Compiling many kernels at once, before any is timed: one compiler keeps only one core busy.

Threads share what they compiled, but wait for each other wherever compilers are written in Python,
so a few keep all of them busy. Processes do not, and leave their work in the frameworks' caches.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace

import torch

from compare.common import environment
from compare.common.console import progress, say
from compare.common.errors import one_line
from compare.common.processes import on_each
from compare.implementations.kernels import KernelCall, KernelImplementation
from compare.workloads.arrays import blank_arguments
from compare.workloads.kernels import KernelInputs, KernelWorkload

_MOST_THREADS, _MOST_PROCESSES = 12, 16
_PROGRAMS = "jax_compilation_cache_dir"
_KEPT_AFTER = "jax_persistent_cache_min_compile_time_secs"
# Of processes that share a GPU, and compile many programs each.
_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

# An implementation, and the workload that it is to be ready for.
Job = tuple[KernelImplementation, KernelWorkload]


def warm_up(jobs: Sequence[Job], description: str) -> list[KernelImplementation]:
    """Make every job's first call, on blank inputs, several jobs at a time.

    Returns for each job its implementation, compiled: preparing it gives the very call that was
    made, or raises what that raised. The description is the progress bar's.
    """
    with _pool() as pool:
        # The first by itself: it sets up what all others share.
        ready = [_ready(*job) for job in jobs[:1]]
        waiting = [pool.submit(_ready, *job) for job in jobs[1:]]
        return ready + [future.result() for future in progress(waiting, description)]


@contextmanager
def caches_filled(
    workloads: Sequence[KernelWorkload],
    implementations: Callable[[KernelWorkload], Sequence[KernelImplementation]],
) -> Iterator[None]:
    """Within the context, what these implementations compile for the workloads is in caches.

    Triton's and Inductor's, which last, and one of JAX's programs, if the user keeps none. They are
    filled by processes that make each first call on blank inputs. What fails there, whole processes
    too, is left to be compiled, or to fail, here. Before JAX takes its share of the GPU's memory.

    Args:
        workloads: what on.
        implementations: a function of a module, which processes can import.
    """
    import jax  # here, as threads and processes serve PyTorch alone, too

    before = {name: getattr(jax.config, name) for name in (_PROGRAMS, _KEPT_AFTER)}
    with tempfile.TemporaryDirectory() as directory:
        used = {_PROGRAMS: before[_PROGRAMS] or directory, _KEPT_AFTER: 0}
        variables = _SHARING | {name.upper(): str(value) for name, value in used.items()}
        most = min(_MOST_PROCESSES, environment.cores())
        # One by one, as some take minutes, and others of the same workload must not wait for them.
        calls = [(w, i) for w in workloads for i in range(len(implementations(w)))]
        done = on_each(calls, most, _call, implementations, variables=variables)
        try:
            for _ in progress(calls, "filling caches"):
                next(done)
        except BrokenProcessPool as error:
            say(f"Not all caches are filled: {one_line(error)}")
        try:
            for name, value in used.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


def _call(
    call: tuple[KernelWorkload, int],
    implementations: Callable[[KernelWorkload], Sequence[KernelImplementation]],
) -> None:
    """In a process of its own: one implementation's first call, whatever comes of it."""
    workload, index = call
    _ready(implementations(workload)[index], workload)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes want it, too


def draw_inputs(workloads: Sequence[KernelWorkload]) -> list[KernelInputs]:
    """The inputs of several workloads, several at a time."""
    with _pool() as pool:
        return list(pool.map(KernelWorkload.inputs, workloads))


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, environment.cores()))


def _ready(implementation: KernelImplementation, workload: KernelWorkload) -> KernelImplementation:
    try:
        call = implementation.prepare(workload)
        with torch.inference_mode(not workload.gradients):
            output = call(*blank_arguments(workload, implementation.framework))
        if implementation.framework == "jax":
            output.block_until_ready()
        elif output.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # reported by whoever wants to time it
        failure = error

        def fail(_: KernelWorkload) -> KernelCall:
            raise failure

        return replace(implementation, prepare=fail)
    return replace(implementation, prepare=lambda _: call)
