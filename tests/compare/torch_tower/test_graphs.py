"""The PyTorch tower's recorded passes: on a CPU by a stand-in that runs them anew."""

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

from compare.torch_tower import graphs as torch_graphs  # noqa: E402
from compare.torch_tower import load_vision_tower  # noqa: E402
from compare.torch_tower.attention import rotary_angles  # noqa: E402
from compare.torch_tower.graphs import GraphCache  # noqa: E402
from flax_models import choose_bucket, plan_layout  # noqa: E402
from flax_models.common.layout import OUTPUTS  # noqa: E402
from tests.compare.torch_tower.torch_results import numpy, rows, tensors  # noqa: E402
from tests.cpu_recorder import CpuRecorder  # noqa: E402
from tests.random_calls import random_calls, tokens_of  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    GRIDS,
    WINDOWS_ALONE,
    random_patches,
    write_checkpoint,
)
from tests.tower_contract import FP32_TOLERANCE, relative_error, side_by_side  # noqa: E402


@pytest.fixture
def recorded(monkeypatch):
    """What has been recorded, on a machine without a GPU."""
    return CpuRecorder.stand_in(monkeypatch, torch_graphs).recorded


@pytest.fixture
def recording_tower(recorded, directory):
    """A tower that records and replays, with two buckets."""
    tower = load_vision_tower(directory, torch.float32, "cpu", token_buckets=(64, 448))
    tower.graphs = GraphCache()
    return tower


class Passes:
    """Stands for a tower's pass; keeps the patches that each run read."""

    def __init__(self, tokens=64):
        self.config, self.read = WINDOWS_ALONE, []
        self.bucket = choose_bucket(self.config, [(1, 8, 8)], [tokens])
        self.weight = torch.zeros(1)

    def __call__(self, patches, layout):
        self.read.append(patches.clone())
        return patches.clone()

    def run(self, graphs, grid, **changes):
        layout = replace(plan_layout(self.config, grid, self.bucket), **changes)
        graphs(self, torch.ones(layout.num_tokens, 3), layout, self.weight)


def test_patches_behind_a_shorter_call_are_zero(recorded):
    graphs, passes = GraphCache(), Passes()
    for grid in ([(1, 8, 8)], [(1, 4, 4)]):
        passes.run(graphs, grid)
    assert len(recorded) == 1
    assert passes.read[-1].sum(dim=1).tolist() == [3.0] * 16 + [0.0] * 48


def test_all_that_a_pass_fixes_tells_recordings_apart(recorded):
    graphs, passes = GraphCache(), Passes()
    for longest in (64, 128, 64):
        passes.run(graphs, [(1, 8, 8)], max_frame_seqlen=longest)
    assert len(graphs) == len(recorded) == 2


def test_long_passes_are_not_recorded(recorded):
    graphs, cpu = GraphCache(), torch.device("cpu")
    assert [graphs.takes(tokens, cpu) for tokens in (1 << 15, (1 << 15) + 1)] == [True, False]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_keeps_as_many_recordings(clone):
    assert clone(GraphCache(limit=3)).limit == 3


def test_what_is_recorded_after_parameters_moved_is_recorded_where_they_are(recorded, monkeypatch):
    devices, make = [], CpuRecorder.__init__
    monkeypatch.setattr(
        CpuRecorder, "__init__", lambda self, device: devices.append(device) or make(self, device)
    )
    graphs, passes = GraphCache(), Passes()
    for _ in range(2):
        for longest in (64, 128):
            passes.run(graphs, [(1, 8, 8)], max_frame_seqlen=longest)
        graphs.clear()
    assert len(devices) == 2
    assert len(recorded) == 4


def test_a_recording_that_is_forgotten_has_run(recorded, monkeypatch):
    waited = []
    monkeypatch.setattr(CpuRecorder, "wait", lambda _: waited.append(len(recorded)))
    graphs, passes = GraphCache(limit=1), Passes()
    for longest in (64, 128, 256):
        passes.run(graphs, [(1, 8, 8)], max_frame_seqlen=longest)
    assert waited == [1, 2]


