"""What holds for all tests: the frameworks' environment, the `gpu` marker, hypothesis' profile."""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from compare.common.environment import configure, gpu_count
from tests import interpreter, maps

pytest_plugins = ["tests.ending"]

# Their assertions show values too.
_CONTRACTS = sorted(path.stem for path in Path(__file__).parent.glob("*_contract.py"))
pytest.register_assert_rewrite("tests.kernel_cases", *(f"tests.{name}" for name in _CONTRACTS))

# Of several processes each has its core: PyTorch's threads wait for each other by spinning, and a
# process's second one would spin on the core of its neighbour. Nor does each need a pool of
# processes to compile in.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Processes of a test run share the GPU: JAX takes memory as it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# XLA's threads on a CPU: groups of warps that wait for each other in Pallas' interpreter take one
# each, and with as few as two cores have they would wait for ever.
os.environ.setdefault("NPROC", "8")
# Before any test imports a framework: without a GPU Triton's kernels are interpreted.
configure()
if importlib.util.find_spec("jaxlib"):
    # The tests compile much and run little. On a GPU half of XLA's time goes into trials of its own
    # products, without one into optimising. Of two values for a flag XLA takes the last, the
    # user's.
    flags = ["--xla_gpu_autotune_level=0"]
    if gpu_count() == 0:
        flags = ["--xla_backend_optimization_level=0"]
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.12 does not start with it
            flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
interpreter.speed_up()
# What is traced and compiled is all objects that live on: Python's collector goes through them over
# and over, for a tenth of the time, where it may wait for more of them.
gc.set_threshold(10_000, 10, 10)

# The same examples in every run, and no failure because a shared machine was slow for a moment. The
# contract suites are inherited: that several classes run a test is their purpose.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("repeatable")


def pytest_configure(config):
    config.option.loadscopereorder = False  # but as below


def pytest_collection_modifyitems(items):
    """Of several processes none is to be left alone with the longest class at the end: what takes
    long begins first. A mark counts for as many tests as take its time.

    Skip what needs more GPUs than there are; a framework without CUDA: see its folder.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = collections.Counter()
        for item in items:
            tests[_scope(item)] += 20 if item.get_closest_marker("long") else 1
        items.sort(key=lambda item: -tests[_scope(item)])
    for item in items:
        needed = max((_gpus_needed(*m.args) for m in item.iter_markers("gpu")), default=0)
        if needed > gpu_count():
            gpus = "a CUDA GPU" if needed == 1 else f"{needed} CUDA GPUs"
            reason = f"needs {gpus}, and the CUDA driver sees {gpu_count() or 'none'}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def found(monkeypatch):
    """What the Triton package makes of the Pallas kernels of calls that a test lowers."""
    from tests.pallas_kernels.compiling import noting_kernels

    with noting_kernels(monkeypatch) as noted:
        yield noted


def _scope(item):
    """What xdist hands out as one: a class's tests, or those of a file that are in none."""
    return item.nodeid.split("[")[0].rsplit("::", 1)[0]


def _gpus_needed(count=1):
    return count


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item):
    """JAX leaves a thread the GPU that it used last, which PyTorch takes for its current one."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch and torch.cuda.is_available():
        torch.cuda.set_device(0)


@pytest.hookimpl(wrapper=True)  # after fixtures, one of which may stand in for what is asked here
def pytest_runtest_teardown():
    yield
    maps.give_back_now_and_then()
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()  # which other processes want


@pytest.fixture
def compilations():
    """A name for each program that XLA compiles while the test runs."""
    monitoring = pytest.importorskip("jax").monitoring
    compiled = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name", event))

    monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    monitoring.unregister_event_duration_listener(listen)
