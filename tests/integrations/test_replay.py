"""Calls of an accelerated tower as CUDA graphs: on a CPU by a stand-in that runs them anew."""

import contextlib
import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import profiler_legacy

from tests.cpu_recorder import CpuRecorder
from tests.integrations import families
from tests.integrations.hugging_face import (
    DEVICE,
    GRIDS,
    make_tower,
    random_inputs,
    tensors_of,
)
from triton_kernels.integrations import plan, replay
from triton_kernels.integrations.transformers import accelerate, restore

pytestmark = pytest.mark.skipif(
    not plan.PRECOMPUTED, reason="towers of transformers 4.57 wait for the GPU in every call"
)
CALLS = 3  # the call of a size that is the first to be replayed
IMAGE = GRIDS["image"]


class Counted(replay.Recorder):
    """A GPU's recorder that keeps count as the stand-in does."""

    recorded, replayed = [], []

    def record(self, run):
        play, outputs = super().record(run)
        self.recorded.append(outputs)
        return lambda: self.replayed.append(outputs) or play(), outputs


class Outdated(CpuRecorder):
    """What was recorded before a change writes NaN after it, as on a GPU it would other numbers."""

    changed = False

    def record(self, run):
        play, outputs = super().record(run)
        before = not self.changed

        def replay():
            play()
            if self.changed and before:
                for written in tensors_of(outputs):
                    written.fill_(torch.nan)

        return replay, outputs


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(Outdated, "changed", False)
        return Outdated.stand_in(monkeypatch, replay)
    monkeypatch.setattr(Counted, "recorded", [])
    monkeypatch.setattr(Counted, "replayed", [])
    monkeypatch.setattr(replay, "Recorder", Counted)
    return Counted


def make(family="qwen2_5"):
    return make_tower(family).bfloat16().requires_grad_(False)


def call(tower, grid=IMAGE, seed=0, **further):
    return tensors_of(tower(*random_inputs(tower, grid, seed), **further))


def replayed_tower(recorder, family="qwen2_5"):
    """A tower whose next call of IMAGE is replayed."""
    tower = accelerate(make(family))
    for _ in range(CALLS):
        call(tower)
    assert len(recorder.recorded) == len(recorder.replayed) == len(tower.recordings) == 1
    recorder.replayed.clear()
    return tower


def assert_same(results, expected):
    assert len(results) == len(expected)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_replays_have_the_bits_of_the_calls(recorder, family):
    eager = accelerate(make(family), cuda_graphs=False)
    tower = accelerate(make(family))
    results = {}
    for seed in range(4):
        with torch.inference_mode() if seed % 2 else contextlib.nullcontext():
            for name, grid in GRIDS.items():
                results[seed, name] = call(tower, grid, seed)
    assert len(recorder.recorded) == len(tower.recordings) == len(GRIDS)
    assert len(recorder.replayed) == len(GRIDS) * 2
    for (seed, name), found in results.items():  # which later replays have not written to
        assert_same(found, call(eager, GRIDS[name], seed))
    assert type(tower(*random_inputs(tower, IMAGE))) is type(eager(*random_inputs(eager, IMAGE)))


@pytest.mark.skipif(not plan.BOUNDED, reason="this transformers takes no bound")
@pytest.mark.parametrize("model", ["kimi_k25", "muse_spark", "video_llama_3"])
def test_towers_that_work_out_more_of_a_grid_are_replayed_too(recorder, model):
    tower = families.make(model).bfloat16().requires_grad_(False)
    patches, further = families.random_call(model, tower, [(2, 4, 6), (1, 2, 4)])
    patches = patches.bfloat16()
    accelerate(tower)
    for _ in range(CALLS):
        results = tensors_of(tower(patches, **further))
    assert len(recorder.recorded) == len(recorder.replayed) == 1
    assert_same(
        results, tensors_of(accelerate(restore(tower), cuda_graphs=False)(patches, **further))
    )


def load(tower):
    tower.load_state_dict({name: x + 0.1 for name, x in tower.state_dict().items()})


