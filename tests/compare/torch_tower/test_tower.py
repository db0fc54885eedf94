"""The PyTorch tower: what every tower must do, and that it is the Flax tower's twin."""

import copy
import dataclasses
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402

from compare.torch_tower.inputs import layout_tensors  # noqa: E402
from compare.torch_tower.tower import encode, load_vision_tower  # noqa: E402
from flax_models import plan_layout  # noqa: E402
from tests.compare.torch_tower.torch_results import numpy, rows, tensors  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    GRIDS,
    SMALL_TOWERS,
    WINDOWS_ALONE,
    config_json,
    random_patches,
    random_tensors,
    write_checkpoint,
)
from tests.tower_contract import (  # noqa: E402
    FP32_TOLERANCE,
    HuggingFaceContract,
    TowerContract,
    relative_error,
    side_by_side,
)


class TorchTower:
    array = staticmethod(torch.tensor)
    module = "compare.torch_tower.tower"

    @staticmethod
    def load(directory, dtype, **options):
        # Compiled blocks have a test of their own: here every tower would compile anew.
        return load_vision_tower(directory, getattr(torch, dtype), compile=False, **options)

    numpy = staticmethod(numpy)

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


class TestTorchTower(TorchTower, TowerContract):
    """What a tower must do by itself."""


class TestTorchTowerAgainstHuggingFace(TorchTower, HuggingFaceContract):
    """Equality with Hugging Face's tower."""


def test_the_tower_of_the_experimental_qwen4_is_qwen3_5s(tmp_path):
    theirs = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    values = config_json(SMALL_TOWERS["qwen3_5"])
    del values["model_type"]
    tower = theirs.Qwen4ExpVisionModel(theirs.Qwen4ExpVisionConfig(**values)).eval()
    tensors = {n: torch.from_numpy(x) for n, x in random_tensors(SMALL_TOWERS["qwen3_5"]).items()}
    tower.load_state_dict(tensors)
    tower.save_pretrained(tmp_path)
    patches, grid = random_patches(SMALL_TOWERS["qwen3_5"], GRIDS["mix"]), GRIDS["mix"]
    with torch.no_grad():
        expected = tower(torch.tensor(patches), torch.tensor(grid)).pooler_output
    ours = rows(TorchTower.load(tmp_path, "float32"), patches, grid)
    assert relative_error(ours, expected.numpy()) < FP32_TOLERANCE


class Adapter(torch.nn.Module):
    """As adapter libraries put one in the place of a layer that they know."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, x):
        return 1.5 * self.layer(x)


def test_an_adapter_of_a_layer_takes_effect(config, directory):
    tower = load_vision_tower(directory, torch.float32, compile=False, cuda_graphs=False)
    grid = next(iter(GRIDS.values()))
    patches = random_patches(config, grid)
    expected = rows(tower, patches, grid)
    layers = [n for n, m in tower.named_modules() if isinstance(m, torch.nn.Linear)]
    assert any(name.endswith("qkv") for name in layers)
    for name in layers:
        layer = tower.get_submodule(name)
        tower.set_submodule(name, Adapter(layer))
        assert relative_error(rows(tower, patches, grid), expected) > 1e-4, name
        tower.set_submodule(name, layer)


def test_whoever_hooks_a_module_is_told_of_its_calls(config, directory):
    tower = load_vision_tower(directory, torch.float32, compile=False, cuda_graphs=False)
    called = set()
    for name, module in tower.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    grid = next(iter(GRIDS.values()))
    tower(random_patches(config, grid), grid)
    assert called >= {n for n, m in tower.named_modules() if m._parameters}


def test_equals_the_flax_tower(config, tower, directory):
    pytest.importorskip("flax")
    from flax_models import load_vision_tower as load_flax_tower

    grid = GRIDS["mix"]
    patches = random_patches(config, grid)
    flax = side_by_side(load_flax_tower(directory, "float32")(patches, grid))
    assert relative_error(rows(tower, patches, grid), flax) < FP32_TOLERANCE


def test_many_towers_of_a_process_are_compiled(tmp_path):
    """PyTorch's limit is eight variants, of which each tower takes at least two."""
    torch.compiler.reset()
    grid = GRIDS["smaller_than_a_window"]
    for hidden_size in (16, 32, 48, 64, 80, 96):
        config = dataclasses.replace(WINDOWS_ALONE, hidden_size=hidden_size, depth=2)
        directory = write_checkpoint(tmp_path / str(hidden_size), config)
        tower = load_vision_tower(directory, torch.float32, "cpu", compile=True)
        compiler = CompileCounter()
        for block in tower.blocks:
            block.compile(dynamic=True, backend=compiler)
        tower(random_patches(config, grid), grid)
        assert compiler.frame_count > 0


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda tower: pickle.loads(pickle.dumps(tower))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_copy_is_compiled_as_the_original(directory, clone, compiled):
    tower = load_vision_tower(directory, torch.float32, "cpu", compile=compiled)
    for each in (tower, clone(tower)):
        assert [block._compiled_call_impl is not None for block in each.blocks] == [
            compiled for _ in each.blocks
        ]


def test_nothing_is_recorded_for_gradients(config, tower):
    grid = GRIDS["clip"]
    patches = torch.tensor(random_patches(config, grid), requires_grad=True)
    assert not any(array.requires_grad for array in tensors(tower(patches, grid)))
    assert not any(state.requires_grad for state in tower.hidden_states(patches, grid))
    assert not any(parameter.requires_grad for parameter in tower.parameters())


