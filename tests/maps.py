"""A process's memory maps, of which XLA takes some for every program that it compiles.

Linux allows 65,530 (vm.max_map_count). A program of Pallas' interpreter takes 500 of them, and
jit's caches keep thousands of programs. When none is left XLA does not raise: it says "LLVM
compilation error: Cannot allocate memory" and crashes with a segmentation fault in
`backend_compile_and_load`, wherever the next program happens to be compiled.
"""

import gc
import sys
import time
from pathlib import Path

_MAPS = Path("/proc/self/maps")
# A quarter of what Linux allows: one test may compile as many programs as take another half.
MOST_MAPS = 16_000
# The system takes 20 ms to tell 16,000 of them, and most tests compile nothing.
SECONDS_BETWEEN = 0.5
_looked = -SECONDS_BETWEEN


def count() -> int:
    """How many this process has; 0 where the system does not tell."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def give_back_now_and_then() -> None:
    """`give_back`, unless that was asked less than SECONDS_BETWEEN ago: time for few programs."""
    global _looked
    if time.monotonic() - _looked >= SECONDS_BETWEEN:
        give_back()
        _looked = time.monotonic()


def give_back(most: int = MOST_MAPS) -> None:
    """Forget JAX's compiled programs if there are more maps than `most`."""
    jax = sys.modules.get("jax")
    if jax is not None and count() > most:
        jax.clear_caches()
        gc.collect()
