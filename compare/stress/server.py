"""A server's life: one tower, many threads, thousands of calls of random sizes."""

import gc
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from compare.agreement.metrics import relative_rms_error
from compare.common.console import progress
from compare.common.errors import one_line
from compare.implementations.towers import Tower
from flax_models import VisionConfig

# A call that got another call's images is off by more than 1. Between calls of the same images
# only the order of bf16 roundings may change, where a compiler makes another program.
_TOLERANCE = 1e-2
_MIB = 1 << 20
_ROUNDS = 20
_WARM_ROUNDS = 4  # until every thread has its buffers and every size its program
_PACKAGES = ("compare", "flax_models", "pallas_kernels", "triton_kernels")


@dataclass(frozen=True)
class Traffic:
    """What is asked of a tower.

    Attributes:
        calls: how many, in all.
        threads: that call at the same time.
        requests: different ones, in random order.
        images: at most, in a call.
        side: most patches along an image's side.
        growth_mib: most that host or device memory may grow, see `growth`.
    """

    calls: int
    threads: int
    requests: int
    images: int
    side: int
    growth_mib: float = 64.0


ON_GPU = Traffic(calls=10_000, threads=8, requests=200, images=3, side=48)
ON_CPU = Traffic(calls=200, threads=8, requests=12, images=2, side=10)


@dataclass
class Life:
    """The outcome: calls made, growth of memory once the tower was warm, what was wrong."""

    calls: int = 0
    host_growth_mib: float = 0.0
    device_growth_mib: float = 0.0
    findings: list[str] = field(default_factory=list)


def live(tower: Tower, config: VisionConfig, traffic: Traffic, seconds: float) -> Life:
    """Call a tower from several threads and watch results, memory and caches.

    Args:
        tower: answers the calls.
        config: its configuration.
        traffic: what is asked.
        seconds: no new round of calls begins after so long; the warm rounds always run.
    """
    rng = np.random.default_rng(0)
    grids = [_random_grid(rng, config, traffic) for _ in range(traffic.requests)]
    pool = rng.standard_normal((max(map(_tokens, grids)) + 1000, config.patch_dim), np.float32)
    requests = [(pool[rng.integers(1000) :][: _tokens(grid)], grid) for grid in grids]
    # Alone, one after the other: what each must give, and the first call of every size.
    expected = [_call(tower, *request).cpu() for request in requests]
    life = Life()

    def one(index: int) -> str | None:
        try:
            error = relative_rms_error(_call(tower, *requests[index]).cpu(), expected[index])
        except Exception as problem:  # in a server too the other calls go on
            return one_line(problem)
        if error <= _TOLERANCE:
            return None
        return f"error {error:.1e} for grid {grids[index].tolist()}"

    order = rng.integers(0, len(requests), (_ROUNDS, traffic.calls // _ROUNDS))
    gc.freeze()  # collecting after each round then looks only at what came since
    begun, memory, caches = time.monotonic(), [], cache_sizes()
    with ThreadPoolExecutor(traffic.threads) as threads:
        for number in progress(range(_ROUNDS), f"{tower.framework} tower, {traffic.calls} calls"):
            if number >= _WARM_ROUNDS and time.monotonic() - begun > seconds:
                break
            life.findings += filter(None, threads.map(one, order[number].tolist()))
            life.calls += order.shape[1]
            memory.append(memory_mib())
            if number < _WARM_ROUNDS:
                caches = cache_sizes()
    gc.unfreeze()
    life.host_growth_mib, life.device_growth_mib = (
        growth(held) for held in zip(*memory, strict=True)
    )
    for where, grown in (("host", life.host_growth_mib), ("device", life.device_growth_mib)):
        if grown > traffic.growth_mib:
            life.findings.append(f"{where} memory grew by {grown:.0f} MiB")
    life.findings += [
        f"the cache of {name} grew from {caches.get(name, 0)} to {size}"
        for name, size in cache_sizes().items()
        if size > caches.get(name, 0)
    ]
    return life


def growth(held: Sequence[float]) -> float:
    """MiB from the most of the first warm rounds to the least of the last.

    So what a cache of limited size holds at a moment does not count as growth, but a leak does.
    """
    warm = held[_WARM_ROUNDS // 2 :]
    quarter = max(1, len(warm) // 4)
    return min(warm[-quarter:]) - max(warm[:quarter])


def memory_mib() -> tuple[float, float]:
    """What this process holds of the host's memory, and of the device's in both frameworks."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        device += torch.cuda.memory_allocated()
    if "jax" in sys.modules:
        import jax

        device += (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    return pages * resource.getpagesize() / _MIB, device / _MIB


def cache_sizes() -> dict[str, int]:
    """Entries of every cache without a limit, and of every jitted function, in our packages.

    Of the Flax towers' programs, which are kept with a limit, all that were ever compiled.
    """
    found = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in _PACKAGES]:
        for name, value in vars(module).items():
            if hasattr(value, "cache_info") and value.cache_info().maxsize is None:
                found[f"{module.__name__}.{name}"] = value.cache_info().currsize
            elif hasattr(value, "_cache_size"):
                found[f"{module.__name__}.{name}"] = value._cache_size()
    if compiled := sys.modules.get("flax_models.compiled"):
        found[compiled.__name__] = compiled.compilations()
    return found


def _call(tower: Tower, pixel_values: np.ndarray, grid_thw: np.ndarray) -> torch.Tensor:
    # Patches as `preprocess` returns them: bringing them to the GPU is the tower's own.
    return tower.tensor(tower.encode(pixel_values, grid_thw))


def _random_grid(rng: np.random.Generator, config: VisionConfig, traffic: Traffic) -> np.ndarray:
    merge = config.spatial_merge_size
    images = rng.integers(1, traffic.images + 1)
    sides = merge * rng.integers(1, traffic.side // merge + 1, (images, 2))
    return np.column_stack([rng.integers(1, 3, images), sides])


def _tokens(grid: Sequence[Sequence[int]] | np.ndarray) -> int:
    return int(np.prod(grid, axis=1).sum())
