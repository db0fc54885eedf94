"""Device time by JAX's profiler, which records every kernel of the process, PyTorch's too.

It is the only clock that both frameworks share, so the ratio of Pallas to Triton is taken from it;
`jax.profiler.ProfileData` reads the trace without further packages. Where JAX is not installed, as
beside vLLM, PyTorch's profiler tells the same of PyTorch's kernels.
"""

import importlib.util
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compare.bench.timing import Timing

_DEVICE = "/device:GPU:"
_STREAM = "Stream"  # a line for each CUDA stream; other lines repeat its kernels under other names


# What a kernel of a tower does, by its name; the first pattern that is found counts.
_GROUPS = {
    # Inductor calls a cast on a kernel's way _to_copy.
    "copies": r"memcpy|memset|(?<!_to_)copy|transpose|concatenat|CatArray",
    "windowed attention": r"window_kernel",
    "frame attention": r"stream_kernel|rotate_kernel|flash|fmha|sdpa|attention",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitK|_dot|_product",
    "norms and elementwise": r"fusion|triton_|elementwise|norm|gated|reduce|gather|index",
}


def group_of(kernel: str) -> str:
    """What a tower's kernel does: a key of the table of groups, or "other"."""
    matching = (
        group for group, names in _GROUPS.items() if re.search(names, kernel, re.IGNORECASE)
    )
    return next(matching, "other")


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel, copy or fill on the GPU. Times in nanoseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Profile:
    """What the GPU did in a number of equal calls."""

    events: list[DeviceEvent]
    calls: int

    @property
    def kernels_per_call(self) -> float:
        """Kernels, copies and fills in one call."""
        return len(self.events) / self.calls

    def of_kernel(self, name: str) -> "Profile":
        """The part of it whose kernels have `name` in theirs."""
        return Profile([event for event in self.events if name in event.name], self.calls)

    def timing(self) -> Timing:
        """Summed device time of each call's kernels, gaps between them not counted.

        Where the events do not divide evenly among the calls, all that is known is their mean.
        """
        in_order = sorted(self.events, key=lambda event: event.start)
        durations = [event.duration / 1e3 for event in in_order]
        width, rest = divmod(len(durations), self.calls)
        if rest or not width:
            return Timing.of([sum(durations) / self.calls])
        starts = range(0, len(durations), width)
        return Timing.of([sum(durations[first : first + width]) for first in starts])

    def by_kernel(self) -> dict[str, float]:
        """Microseconds a call of each kernel, by name, longest first."""
        total: dict[str, float] = {}
        for event in self.events:
            total[event.name] = total.get(event.name, 0.0) + event.duration / 1e3 / self.calls
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def by_group(self) -> dict[str, float]:
        """Microseconds a call of each group of kernels that `group_of` tells apart."""
        total = dict.fromkeys((*_GROUPS, "other"), 0.0)
        for name, microseconds in self.by_kernel().items():
            total[group_of(name)] += microseconds
        return total


def profile(run: Callable[[], None], calls: int) -> Profile | None:
    """Run something under the profiler.

    Args:
        run: makes `calls` equal calls, warmed up before, and waits for the GPU.
        calls: how many.

    Returns:
        What the GPU did; None where the profiler saw nothing of it.
    """
    if importlib.util.find_spec("jax") is None:
        events = _events_by_pytorch(run)
        return Profile(events, calls) if events else None
    import jax

    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        events = [
            event
            for path in Path(directory).rglob("*.xplane.pb")
            for event in device_events(jax.profiler.ProfileData.from_file(str(path)))
        ]
    return Profile(events, calls) if events else None


def _events_by_pytorch(run: Callable[[], None]) -> list[DeviceEvent]:
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    return [
        DeviceEvent(event.name, event.time_range.start * 1e3, event.time_range.elapsed_us() * 1e3)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def try_profile(run: Callable[[], None], calls: int) -> Profile | None:
    """`profile` where it works, else None: what is shown beside a time is not worth failing for."""
    try:
        return profile(run, calls)
    except Exception:  # no JAX, no CUPTI, another profiler attached
        return None


def device_events(data: object) -> list[DeviceEvent]:
    """The GPU's events in a trace, a jax.profiler.ProfileData."""
    return [
        DeviceEvent(event.name, event.start_ns, event.duration_ns)
        for plane in data.planes
        if plane.name.startswith(_DEVICE)
        for line in plane.lines
        if line.name.startswith(_STREAM)
        for event in line.events
    ]