def test_replays_equal_the_pass_itself(config, tower, recording_tower, recorded):
    for name in (*GRIDS, *GRIDS):
        patches = random_patches(config, GRIDS[name])
        ours, expected = (rows(each, patches, GRIDS[name]) for each in (recording_tower, tower))
        assert relative_error(ours, expected) < FP32_TOLERANCE
    assert len(recorded) == len(recording_tower.graphs) == 2


def test_each_output_of_a_bucket_is_recorded(config, tower, recording_tower, recorded):
    grid = GRIDS["clip"]
    for seed in range(2):
        patches = random_patches(config, grid, seed)
        for output in OUTPUTS:
            ours, expected = (
                side_by_side(each(patches, grid, output=output), numpy)
                for each in (recording_tower, tower)
            )
            assert relative_error(ours, expected) < FP32_TOLERANCE
    assert len(recorded) == len(OUTPUTS)


def test_a_result_outlives_the_next_replay(config, recording_tower):
    grid = GRIDS["clip"]
    first = tensors(recording_tower(random_patches(config, grid), grid))
    kept = [result.clone() for result in first]
    recording_tower(random_patches(config, grid, seed=1), grid)
    assert all(map(torch.equal, first, kept))


def test_what_an_earlier_call_left_in_the_padding_is_gone(config, recording_tower):
    small, large = GRIDS["smaller_than_a_window"], GRIDS["one_whole_window"]
    patches = random_patches(config, small)
    before = rows(recording_tower, patches, small)
    recording_tower(np.full((64, config.patch_dim), np.nan, np.float32), large)
    np.testing.assert_array_equal(rows(recording_tower, patches, small), before)


