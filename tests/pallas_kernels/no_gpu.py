"""For tests of what is lowered for a GPU: those here shall not have a say in it."""

import contextlib
import inspect
import re

import jax

from compare.stress.launched import equations
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


def cuda_device():
    """JAX 0.11 and later lower for a GPU that they know the name of; 0.10 needs none."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    platform = ("gpu",) if len(inspect.signature(AbstractDevice).parameters) > 2 else ()
    device = AbstractDevice("NVIDIA H200", None, *platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def kernels_in(exported):
    """Those that an exported program launches on a GPU, as (what XLA is given, the kernel)."""
    module = str(exported.mlir_module())
    return re.findall(r'custom_call @__gpu\$xla\.gpu\.(\w+)\(.*?name = "(\w+)"', module)


def products(traced):
    """All matrix products of a jaxpr, those within kernels too."""
    return [eqn for eqn in equations(traced) if eqn.primitive.name == "dot_general"]
