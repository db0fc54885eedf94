"""The recorder of PyTorch's passes: on a CPU beside stand-ins for what it calls."""

import contextlib
import functools
import os
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.bench.jax_profiler import profile  # noqa: E402
from compare.torch_tower import graphs  # noqa: E402
from compare.torch_tower.graphs import Recorder  # noqa: E402
from tests.compare.torch_tower.torch_results import numpy  # noqa: E402
from tests.tower_contract import relative_error  # noqa: E402


@pytest.fixture
def cuda(monkeypatch):
    """Stands for torch.cuda, as far as a recorder uses it."""
    for name in ("CUDAGraph", "Event", "Stream", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("device", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    return torch.cuda


@pytest.fixture
def workspace_sizes(monkeypatch):
    """What cuBLAS' workspace has been set to, the last of which it is now: PyTorch from 2.13 on."""
    sizes = [1 << 25]

    def workspace_size(size=None):
        sizes.extend([] if size is None else [size])
        return sizes[-1]

    cuda = torch.backends.cuda
    monkeypatch.setattr(cuda, "cublaslt_workspace_size", workspace_size, raising=False)
    return sizes


@pytest.fixture(autouse=True)
def _blas_library(monkeypatch):
    """What was asked to multiply: without CUDA, PyTorch refuses to be told."""
    asked = ["cublas"]

    def preferred_blas_library(library=None):
        asked.extend([] if library is None else [library])
        return asked[-1]

    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred_blas_library)


@pytest.fixture(params=["with a bias", "alone"])
def product(request):
    """A product for which cuBLAS uses a workspace (seen on an H200)."""
    x, weight = (torch.randn(rows, 1280, device="cuda").bfloat16() for rows in (2304, 6912))
    if request.param == "alone":
        return functools.partial(torch.mm, x, weight.T)
    bias = torch.randn(6912, device="cuda").bfloat16()
    return functools.partial(torch.addmm, bias, x, weight.T)


def test_what_a_failed_call_had_queued_is_waited_for(cuda):
    """No memory is left for the results of a replay, for instance."""
    recorder = Recorder(torch.device("cuda"))
    with pytest.raises(MemoryError), recorder.turn():
        raise MemoryError
    cuda.Event.return_value.record.assert_called_once_with(cuda.current_stream.return_value)


def test_a_turn_begins_when_the_one_before_has_run(cuda):
    recorder = Recorder(torch.device("cuda"))
    stream, finished = cuda.current_stream.return_value, cuda.Event.return_value
    with recorder.turn():
        stream.wait_event.assert_called_once_with(finished)
        finished.record.assert_not_called()
    finished.record.assert_called_once_with(stream)
    recorder.wait()
    finished.synchronize.assert_called_once_with()


def test_a_recording_begins_when_what_it_reads_is_there(cuda, workspace_sizes):
    """And the capture when all before it has run, as nothing may be waited for within."""
    order, stream = [], cuda.Stream.return_value
    stream.wait_stream.side_effect = lambda other: order.append(("waits for", other))
    stream.synchronize.side_effect = lambda: order.append("synchronized")
    cuda.CUDAGraph.side_effect = lambda: order.append("captures") or mock.MagicMock()
    Recorder(torch.device("cuda")).record(lambda: order.append("runs"))
    caller = cuda.current_stream.return_value
    expected = [("waits for", caller), "runs", "runs", "synchronized", "captures", "runs"]
    assert order == expected


def test_recordings_share_memory_and_let_other_threads_allocate_theirs(
    cuda, workspace_sizes, monkeypatch
):
    captures = mock.MagicMock(return_value=contextlib.nullcontext())
    monkeypatch.setattr(cuda, "graph", captures)
    recorder = Recorder(torch.device("cuda"))
    for _ in range(2):
        recorder.record(lambda: None)
    cuda.graph_pool_handle.assert_called_once_with()
    graph, memory = cuda.CUDAGraph.return_value, cuda.graph_pool_handle.return_value
    expected = mock.call(graph, memory, cuda.Stream.return_value, capture_error_mode="thread_local")
    assert captures.call_args_list == [expected, expected]


@pytest.mark.parametrize("before", [None, "4096"])
def test_products_are_recorded_without_workspace_where_a_variable_sets_it(monkeypatch, before):
    """PyTorch before 2.13."""
    monkeypatch.delattr(torch.backends.cuda, "cublaslt_workspace_size", raising=False)
    name = graphs._WORKSPACE_VARIABLE
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with contextlib.suppress(MemoryError), graphs._no_cublas_workspace():
        assert os.environ[name] == "0"
        raise MemoryError
    assert os.environ.get(name) == before


def test_products_are_recorded_without_workspace_where_pytorch_sets_it(workspace_sizes):
    with contextlib.suppress(MemoryError), graphs._no_cublas_workspace():
        assert workspace_sizes[-1] == 0
        raise MemoryError
    assert workspace_sizes == [1 << 25, 0, 1 << 25]


def test_the_first_pass_on_a_stream_has_a_workspace(cuda, workspace_sizes):
    """PyTorch keeps it for whoever is given that stream next; only cuBLASLt can be told to have
    none.
    """
    asked = []
    before = torch.backends.cuda.preferred_blas_library()

    def run():
        asked.append((workspace_sizes[-1], torch.backends.cuda.preferred_blas_library() == before))

    Recorder(torch.device("cuda")).record(run)
    assert asked == [(1 << 25, False), (0, False), (0, False)]
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.gpu
def test_a_recorded_product_is_one_kernel(product):
    """With a workspace cuBLAS sets a counter in it to zero first."""
    replay, recorded = Recorder(torch.device("cuda")).record(product)

    def replay_and_wait():
        replay()
        torch.cuda.synchronize()

    replay_and_wait()
    profiled = profile(replay_and_wait, 1)
    assert profiled.kernels_per_call == 1, profiled.by_kernel()
    assert relative_error(numpy(recorded), numpy(product())) < 1e-3


@pytest.mark.gpu
def test_products_run_on_a_stream_that_a_pass_was_recorded_on(product):
    """PyTorch hands out its 32 streams in turn, so that others get a recorder's."""
    recorder = Recorder(torch.device("cuda"))
    recorder.record(product)
    others = [torch.cuda.Stream() for _ in range(32)]
    assert recorder._stream in others
    expected = product()
    torch.cuda.synchronize()
    for stream in others:
        with torch.cuda.stream(stream):
            assert relative_error(numpy(product()), numpy(expected)) < 1e-3
