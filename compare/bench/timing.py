"""Timing PyTorch's device work by replays of a CUDA graph, and what both frameworks' timings share.

A graph holds one call for each of several input sets that together pass the L2 cache several
times, so every call finds its inputs in memory, not in the cache, and host time plays no part.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compare.workloads.arrays import KernelArguments

MIN_CALLS = 20  # input sets, if memory allows: the gap between two replays spreads over them
CACHE_PASSES = 4
SAMPLES = 30
SAMPLE_MS = 3.0
HOST_SAMPLES = 10
WALL_SECONDS = 3.0
ROW_SECONDS = 1.0
ROW_CALLS = 16
_FALLBACK_CACHE = 64 << 20


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of the samples, and 90th minus 10th percentile.

    The spread of a single sample is not known: None.
    """

    median_us: float
    spread_us: float | None
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> "Timing":
        """Summarise samples, each in microseconds a call."""
        median = statistics.median(samples_us)
        if len(samples_us) < 2:
            return cls(median, None, len(samples_us))
        deciles = statistics.quantiles(samples_us, n=10, method="inclusive")
        return cls(median, deciles[-1] - deciles[0], len(samples_us))


def input_sets(bytes_per_set: int, calls: int = MIN_CALLS) -> int:
    """How many input sets a timing rotates among: `calls`, and several times the L2 cache."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or _FALLBACK_CACHE
    return max(3, calls, -(-CACHE_PASSES * cache // bytes_per_set))


@dataclass
class GraphTimer:
    """One implementation captured over rotating inputs.

    Attributes:
        call: qkv, cos, sin, cu_seqlens (and more) -> a tensor; may rotate qkv in place.
        arguments: one set of inputs on the GPU.
        sets: how many copies of them to rotate among.

    Raises:
        RuntimeError: the call cannot be captured, for instance because it waits for the GPU.
    """

    call: Callable[..., torch.Tensor]
    arguments: KernelArguments
    sets: int

    def __post_init__(self) -> None:
        """Warm up on a side stream, as capture asks for, and capture one call for each set."""
        self._sets = [
            tuple(x.clone() if x.is_floating_point() else x for x in self.arguments)
            for _ in range(self.sets)
        ]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.call(*self._sets[0])
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # A capture that watches all threads would fail on what the other framework's ask of the
        # GPU meanwhile, and their streams with it.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = [self.call(*arguments) for arguments in self._sets]

    def time(self, samples: int = SAMPLES) -> Timing:
        """Time replays; each sample is some milliseconds of back-to-back replays."""
        self._elapsed_ms(3)
        replays = max(2, int(SAMPLE_MS / max(self._elapsed_ms(2) / 2, 1e-3)))
        scale = 1e3 / (replays * self.sets)
        return Timing.of([self._elapsed_ms(replays) * scale for _ in range(samples)])

    def outputs(self) -> list[torch.Tensor]:
        """What the timed graph writes, from fresh inputs into outputs filled with NaN before.

        Inputs are put back first because an implementation may have rotated them in place, once
        in every replay.
        """
        for (qkv, *_), output in zip(self._sets, self._outputs, strict=True):
            output.fill_(float("nan"))  # first: it may be a view of qkv
            qkv.copy_(self.arguments[0])
        self._graph.replay()
        torch.cuda.synchronize()
        return self._outputs

    def run_eagerly(self, rounds: int) -> None:
        """Launch every set's call some times without the graph and wait: for a profiler to see.

        Results are kept, as in the graph and in JAX's rounds: written to the same memory at every
        call, they would stay in the cache.
        """
        results: list[torch.Tensor] = []
        for _ in range(rounds):
            results[:] = [self.call(*arguments) for arguments in self._sets]
        torch.cuda.synchronize()

    def peak_memory_mib(self) -> float:
        """Most memory that one call takes beside its inputs, its result included."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call(*self._sets[0])
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def host_us(self) -> float:
        """Microseconds of the host for a call: Python and launch, the GPU not waited for."""
        samples = []
        for _ in range(HOST_SAMPLES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for arguments in self._sets:
                self.call(*arguments)
            samples.append((time.perf_counter() - start) * 1e6 / self.sets)
        torch.cuda.synchronize()
        return statistics.median(samples)

    def _elapsed_ms(self, replays: int) -> float:
        return elapsed_ms(self._graph.replay for _ in range(replays))


def elapsed_ms(calls: Iterable[Callable[[], object]]) -> float:
    """The GPU's time for calls that are queued without waiting in between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_wall(
    call: Callable[[], Any], synchronize: Callable[[Any], None], seconds: float = WALL_SECONDS
) -> Timing:
    """Wall time of whole calls, each waited for: what a user of a tower sees.

    Args:
        call: one call; already warmed up.
        synchronize: waits until the call's result is there.
        seconds: after so many no sample begins, if there are ten.
    """
    return _time_calls(call, synchronize, 1, seconds, least=10, most=100)


def time_row(
    call: Callable[[], Any], synchronize: Callable[[Any], None], alone_us: float
) -> Timing:
    """Time whole calls made in a row: each sample is a row's mean, waited for at its end.

    What a user of a tower sees who has many images: the host prepares a call while the GPU is busy
    with the one before. A call takes about `alone_us`.
    """
    calls = max(2, min(ROW_CALLS, int(ROW_SECONDS * 1e6 / 3 / alone_us)))
    return _time_calls(call, synchronize, calls, ROW_SECONDS, least=3, most=30)


def _time_calls(
    call: Callable[[], Any],
    synchronize: Callable[[Any], None],
    calls: int,
    seconds: float,
    least: int,
    most: int,
) -> Timing:
    """Samples of so many calls each, at least and at most so many, ended after some seconds."""
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < least or (len(samples) < most and time.perf_counter() < deadline):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        synchronize(call())
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    return Timing.of(samples)
