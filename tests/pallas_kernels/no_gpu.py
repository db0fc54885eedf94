"""For tests of what is lowered for a GPU: those here shall not have a say in it."""

import jax

from pallas_kernels.launching import choose, devices
from pallas_kernels.launching import compile as compile_module


def hide_gpus(monkeypatch):
    """Have the package see no GPU, until the test ends.

    XLA compiles then, unless a test says who does, and the stream kernel keeps its place.
    """
    for module in (choose, devices):
        monkeypatch.setattr(module, "local_gpus", tuple)
    monkeypatch.setattr(compile_module, "_default_compiler", lambda: "xla")
    jax.clear_caches()  # of what was traced for a GPU
