"""Stand-ins for the GPU's clocks: calls run on the CPU, times are made up."""

from compare.bench import ceilings, kernel_timing
from compare.bench.ceilings import Ceilings
from compare.bench.jax_profiler import DeviceEvent, Profile
from compare.bench.timing import Timing


class StandInTimer:
    """A call takes as many microseconds as its attribute `us` says, or 10."""

    def __init__(self, call, arguments, sets):
        self.call, self.arguments, self.sets = call, arguments, sets

    def time(self, samples):
        return Timing(getattr(self.call, "us", 10.0), 0.5, samples)

    def outputs(self):
        return [self.call(*(x.clone() for x in self.arguments)) for _ in range(self.sets)]

    def peak_memory_mib(self):
        return 30.0

    def host_us(self):
        return 20.0

    def run_eagerly(self, rounds):
        self.outputs()


def stand_in_clocks(monkeypatch, jax_kernel="kernel"):
    """Every call in JAX takes 9 us in one kernel of the given name."""

    def profile(run, calls):
        run()
        return Profile([DeviceEvent(jax_kernel, i, 9000) for i in range(calls)], calls)

    monkeypatch.setattr(ceilings, "measure", lambda: Ceilings(4e9, 4e9, 8e14))
    monkeypatch.setattr(kernel_timing, "GraphTimer", StandInTimer)
    monkeypatch.setattr(kernel_timing, "input_sets", lambda *_: 2)
    for name in ("profile", "try_profile"):
        monkeypatch.setattr(kernel_timing, name, profile)
