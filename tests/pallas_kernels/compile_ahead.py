"""Have XLA compile Pallas kernels to machine code for an H200, where there need not be one.

XLA takes a GPU that is described to it for one that is there, and dumps the PTX that it makes of a
kernel, as Mosaic prints its own; ptxas says what that takes of a multiprocessor. It wants JAX's
CUDA plugin and a ptxas of CUDA 13, both of which `jax[cuda13]` brings. A program of its own,
because flags for XLA have to stand before JAX starts:

    python -m tests.pallas_kernels.compile_ahead
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.triton_kernels.machine_code import LOCAL_MEMORY, product_loops

TOKENS, HEADS = 9216, 16
LENGTHS = {"windows": 64, "frames": TOKENS}
HEAD_DIMS = (72, 80, 128)
# How calls fuse, and whether their gradient is asked for too.
WAYS = (("qk", False), ("none", False), ("auto", True))

# What NVIDIA publishes of the H200, and what its driver answers.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 62914560
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def what_is_missing() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "JAX's plugin for CUDA 13 is not installed"
    return None if find_ptxas() else "there is no ptxas"


def find_ptxas() -> Path | None:
    """The assembler that came with JAX's plugin, else the one on the path, if any."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations if nvidia else ():
        for found in Path(folder).glob("cu13/bin/ptxas"):
            return found
    found = shutil.which("ptxas")
    return Path(found) if found else None


def main() -> None:
    """Compile every variant and print a line of JSON for each kernel."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XLA_FLAGS"] = (
            f"--xla_dump_to={directory} --xla_gpu_dump_llvmir --xla_dump_emitter_re=.*"
        )
        os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
        forget_this_machine()
        from pallas_kernels.launching.compile import HAVE_MOSAIC

        for head_dim in HEAD_DIMS if HAVE_MOSAIC else ():
            printed = Path(directory) / "mosaic"
            with printed_to(printed):
                compile_hopper(head_dim)
            for kernel, ptx in kernels_in(printed):
                record = {"head_dim": head_dim, "kernel": kernel} | assemble(ptx)
                sys.stdout.write(json.dumps(record | {"loops": loops(ptx)}) + "\n")
            for other in Path(directory).glob("*.ptx"):
                other.unlink()
        for head_dim, (name, length), (fuse, gradient) in itertools.product(
            HEAD_DIMS, LENGTHS.items(), WAYS
        ):
            compile_call(head_dim, length, fuse, gradient)
            for ptx in sorted(Path(directory).glob("*.ptx")):
                kernel = re.search(r"\.entry (\w+)\(", ptx.read_text())[1]
                record = {"calls": name, "head_dim": head_dim, "fuse": fuse, "kernel": kernel}
                record |= {"gradient": gradient}
                sys.stdout.write(json.dumps(record | assemble(ptx)) + "\n")
                sys.stdout.flush()
                ptx.unlink()


def compile_call(head_dim: int, length: int, fuse: str, gradient: bool = False) -> None:
    """Have XLA compile a packed call, with its backward pass if that is said, for that GPU."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels
    from compare.implementations.kernels import jax_step
    from pallas_kernels.launching.compile import compiling_by

    shapes = (
        ((TOKENS, 3, HEADS, head_dim), jnp.bfloat16),
        ((TOKENS, head_dim // 2), jnp.float32),
        ((TOKENS, head_dim // 2), jnp.float32),
        ((TOKENS // length + 1,), jnp.int32),
    )
    attend = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=length,
        fuse=fuse,
        implementation="kernel",
    )
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    if gradient:
        arguments.append(jax.ShapeDtypeStruct((TOKENS, HEADS, head_dim), jnp.bfloat16))
    with compiling_by("xla"):
        compile_for_gpu(jax_step(attend) if gradient else jax.jit(attend), *arguments)


@contextlib.contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Have what C++ prints in a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def kernels_in(printed: Path) -> Iterator[tuple[str, Path]]:
    """Each kernel that Mosaic printed, and a file of its own."""
    for text in re.split(r"(?=^\.version )", printed.read_text(), flags=re.MULTILINE)[1:]:
        kernel = re.search(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", text)[1]
        ptx = printed.with_name(kernel)
        ptx.write_text(text)
        yield kernel, ptx


def compile_hopper(head_dim: int) -> None:
    """Have Mosaic compile the warp-specialized kernels of one image, and of its gradients."""
    import jax

    from pallas_kernels.launching import choose

    described = (SimpleNamespace(compute_capability="9.0"),)
    with mock.patch.object(choose, "local_gpus", return_value=described):
        compile_call(head_dim, TOKENS, "none", gradient=True)
    jax.clear_caches()  # what was traced knows nothing of GPUs


def forget_this_machine() -> None:
    """Keep JAX, not yet imported, from asking for a driver or a GPU."""
    # The versions of CUDA's libraries can only be asked for where there is a driver.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def compile_for_gpu(jitted: Any, *arguments: Any) -> Any:
    """Compile for the described GPU.

    Args:
        jitted: what `jax.jit` returned.
        arguments: pytrees of anything that has a shape and a dtype.

    Returns:
        A jax.stages.Compiled.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    described = AbstractMesh(
        (1,),
        ("x",),
        axis_types=(AxisType.Auto,),
        abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"),
    )
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    with jax.sharding.use_abstract_mesh(described):
        lowered = jitted.lower(*arguments)
    return lowered.compile()


def loops(ptx: Path) -> list[dict[str, int]] | None:
    """What each loop that multiplies consists of; None where there is no disassembler."""
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        return None
    with tempfile.NamedTemporaryFile() as cubin:
        subprocess.run([find_ptxas(), "-arch", "sm_90a", ptx, "-o", cubin.name], check=True)
        command = [disassembler, "-c", cubin.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        {
            "instructions": len(loop),
            "zeroing": sum(x.startswith("CS2R") for x in loop),
            "spills": sum(x.startswith(LOCAL_MEMORY) for x in loop),
        }
        for loop in product_loops(sass)
    ]


def assemble(ptx: Path) -> dict[str, int]:
    """Registers a thread, bytes that it spills, whether its products wait for each other."""
    command = [find_ptxas(), "-arch", "sm_90a", "-v", ptx, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": int(spilled[1]) + int(spilled[2]),
        "serial": "serialized" in said,
    }


if __name__ == "__main__":
    main()
