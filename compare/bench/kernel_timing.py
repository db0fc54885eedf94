"""One implementation on one workload: its time beside the error of the output that was timed."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compare.agreement.expected import Expected
from compare.bench.host import add, host_details
from compare.bench.jax_profiler import Profile, profile, try_profile
from compare.bench.timing import MIN_CALLS, SAMPLE_MS, SAMPLES, GraphTimer, Timing, input_sets
from compare.common.console import progress
from compare.common.errors import UnavailableError
from compare.common.result_files import Record, Verdict
from compare.implementations.kernels import KernelImplementation, program_memory_mib
from compare.workloads.arrays import from_jax, poison
from compare.workloads.kernels import KernelInputs, KernelWorkload


@dataclass(frozen=True)
class Effort:
    """How much time a timing is worth.

    Attributes:
        samples: of a CUDA graph's replays.
        jax_sets: least input sets in JAX, whose results travel to be judged.
        profiled_calls: least calls under the profiler.
        thorough: whether ours in PyTorch are profiled as well, for the twins' ratio, and their host
            time is taken.
        torch_sets: least input sets in PyTorch.
    """

    samples: int
    jax_sets: int
    profiled_calls: int
    thorough: bool
    torch_sets: int = MIN_CALLS

    def profiled_rounds(self, run: Callable[[int], None], calls: int) -> int:
        """How many rounds of some calls are profiled.

        They take as long as the replays of a CUDA graph at least, as over long calls a GPU's clock
        falls for a while before it settles.

        Args:
            run: makes so many rounds and waits for the GPU; makes one here.
            calls: of a round.
        """
        start = time.perf_counter()
        run(1)
        seconds = time.perf_counter() - start
        as_replays = math.ceil(self.samples * SAMPLE_MS / 1e3 / seconds)
        return max(as_replays, math.ceil(self.profiled_calls / calls))


FULL = Effort(samples=SAMPLES, jax_sets=MIN_CALLS, profiled_calls=60, thorough=True)
# For hundreds of timings of which the smallest is wanted: the median of a few is right to 1 %.
QUICK = Effort(samples=7, jax_sets=3, profiled_calls=12, thorough=False)


def blank_record(implementation: KernelImplementation, workload: KernelWorkload) -> Record:
    """A record without any number."""
    return workload.record(
        implementation.name, framework=implementation.framework, ours=implementation.ours
    )


def measure(
    implementation: KernelImplementation,
    expected: Expected,
    effort: Effort = FULL,
    kernel: str = "",
) -> Record:
    """Time an implementation on the GPU and judge what it wrote.

    Args:
        implementation: what is timed.
        expected: the workload and its answer.
        effort: how much time to spend.
        kernel: in JAX, part of the name of the kernels that are timed; default all of a call.

    Returns:
        A record with median, spread and error; without a timing where the error breaks its rule or
        the implementation cannot run, `note` says why.
    """
    blank = blank_record(implementation, expected.workload)
    try:
        if implementation.framework == "torch":
            return _time_torch(implementation, expected, blank, effort)
        return _time_jax(implementation, expected, blank, effort, kernel)
    except Exception as error:  # what fails is reported; the run goes on
        return blank.failed(error)
    finally:
        torch.cuda.empty_cache()


def measure_all(
    implementations: Sequence[KernelImplementation],
    workload: KernelWorkload,
    inputs: KernelInputs | None = None,
    effort: Effort = FULL,
    *,
    kernel: str = "",
    description: str | None = None,
) -> list[Record]:
    """`measure` some implementations on one workload.

    Args:
        implementations: what is timed.
        workload: what on.
        inputs: of the workload; None: they are drawn.
        effort, kernel: as for `measure`.
        description: of the progress, which is not shown without one.

    Returns:
        A record for each. Where a kernel has broken the GPU they hold the reason instead of
        numbers, and nothing is raised: what was measured on earlier workloads is not lost.
    """
    shown = implementations if description is None else progress(implementations, description)
    try:
        expected = Expected.of(workload, inputs)
        return [measure(implementation, expected, effort, kernel) for implementation in shown]
    except Exception as error:
        return [blank_record(each, workload).failed(error) for each in implementations]


def _time_torch(
    implementation: KernelImplementation, expected: Expected, blank: Record, effort: Effort
) -> Record:
    call = implementation.prepare(expected.workload)
    sets = input_sets(expected.inputs.qkv.nbytes, effort.torch_sets)
    with torch.inference_mode(not expected.workload.gradients):
        timer = GraphTimer(call, expected.torch_arguments, sets)
        timing = timer.time(effort.samples)
        verdict = expected.judge(timer.outputs())
        if expected.workload.gradients:
            blank = replace(blank, peak_memory_mib=timer.peak_memory_mib())
        if not (implementation.ours and effort.thorough):
            return _timed(blank, verdict, timing, None)
        rounds = effort.profiled_rounds(timer.run_eagerly, timer.sets)
        profiled = try_profile(lambda: timer.run_eagerly(rounds), rounds * timer.sets)
        record = _timed(blank, verdict, timing, profiled)
        if not verdict.passed:
            return record
        addition = GraphTimer(add, expected.torch_arguments[:4], sets)
        return replace(record, details=record.details | host_details(timer, addition))


def _time_jax(
    implementation: KernelImplementation,
    expected: Expected,
    blank: Record,
    effort: Effort,
    kernel: str,
) -> Record:
    import jax
    import jax.numpy as jnp

    call = implementation.prepare(expected.workload)
    count = input_sets(expected.inputs.qkv.nbytes, effort.jax_sets)
    sets = [tuple(jnp.copy(x) for x in expected.jax_arguments) for _ in range(count)]
    outputs: list[Any] = []

    def run(rounds: int) -> None:
        for _ in range(rounds):
            outputs[:] = [call(*arguments) for arguments in sets]
        jax.block_until_ready(outputs)

    run(1)
    rounds = effort.profiled_rounds(run, len(sets))
    profiled = profile(lambda: run(rounds), rounds * len(sets))
    profiled = profiled and profiled.of_kernel(kernel)
    if expected.workload.gradients:
        _, beside_arguments = program_memory_mib(call, *sets[0])
        blank = replace(blank, peak_memory_mib=beside_arguments)
    if not (profiled and profiled.events):
        raise UnavailableError(f"JAX's profiler recorded no {kernel or 'kernel'} on the GPU")
    verdict = expected.judge([from_jax(output) for output in outputs])
    if verdict.passed:  # so far: once more, without what earlier calls wrote
        outputs.clear()
        poison(sets[0], len(sets))
        run(1)
        verdict = expected.judge([from_jax(output) for output in outputs])
    return _timed(blank, verdict, profiled.timing(), profiled)


def _timed(blank: Record, verdict: Verdict, timing: Timing, profiled: Profile | None) -> Record:
    """The record with its timing, or without it where the error breaks the rule."""
    record = blank.judged(verdict)
    if not verdict.passed:
        return replace(record, note="not timed: the error breaks its rule")
    return replace(
        record,
        median_us=timing.median_us,
        spread_us=timing.spread_us,
        profiler_us=profiled.timing().median_us if profiled else None,
        kernels_per_call=profiled.kernels_per_call if profiled else None,
    )
