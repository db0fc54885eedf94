"""Which calls share a binary, shown without a GPU by a stand-in for Triton's launcher."""

import pytest
import torch

from tests.triton_kernels.stand_ins import Driver
from triton_kernels.launching import launch
from triton_kernels.launching.table import Launch

LAUNCH = Launch(64, 64, 4, 1)
X = torch.zeros(4, dtype=torch.bfloat16)


class Binary:
    """Notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls):
        self.calls = calls

    def run(self, *arguments):
        self.calls.append(("binary", arguments[:3], arguments[9:]))
        assert arguments[3:9] == ("stream", "function", "metadata", None, None, None)


class Kernel:
    __name__ = "kernel"

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def launched(*arguments, **options):
            self.calls.append(("triton", grid, arguments, options))
            return Binary(self.calls)

        return launched


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "CompiledKernel", Binary)
    monkeypatch.setattr(launch, "driver", Driver)
    return Kernel()


def call(kernel, programs=7, numbers=(100, 0.5), aligned=True, **kind):
    """A call of one kind; what its binary depends on may be another's."""
    kind = {
        "dtypes": (X.dtype,),
        "device": X.device,
        "constants": (16, 80),
        "launch": LAUNCH,
    } | kind
    binary = launch.binary_of(kernel, **kind) if aligned else None
    device = kind["device"].index
    return launch.Call(kernel, programs, kind["launch"], numbers, kind["constants"], device, binary)


def run(kernel, **options):
    launch.launch_kernel(call(kernel, **options), [X], [X.data_ptr()])


def launched_by(kernel):
    return [call[0] for call in kernel.calls]


def test_triton_looks_at_the_first_call_alone(kernel):
    run(kernel, programs=7, numbers=(100, 0.5))
    run(kernel, programs=9, numbers=(200, 0.25))
    assert launched_by(kernel) == ["triton", "binary"]
    _, grid, arguments, options = kernel.calls[0]
    assert (grid, arguments) == ((7,), (X, 100, 0.5, 16, 80))
    assert options["num_warps"] == 4
    assert options["maxnreg"] is None
    assert kernel.calls[1] == ("binary", (9, 1, 1), (X.data_ptr(), 200, 0.25, 16, 80))


@pytest.mark.parametrize(
    "other",
    [
        {"dtypes": (torch.float16,)},
        {"dtypes": (X.dtype, torch.float32)},
        {"device": torch.device("cuda", 1)},
        {"constants": (16, 72)},
        {"launch": LAUNCH._replace(maxnreg=128)},
    ],
)
def test_what_a_binary_depends_on(kernel, other):
    run(kernel)
    run(kernel, **other)
    assert launched_by(kernel) == ["triton", "triton"]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_are_left_to_triton(kernel, name):
    hooks = getattr(launch.knobs.runtime, name)
    run(kernel)
    hooks.add(print)
    try:
        run(kernel)
    finally:
        hooks.remove(print)
    run(kernel)
    assert launched_by(kernel) == ["triton", "triton", "binary"]


def test_unaligned_tensors_are_looked_at_each_time(kernel):
    for _ in range(2):
        run(kernel, aligned=False)
    assert launched_by(kernel) == ["triton", "triton"]


def test_a_part_of_a_tensor_is_its_address_or_its_view(kernel):
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    part = x.select(1, 2)
    for _ in range(2):
        launch.launch_kernel(call(kernel), [X, x], [part.data_ptr()])
    (_, _, (seen, *_), _), (_, _, (address, *_)) = kernel.calls
    assert (seen.data_ptr(), seen.shape, seen.stride()) == (address, part.shape, part.stride())