def test_the_least_recently_used_recording_is_forgotten_first(config, recording_tower, recorded):
    recording_tower.graphs = GraphCache(limit=2)
    recording_tower.token_buckets = (16, 32, 64)
    for tokens in (16, 32, 16, 64, 16, 32):
        grid = [(1, 2, tokens // 2)]
        recording_tower(random_patches(config, grid), grid)
    assert [len(tensors(outputs)[0]) * 4 for outputs in recorded] == [16, 32, 64, 32]


def test_recordings_are_forgotten_when_parameters_move(config, recording_tower):
    grid = GRIDS["clip"]
    patches = random_patches(config, grid)
    before = rows(recording_tower, patches, grid)
    recording_tower.half()
    assert len(recording_tower.graphs) == 0
    assert tensors(recording_tower(patches, grid))[0].dtype == torch.float16
    weights = {name: torch.zeros_like(p) for name, p in recording_tower.state_dict().items()}
    recording_tower.load_state_dict(weights, assign=True)
    assert len(recording_tower.graphs) == 0
    assert np.abs(rows(recording_tower, patches, grid)).max() == 0 < np.abs(before).max()


def test_a_tower_that_leaves_the_gpu_records_no_more(config, tower, directory):
    ours = load_vision_tower(directory, torch.float32, "cpu")
    ours.graphs = GraphCache()  # as it is after to("cpu")
    grid = GRIDS["clip"]
    patches = random_patches(config, grid)
    expected = rows(tower, patches, grid)  # on a GPU, where there is one
    assert relative_error(rows(ours, patches, grid), expected) < FP32_TOLERANCE
    assert len(ours.graphs) == 0


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda tower: pickle.loads(pickle.dumps(tower))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_a_tower_records_for_itself(config, recording_tower, clone):
    grid = GRIDS["clip"]
    patches = random_patches(config, grid)
    expected = rows(recording_tower, patches, grid)
    copied = clone(recording_tower)
    assert len(copied.graphs) == 0
    for parameter in recording_tower.parameters():
        parameter.zero_()
    np.testing.assert_array_equal(rows(copied, patches, grid), expected)


def test_what_a_recording_reads_is_kept(config):
    """However many towers there are: it is read from its memory, which nothing else holds."""
    positions = torch.zeros(1, 2, dtype=torch.int32)
    towers = [replace(config, norm_eps=0.1 / n) for n in range(1, 50)]
    with mock.patch.object(torch, "from_numpy", side_effect=torch.from_numpy) as made:
        for _ in range(2):
            for each in towers:
                rotary_angles(each, positions)
    assert made.call_count == len(towers)


def test_threads_may_call_at_once(config, tower, recording_tower):
    names = [*GRIDS] * 4
    inputs = [random_patches(config, GRIDS[name], seed) for seed, name in enumerate(names)]
    with ThreadPoolExecutor(4) as threads:
        ours = [*threads.map(recording_tower, inputs, (GRIDS[name] for name in names))]
    for name, patches, result in zip(names, inputs, ours, strict=True):
        expected = rows(tower, patches, GRIDS[name])
        assert relative_error(side_by_side(result, numpy), expected) < FP32_TOLERANCE


def test_an_interrupted_call_does_not_pass_for_the_last_one(config, recording_tower):
    """The layout may have been copied when the user presses Ctrl-C, or not."""
    grids = [(1, 8, 8), (1, 4, 4)], [(1, 4, 4), (1, 8, 8)]  # of one bucket
    patches = random_patches(config, grids[0])
    before = rows(recording_tower, patches, grids[0])
    copy_ = torch.Tensor.copy_

    def copy_and_interrupt(to, source):
        copy_(to, source)
        if to.dtype == torch.int32:
            raise KeyboardInterrupt

    interrupted = mock.patch.object(torch.Tensor, "copy_", copy_and_interrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        recording_tower(patches, grids[1])
    np.testing.assert_array_equal(rows(recording_tower, patches, grids[0]), before)


def test_a_recording_made_in_inference_mode_serves_outside_of_it(config, recording_tower):
    patches, grid = random_patches(config, GRIDS["clip"]), GRIDS["clip"]
    with torch.inference_mode():
        first = recording_tower(patches, grid)
    for ours, theirs in zip(tensors(recording_tower(patches, grid)), tensors(first), strict=True):
        assert torch.equal(ours, theirs)


def test_a_recording_keeps_nothing_that_its_patches_were_computed_from(config, recording_tower):
    grid = GRIDS["clip"]
    pixels = torch.tensor(random_patches(config, grid), requires_grad=True)
    recording_tower(2 * pixels, grid)
    kept = weakref.ref(pixels)
    del pixels
    assert kept() is None


@pytest.mark.parametrize("graphs", [True, False])
def test_tensors_are_made_where_the_tower_is(config, recording_tower, graphs):
    """Not on PyTorch's default device, which scripts set to the GPU: nothing there is pinned."""
    grid = [(1, 6, 14 + 2 * graphs)]  # that no other call has brought to a device
    patches = torch.tensor(random_patches(config, grid))
    recording_tower.graphs = GraphCache() if graphs else None
    with torch.device("meta"):
        ours = rows(recording_tower, patches, grid)
    np.testing.assert_array_equal(ours, rows(recording_tower, patches, grid))


def test_any_image_takes_few_recordings_and_compilations(tmp_path, recorded):
    """200 images of 56 to 1344 px, one or several a call: at most 16, and none after that."""
    tower = load_vision_tower(write_checkpoint(tmp_path, WINDOWS_ALONE), torch.float32, "cpu")
    tower.graphs = GraphCache()
    torch.compiler.reset()  # past a few variants that other tests compiled there would be no more
    compiler = CompileCounter()
    for block in tower.blocks:
        block.compile(dynamic=True, backend=compiler)
    for count, calls in enumerate((random_calls(0, 100, 1), random_calls(1, 100, 6))):
        for grid in calls:
            patches = np.zeros((tokens_of(grid), WINDOWS_ALONE.patch_dim), np.float32)
            embeddings = tower(patches, grid)
            assert embeddings.shape == (len(patches) // 4, WINDOWS_ALONE.out_hidden_size)
        assert (10, 1)[count] <= len(recorded) <= 16
    assert compiler.frame_count == 1
    so_far = len(recorded)
    for grid in random_calls(2, 10, 3):
        tower(np.zeros((tokens_of(grid), WINDOWS_ALONE.patch_dim), np.float32), grid)
    assert len(recorded) == so_far


def test_graphs_need_a_gpu(directory):
    with pytest.raises(ValueError, match=r"cuda_graphs=True needs .* got device 'cpu'"):
        load_vision_tower(directory, device="cpu", cuda_graphs=True)


@pytest.mark.gpu
def test_graphs_need_the_kernels(directory):
    with pytest.raises(ValueError, match="needs the kernels, got implementation='reference'"):
        load_vision_tower(directory, implementation="reference", cuda_graphs=True)


@pytest.mark.gpu
# PyTorch says so whenever the mode is first set.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replay_does_not_wait_for_the_gpu(config, directory):
    tower = load_vision_tower(directory, torch.float32, compile=False)
    grid = GRIDS["mix"]
    patches = torch.tensor(random_patches(config, grid), device=tower.device)
    expected = tensors(tower(patches, grid))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = tensors(tower(patches, grid))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, ours, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
def test_patches_are_uploaded_while_the_gpu_works(config, directory, graphs, pinned):
    tower = load_vision_tower(directory, torch.float32, compile=False, cuda_graphs=graphs)
    grid = GRIDS["mix"]
    drawn = [torch.tensor(random_patches(config, grid, seed)) for seed in range(8)]
    expected = [tensors(tower(patches.to(tower.device), grid)) for patches in drawn]
    patches = torch.empty_like(drawn[0], pin_memory=pinned)
    tower(patches.zero_(), grid)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    awake = torch.cuda.current_stream().record_event()
    finished, found = [], []
    for values in drawn:
        patches.copy_(values)
        found.append(tensors(tower(patches, grid)))
        finished.append(awake.query())
    torch.cuda.synchronize()
    for ours, wanted in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, wanted))
    # Some calls come back at once, and those after them wait: their patches would take memory.
    assert finished == [False, False, *[True] * 6]


@pytest.mark.gpu
def test_threads_upload_at_once(config, directory):
    tower = load_vision_tower(directory, torch.float32, compile=False)
    names = [*GRIDS] * 8
    inputs = [random_patches(config, GRIDS[name], seed) for seed, name in enumerate(names)]
    calls = list(zip(inputs, (GRIDS[name] for name in names), strict=True))
    expected = [
        tensors(tower(torch.tensor(patches, device=tower.device), grid)) for patches, grid in calls
    ]

    def call(patches, grid):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = tensors(tower(patches, grid))
            torch.cuda.current_stream().synchronize()
        return results

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(call, *zip(*calls, strict=True))]
    for ours, wanted in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, wanted))