def write_in_place(tower):
    tower.blocks[1].attn.proj.weight.mul_(1.5)


@pytest.mark.parametrize("change", [load, write_in_place])
def test_a_recording_reads_the_weights_of_now(recorder, change):
    tower = replayed_tower(recorder)
    before = call(tower)
    change(tower)
    results = call(tower)
    assert len(recorder.replayed) == 2
    assert not torch.equal(results[-1], before[-1])
    assert_same(results, call(restored(tower)))


def restored(tower):
    """A copy that has forgotten all, and calls layer by layer."""
    return accelerate(restore(copy.deepcopy(tower)), cuda_graphs=False)


def replace_data(tower):
    tower.blocks[1].attn.proj.weight.data = tower.blocks[1].attn.proj.weight * 1.5


def replace_a_parameter(tower):
    proj = tower.blocks[1].attn.proj
    proj.weight = nn.Parameter(proj.weight * 1.5, requires_grad=False)


def replace_a_layer(tower):
    proj = copy.deepcopy(tower.blocks[1].attn.proj)
    proj.weight.mul_(1.5)
    tower.blocks[1].attn.proj = proj


def change_a_setting(tower):
    tower.blocks[1].attn.scaling *= 1.5


def put_a_forward(tower):
    proj = tower.blocks[1].attn.proj
    forward = proj.forward
    proj.forward = lambda x: 1.5 * forward(x)


def add_a_hook(tower):
    tower.blocks[1].attn.proj.register_forward_hook(lambda _module, _x, y: 1.5 * y)


def add_a_layer(tower):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 1.5 * super().forward(x)

    tower.blocks[1].attn.proj.__class__ = Scaled


def train(tower):
    tower.blocks[1].train()


@pytest.mark.parametrize(
    "change",
    [
        replace_data, replace_a_parameter, replace_a_layer, change_a_setting, put_a_forward,
        add_a_hook, add_a_layer, train,
    ],
)  # fmt: skip
def test_a_tower_that_changed_is_recorded_anew_or_called(recorder, change):
    """And has given the memory of the recording back."""
    tower = replayed_tower(recorder)
    change(tower)
    recorder.changed = True
    results = [call(tower) for _ in range(CALLS)]
    known = change in (replace_data, replace_a_parameter, replace_a_layer, change_a_setting)
    assert len(recorder.recorded) == 1 + known
    if change is not add_a_hook:  # without which it counts again
        assert len(tower.recordings) == int(known)
    unchanged = call(accelerate(make(), cuda_graphs=False))
    assert torch.equal(results[0][-1], unchanged[-1]) == (change is train)
    for found in results[1:]:
        assert_same(found, results[0])


def test_a_global_hook_sees_every_layer(recorder):
    tower, seen = replayed_tower(recorder), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    call(tower)
    hook.remove()
    assert set(tower.blocks) < set(seen)
    assert not recorder.replayed
    call(tower)
    assert len(recorder.replayed) == 1


def in_training(tower):
    tower.requires_grad_()
    assert call(tower)[-1].requires_grad


def in_autocast(tower):
    with torch.autocast(DEVICE, torch.bfloat16):
        call(tower)


def in_fp32(tower):
    tower.float()
    call(tower)


def in_a_profiler(tower):
    # The one without Kineto, which would keep the GPU from JAX's profiler as long as the process
    # lives, whatever it is asked to leave out.
    with profiler_legacy.profile() as profiled:
        call(tower)
    assert any("linear" in event.key for event in profiled.key_averages())


def with_an_argument_more(tower):
    call(tower, output_hidden_states=True)


def with_segments_given(tower):
    tokens = IMAGE[0][1] * IMAGE[0][2]
    call(tower, cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE))


def compiled(tower):
    torch.compiler.reset()
    torch.compile(tower, backend="eager")(*random_inputs(tower, IMAGE))


def of_many_tokens(tower):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(replay, "_MOST_TOKENS", 139)  # of the image's 140
        call(tower)


