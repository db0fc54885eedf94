"""The machine: is there a GPU, what are the frameworks told about it, and what ran on it."""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

FA3_LIBRARY = "FA3_LIBRARY"  # environment: path of vLLM's FA3 binary, which loads without vLLM
_REPORTED_PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "flax",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "vllm",
)


@functools.cache
def gpu_count() -> int:
    """The number of GPUs that the CUDA driver sees, asked without importing a framework."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def has_gpu() -> bool:
    """Whether the CUDA driver sees a GPU."""
    return gpu_count() > 0


def cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not where the system binds no process
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def configure() -> None:
    """Set what the frameworks read from the environment; call before importing any of them.

    Without a GPU Triton interprets its kernels, which it decides when it is imported. With one, JAX
    takes half of the GPU's memory at its start instead of three quarters, as PyTorch shares it.
    (Taken bit by bit, memory comes in pieces of up to twice the size asked for, and JAX counts them
    whole: 44 MiB more for a tower.) What the user set stays.
    """
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # JAX refuses it under its old and its new name together.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ".5")


def device_name() -> str:
    """The first GPU's name as the driver gives it, or "CPU"."""
    if not has_gpu():
        return "CPU"
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.split()
    return lines[0] if lines else None


def versions() -> dict[str, str]:
    """Version of Python and of every package here that a result can depend on.

    A library that comes without a package, and so without a version, is named by its content.
    """
    found = {"python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    library = Path(os.environ.get(FA3_LIBRARY, ""))
    if library.is_file():
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        found["FA3"] = f"{library.name} (sha256 {digest[:12]})"
    return found