@pytest.mark.gpu
def test_streams_take_turns(config, directory):
    tower = load_vision_tower(directory, torch.float32, compile=False)
    names = [*GRIDS] * 4
    inputs = [
        torch.tensor(random_patches(config, GRIDS[name], seed), device=tower.device)
        for seed, name in enumerate(names)
    ]
    calls = list(zip(inputs, (GRIDS[name] for name in names), strict=True))
    expected = [tensor for call in calls for tensor in tensors(tower(*call))]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    ours = []
    for number, call in enumerate(calls):
        with torch.cuda.stream(streams[number % 3]):
            ours += tensors(tower(*call))
    torch.cuda.synchronize()
    assert all(map(torch.equal, ours, expected))


@pytest.mark.gpu
def test_a_layout_that_another_tower_is_still_bringing_over(config, directory):
    towers = [load_vision_tower(directory, torch.float32, compile=False) for _ in range(2)]
    same_bucket, grid = [(1, 8, 8), (1, 4, 4)], [(1, 4, 4), (1, 8, 8)]
    patches = torch.tensor(random_patches(config, grid), device=towers[0].device)
    streams = [torch.cuda.Stream() for _ in towers]
    for tower, stream in zip(towers, streams, strict=True):
        with torch.cuda.stream(stream):
            tower(patches, same_bucket)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10**8)
        towers[0](patches, grid)
    with torch.cuda.stream(streams[1]):
        ours = tensors(towers[1](patches, grid))
    torch.cuda.synchronize()
    assert all(map(torch.equal, ours, tensors(towers[1](patches, grid))))
