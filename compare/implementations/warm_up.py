"""Compiling many kernels at once, before any is timed: one compiler keeps only one core busy."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from compare.common.console import progress
from compare.implementations.kernels import KernelCall, KernelImplementation
from compare.workloads.arrays import blank_arguments
from compare.workloads.kernels import KernelInputs, KernelWorkload

_MOST_THREADS = 12

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


def draw_inputs(workloads: Sequence[KernelWorkload]) -> list[KernelInputs]:
    """The inputs of several workloads, several at a time."""
    with _pool() as pool:
        return list(pool.map(KernelWorkload.inputs, workloads))


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))


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