@pytest.mark.parametrize(
    "use",
    [
        in_training, in_autocast, in_fp32, in_a_profiler, with_an_argument_more,
        with_segments_given, compiled, of_many_tokens,
    ],
)  # fmt: skip
def test_what_is_not_replayed(recorder, use):
    tower = replayed_tower(recorder)
    for _ in range(CALLS):
        use(tower)
    assert not recorder.replayed
    assert len(recorder.recorded) == 1


def test_sizes_that_come_in_turn_are_not_recorded(recorder):
    tower = accelerate(make())
    for width in range(2, 20, 2):
        call(tower, [(1, 2, width)])
    for _ in range(CALLS - 1):
        for width in range(2, 20, 2):
            call(tower, [(1, 2, width)])
    assert not recorder.recorded


def test_the_size_that_came_longest_ago_is_forgotten(recorder):
    tower = replayed_tower(recorder)
    for width in (2, 4, 6, 8, 10, 12, 14):
        call(tower, [(1, 2, width)])
    call(tower)
    assert len(recorder.replayed) == 1
    for width in range(2, 18, 2):
        call(tower, [(1, 2, width)])
    assert len(tower.recordings) == 0


def test_a_call_that_cannot_be_recorded_goes_on(recorder, monkeypatch):
    """What waits for the GPU, for instance: later calls don't try again."""
    tower = accelerate(make())
    expected = call(tower)
    tries = []

    def fail(self, run):
        tries.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", fail)
    for _ in range(2 * CALLS):
        assert_same(call(tower), expected)
    assert len(tries) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_records_for_itself(recorder, copied):
    tower = replayed_tower(recorder)
    other = copied(tower)
    write_in_place(other)
    for _ in range(CALLS):
        results = call(other)
    assert len(recorder.recorded) == len(recorder.replayed) + 1 == 2
    assert not torch.equal(results[-1], call(tower)[-1])


def test_memory_is_free_with_the_last_reference(recorder):
    tower = accelerate(make())
    for _ in range(CALLS - (DEVICE == "cpu")):  # where the stand-in runs the tower itself
        call(tower)
    weight = weakref.ref(tower.blocks[1].mlp.down_proj.weight)
    gc.disable()
    try:
        del tower
        recorder.recorded.clear()  # what the test itself keeps
        assert weight() is None
    finally:
        gc.enable()


def test_a_tower_shows_its_own_name_and_signature(tmp_path):
    tower = make()
    own = type(tower)
    accelerate(tower).save_pretrained(tmp_path)
    assert tower.config.architectures == [own.__name__]
    assert type(tower) is not own
    assert str(tower.forward.__wrapped__) == str(own.forward)
    restore(tower)
    assert type(tower) is own
    assert "recordings" not in vars(tower)


@pytest.mark.gpu
def test_a_tower_that_waits_is_called():
    """Its capture fails, and leaves PyTorch as it was."""
    tower = accelerate(make())
    forward = type(tower.patch_embed).forward

    def waits(self, x):
        return forward(self, x) * (1 + 0 * x.float().sum().item())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(type(tower.patch_embed), "forward", waits)
        monkeypatch.setattr(replay, "_is_foreign", lambda _: False)
        stream = torch.cuda.current_stream()
        results = [call(tower) for _ in range(2 * CALLS)]
    assert torch.cuda.current_stream() == stream
    assert len(tower.recordings) == 0
    for found in results:
        assert_same(found, call(accelerate(make(), cuda_graphs=False)))


@pytest.mark.gpu
def test_threads_and_streams_at_once(recorder):
    tower = replayed_tower(recorder)
    inputs = [random_inputs(tower, IMAGE, seed) for seed in range(32)]
    expected = [tensors_of(tower(*given))[-1] for given in inputs]

    def call_on_a_stream(given):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            result = tensors_of(tower(*given))[-1]
        stream.synchronize()
        return result

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call_on_a_stream, inputs))
    assert all(map(torch.equal, found, expected))
    assert len(recorder.recorded) == 1
