"""How patches get to a GPU: on a CPU with stand-ins for CUDA's streams and events."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.torch_tower import device as torch_device  # noqa: E402
from compare.torch_tower import inputs  # noqa: E402
from flax_models.common.layout import plan_layout  # noqa: E402
from tests.tower_checkpoints import GRIDS, SMALL_TOWERS, random_patches  # noqa: E402


class Event:
    def __init__(self, number, waited_for):
        self.number = number
        self.waited_for = waited_for

    def synchronize(self):
        self.waited_for.append(self.number)


class Streams:
    """One of uploads and the current one: tells on which of them events were recorded and tensors
    are read, and which events, numbered from 1, were waited for.
    """

    def __init__(self):
        self.recorded, self.waited_for, self.read = [], [], []

    def called(self, name):
        def record_event():
            self.recorded.append(name)
            return Event(len(self.recorded), self.waited_for)

        return SimpleNamespace(name=name, record_event=record_event)


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: streams.called("uploads"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.called("current"))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: streams.read.append(stream.name)
    )
    return streams


@pytest.fixture
def uploader(streams):
    return torch_device.Uploader(torch.device("cpu"))


def test_an_upload_waits_for_what_the_one_before_the_last_found_queued(streams, uploader):
    """And its memory is not given to others before that stream has read it."""
    for _ in range(5):
        uploader.copy(torch.zeros(1))
    # The first two events stand for uploads before the first; from then on each records its own.
    assert streams.waited_for == [1, 2, 3, 4, 5]
    assert streams.recorded == ["uploads"] * 2 + ["current"] * 5
    assert streams.read == ["current"] * 5


def test_an_upload_that_fails_leaves_its_place_to_others(streams, uploader):
    for _ in range(3):
        with pytest.raises(AttributeError):
            uploader.copy(None)
    for _ in range(3):
        uploader.copy(torch.zeros(1))
    assert len(streams.waited_for) == 6


def test_threads_wait_for_their_turn(streams, uploader):
    tensors = [torch.full((3,), float(n)) for n in range(100)]
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(uploader.copy, tensors)]
    assert all(map(torch.equal, found, tensors))
    assert sorted(streams.waited_for) == [*range(1, 101)]


def test_a_layout_does_not_come_to_a_gpu_in_what_a_caller_records(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layout = plan_layout(SMALL_TOWERS["head_dim_16"], GRIDS["clip"])
    with pytest.raises(RuntimeError, match="record `encode` of what `prepare` returned before"):
        inputs.layout_tensors(layout, torch.device("cuda", 0))
    on_cpu = inputs.layout_tensors(layout, torch.device("cpu"))
    assert on_cpu.window_order.device.type == "cpu"


def test_a_layout_is_uploaded_once_and_not_behind_what_the_gpu_has_to_do(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("waits for the GPU")

    uploaded = []
    monkeypatch.setattr(inputs, "upload", lambda flat, to: uploaded.append(to) or flat)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    layout = dataclasses.replace(plan_layout(SMALL_TOWERS["head_dim_16"], GRIDS["clip"]))
    gpu = torch.device("cuda", 3)
    found = inputs.layout_tensors(layout, gpu)
    assert inputs.layout_tensors(layout, gpu) is found
    assert uploaded == [gpu]
    for name, array in inputs.layout_arrays(layout).items():
        assert vars(found)[name].tolist() == array.tolist()


def test_free_memory_is_what_pytorch_keeps_for_later_too(monkeypatch):
    answers = {"memory_reserved": 50, "memory_allocated": 30, "mem_get_info": (100, 200)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    assert torch_device.free_memory(torch.device("cuda", 0)) == 100 + 50 - 30
    assert torch_device.free_memory(torch.device("cpu")) is None


def test_a_layout_is_copied_for_each_stream(monkeypatch):
    """Another would not wait for the transfer."""
    held = SimpleNamespace(to=lambda device, non_blocking: object())
    monkeypatch.setattr(inputs, "_on_host", lambda layout, pin_memory: held)
    current = ["first"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    layout = dataclasses.replace(plan_layout(SMALL_TOWERS["head_dim_16"], GRIDS["clip"]))
    gpu = torch.device("cuda", 0)
    first, second, again = (
        inputs.layout_on_device(layout, gpu) for current[0] in ("first", "second", "first")
    )
    assert first is again
    assert first is not second


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_kernels_are_compiled_for_one_alignment_of_a_layouts_arrays(grid):
    """Triton compiles anew for a pointer that is no multiple of 16 bytes."""
    layout = plan_layout(SMALL_TOWERS["head_dim_16"], grid)
    flat = inputs.layout_on_device(layout, torch.device("cpu"))
    arrays = inputs.layout_arrays(layout)
    views = vars(inputs.unflatten(layout, flat))
    for name, array in arrays.items():
        assert views[name].storage_offset() * flat.element_size() % 16 == 0
        assert views[name].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("recording", "differentiated"), [(False, False), (True, False), (False, True)]
)
def test_what_a_caller_records_is_not_uploaded_beside_it(monkeypatch, recording, differentiated):
    config = SMALL_TOWERS["head_dim_16"]
    grid = GRIDS["clip"]
    patches = torch.tensor(random_patches(config, grid), requires_grad=differentiated)
    uploaded = []
    monkeypatch.setattr(inputs, "upload", lambda *arguments: uploaded.append(arguments))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    gpu = torch.device("cuda", 0)
    layout = plan_layout(config, grid)
    found = inputs.patches_tensor(config, patches, layout, gpu)
    if recording or differentiated:
        assert found is patches
        assert not uploaded
    else:
        assert uploaded == [(patches, gpu)]
    assert inputs.patches_tensor(config, patches, layout, torch.device("cpu")) is patches
