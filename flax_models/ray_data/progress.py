"""How far a run is: counted in the stages' processes, told by the driver."""

import collections
import datetime
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from flax_models.ray_data.patches import Report

# Seconds between lines where there is no terminal, and between looks where there is one.
_LINES, _LOOKS = 30.0, 0.5


@ray.remote(num_cpus=0)
class _Counts:
    """The sums of what all processes report."""

    def __init__(self) -> None:
        self.counts: collections.Counter = collections.Counter()
        self.begun: collections.Counter = collections.Counter()
        self.start: float | None = None  # as the first tower is there

    def add(self, numbers: dict[str, float]) -> None:
        self.counts.update(numbers)
        if self.start is None and "loaded" in numbers:
            self.start = time.monotonic()

    def begin(self, rows: str) -> int:
        self.begun[rows] += 1
        return self.begun[rows]

    def get(self) -> dict[str, float]:
        seconds = 0.0 if self.start is None else time.monotonic() - self.start
        return {**self.counts, "seconds": seconds}


@dataclass(frozen=True)
class Reporter(Report):
    """What the stages are given by the command."""

    counts: Any

    def __call__(self, **numbers: float) -> None:
        """Send numbers, and don't wait; what is done again counts again."""
        self.counts.add.remote(numbers)

    def attempt(self, rows: str) -> int:
        """How often these rows were begun, this time included."""
        return ray.get(self.counts.begin.remote(rows))


class Progress:
    """Tells on standard error how far a run is, while it is entered.

    On a terminal one line that changes, elsewhere a line every 30 seconds.
    """

    def __init__(self, total: int | None, devices: int, every: float = _LINES) -> None:
        """Start to count.

        Args:
            total: images and videos that there are to do, None where nobody knows.
            devices: towers that run side by side.
            every: seconds between lines where there is no terminal.
        """
        self.total, self.devices, self.every = total, devices, every
        self.counts = _Counts.remote()
        self.report = Reporter(self.counts)
        self._over = threading.Event()

    def __enter__(self) -> "Progress":
        """Begin to tell."""
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop telling."""
        self._over.set()
        self._thread.join()

    def numbers(self) -> dict[str, float]:
        """What was counted, and the "seconds" since there was a tower.

        "read" files and the "reading" seconds of all cores; "loaded" towers, their "busy" seconds,
        "calls", "images", "patches" and "padding"; "refused" files; "written" rows, their "bytes"
        and "writing" seconds.
        """
        return collections.Counter(ray.get(self.counts.get.remote()))

    def line(self) -> str:
        """How far it is, in words."""
        return describe(self.numbers(), self.total, self.devices)

    def _tell(self) -> None:
        console = Console(stderr=True)
        if not console.is_terminal:
            self._repeat(self.every, lambda line: print(line, file=sys.stderr, flush=True))
            return
        with Live(console=console, transient=True) as live:
            self._repeat(_LOOKS, lambda line: live.update(Text(line)))

    def _repeat(self, seconds: float, show: Callable[[str], None]) -> None:
        while not self._over.wait(seconds):
            try:
                line = self.line()
            except ray.exceptions.RayError:  # Ray ends; what comes of it the main thread says
                return
            show(line)


def describe(numbers: dict[str, float], total: int | None, devices: int) -> str:
    """One line: images, patches a second, the towers' share of the time, errors, time left."""
    seconds = numbers["seconds"]
    if not seconds:
        return f"{int(numbers['read']):,} files read, towers are loaded"
    done = int(numbers["images"] + numbers["refused"])
    of = "" if total is None else f" of {total:,}"
    parts = [
        f"{done:,}{of} images",
        f"{numbers['images'] / seconds:,.1f} images/s",
        f"{numbers['patches'] / seconds:,.0f} patches/s",
        f"towers busy {min(numbers['busy'] / (seconds * devices), 1):.0%}",
        f"{int(numbers['refused']):,} refused",
    ]
    if total and done:
        left = round(seconds * max(total - done, 0) / done)
        parts.append(f"{datetime.timedelta(seconds=left)} left")
    return ", ".join(parts)