def test_autocast_changes_no_bit(config, tower):
    grid = GRIDS["clip"]
    patches = random_patches(config, grid)
    expected = tensors(tower(patches, grid))
    states = list(tower.hidden_states(patches, grid))
    with torch.autocast(tower.device.type, torch.bfloat16):
        ours = tensors(tower(patches, grid))
        ours_between = []
        for state in tower.hidden_states(patches, grid):
            assert torch.is_autocast_enabled(tower.device.type), "the caller's own remains"
            ours_between.append(state)
    for results, exact in ((ours, expected), (ours_between, states)):
        assert [x.dtype for x in results] == [torch.float32] * len(exact)
        assert all(map(torch.equal, results, exact))


def test_a_padded_pass_equals_the_unpadded_one(config, tower):
    grid = GRIDS["edge_windows"]
    patches = random_patches(config, grid)
    padded, layout = tower.prepare(patches, grid)
    assert len(padded) > len(patches)
    ours = side_by_side(encode(tower, padded, layout), numpy)[: layout.num_merged]
    layout = layout_tensors(plan_layout(config, grid), tower.device)
    unpadded = encode(tower, torch.tensor(patches, device=tower.device), layout)
    assert relative_error(ours, side_by_side(unpadded, numpy)) < FP32_TOLERANCE


def test_what_is_not_recorded_is_padded_to_given_buckets_alone(config, tower, monkeypatch):
    """A recording gains by padding, which makes recordings few; other passes would only work."""
    grid = GRIDS["edge_windows"]
    patches = random_patches(config, grid)
    passes = []

    def encoded(tower, patches, layout):
        passes.append(len(patches))
        return encode(tower, patches, layout)

    monkeypatch.setattr("compare.torch_tower.tower.encode", encoded)
    monkeypatch.setattr(tower, "graphs", None)
    expected = rows(tower, patches, grid)
    monkeypatch.setattr(tower, "token_buckets", (len(patches) + 4, 1024))
    assert relative_error(rows(tower, patches, grid), expected) < FP32_TOLERANCE
    assert passes == [len(patches), len(patches) + 4]


def test_padding_never_leaks(config, tower):
    grid = GRIDS["edge_windows"]
    patches, layout = tower.prepare(random_patches(config, grid), grid)
    spoilt = patches.clone()
    spoilt[layout.num_tokens :] = 1e3
    clean, dirty = (
        side_by_side(encode(tower, values, layout), numpy)[: layout.num_merged]
        for values in (patches, spoilt)
    )
    np.testing.assert_array_equal(clean, dirty)


def test_more_tokens_than_the_largest_bucket(config, directory):
    small = load_vision_tower(directory, torch.float32, token_buckets=(16, 32))
    with pytest.raises(ValueError, match=r"64 tokens.* largest token bucket \(32\)"):
        small(np.zeros((64, config.patch_dim), np.float32), [(1, 8, 8)])


def test_encode_refuses_patches_of_another_layout(config, tower):
    dim = config.patch_dim
    layout = layout_tensors(plan_layout(config, [(1, 4, 4)]), tower.device)
    with pytest.raises(ValueError, match=rf"layout's shape \[16, {dim}\], got \[8, {dim}\]"):
        encode(tower, torch.zeros((8, dim), device=tower.device), layout)


@pytest.mark.parametrize("device", ["gpu", "cpu:-1", "fpga"])
def test_devices_that_pytorch_does_not_have(directory, device):
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used: .*Error: "):
        load_vision_tower(directory, device=device)


def test_a_kernel_that_cannot_run_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("triton_kernels.attend.INTERPRETED", False)
    with pytest.raises(ValueError, match="implementation='kernel' needs tensors on a CUDA GPU"):
        load_vision_tower(tmp_path, torch.float32, "cpu", implementation="kernel")


@pytest.mark.parametrize("config", ["head_dim_16"], indirect=True)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_kernel_and_reference_agree_in_the_tower(config, tower, directory, implementation):
    from triton_kernels.attend import INTERPRETED

    if implementation != "reference" and not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton's interpreter is off and there is no GPU")
    # A small call in a small bucket: the interpreter takes its time for every token.
    other = load_vision_tower(
        directory, torch.float32, implementation=implementation, compile=False, token_buckets=(128,)
    )
    grid = [(1, 10, 12)]  # with edge windows
    patches = random_patches(config, grid)
    ours, expected = (rows(each, patches, grid) for each in (other, tower))
    assert relative_error(ours, expected) < FP32_TOLERANCE


@pytest.mark.gpu  # on a CPU compiling takes a C++ compiler and minutes
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_compiled_blocks_give_the_same_embeddings(config, tower, directory, cuda_graphs):
    compiled = load_vision_tower(
        directory, torch.float32, compile=True, cuda_graphs=cuda_graphs, token_buckets=(64, 448)
    )
    for name in (*GRIDS, *GRIDS):
        patches = random_patches(config, GRIDS[name])
        ours, expected = (rows(each, patches, GRIDS[name]) for each in (compiled, tower))
        assert relative_error(ours, expected) < FP32_TOLERANCE
    assert len(compiled.graphs) == 2 if cuda_graphs else compiled.graphs is None
