"""A trainable PyTorch tower: its gradients are Hugging Face's, and what is saved is its format."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

import re  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from compare.implementations.huggingface import vision_classes  # noqa: E402
from compare.torch_tower import load_vision_tower, save_vision_tower  # noqa: E402
from compare.torch_tower.blocks import PositionTable  # noqa: E402
from compare.torch_tower.inputs import layout_tensors  # noqa: E402
from flax_models import VisionConfig, plan_layout  # noqa: E402
from flax_models.common.weights import published_tensors  # noqa: E402
from tests.compare.torch_tower.torch_results import numpy, tensors  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    SMALL_TOWERS,
    each_family_and,
    random_patches,
    random_tensors,
    save_hugging_face_tower,
    write_checkpoint,
)
from tests.tower_contract import BF16_FACTOR, relative_error  # noqa: E402

GRID = [(1, 6, 20), (2, 4, 6), (1, 2, 2)]
TOLERANCE = 1e-4  # relative RMS of each parameter's gradient in fp32
BF16_FACTOR_OF_ONE = 1.5  # of one parameter's; BF16_FACTOR is of all together


@pytest.fixture(scope="module", params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def directory(config, tmp_path_factory):
    return save_hugging_face_tower(tmp_path_factory.mktemp("hugging_face"), config)


@pytest.fixture(scope="module")
def hugging_face(directory):
    """Its loss, gradients of parameters, and of patches."""
    return gradients(load_hugging_face(directory))


one_tower = pytest.mark.parametrize("config", ["head_dim_16"], indirect=True)
two_towers = pytest.mark.parametrize("config", ["head_dim_16", "qwen3_vl"], indirect=True)


def load(directory, dtype="float32", **options):
    options = {"compile": False, "trainable": True, **options}
    return load_vision_tower(directory, getattr(torch, dtype), **options)


def load_hugging_face(directory, dtype="float32"):
    model_type = VisionConfig.from_pretrained(directory).model_type
    model = vision_classes(model_type).model
    return model.from_pretrained(directory, dtype=getattr(torch, dtype))


def loss_of(tower, patches, grid=GRID):
    """A weighted sum of all that a tower returns."""
    output = tower(patches, torch.tensor(grid, device=patches.device))
    if hasattr(output, "pooler_output"):
        output = output.pooler_output, getattr(output, "deepstack_features", None) or ()
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(x.shape, generator=generator).to(x.device) for x in tensors(output))
    return sum((x.float() * w).sum() for x, w in zip(tensors(output), weights, strict=True))


def patches_of(tower, grid=GRID):
    """Of ours from the host, wherever the tower is."""
    if not hasattr(tower, "trainable"):
        dim = tower.patch_embed.proj.weight[0].numel()
        values = np.random.default_rng(0).standard_normal((np.prod(grid, axis=1).sum(), dim))
        return torch.tensor(values.astype(np.float32)).to(tower.device, tower.dtype)
    return torch.tensor(random_patches(tower.config, grid))


def gradients(tower, grid=GRID):
    """Loss, gradients of published tensors, and of patches; in fp32."""
    patches = patches_of(tower, grid).requires_grad_()
    loss = loss_of(tower, patches, grid)
    loss.backward()
    of_parameters = {
        name: numpy(p.grad if p.grad is not None else torch.zeros_like(p))
        for name, p in tower.named_parameters()
    }
    if hasattr(tower, "trainable"):
        of_parameters = published_tensors(tower.config, of_parameters)
    return loss.item(), of_parameters, numpy(patches.grad)


def assert_close(results, expected, tolerance=TOLERANCE):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert relative_error(result, expected[name]) < tolerance, name


def all_of(arrays, names):
    return np.concatenate([arrays[name].reshape(-1) for name in names])


@each_family_and("checkpointed", False, True)
def test_gradients_are_hugging_faces(directory, hugging_face, checkpointed):
    tower, runs = load(directory, gradient_checkpointing=checkpointed), []
    for block in tower.blocks:
        block.attn.register_forward_hook(lambda *_: runs.append(1))
    loss, of_parameters, of_patches = gradients(tower)
    assert loss == pytest.approx(hugging_face[0], rel=1e-4)
    assert_close(of_parameters, hugging_face[1])
    assert relative_error(of_patches, hugging_face[2]) < TOLERANCE
    assert len(runs) == len(tower.blocks) * (1 + checkpointed)


@one_tower
def test_gradients_through_the_kernels(directory):
    from triton_kernels.attend import INTERPRETED

    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton's interpreter is off and there is no GPU")
    grid = [(1, 2, 10), (1, 2, 2)]
    tower = load(directory, implementation="kernel", token_buckets=(32,))  # rows of padding too
    assert_close(gradients(tower, grid)[1], gradients(load_hugging_face(directory), grid)[1])


@two_towers
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_compiled_blocks(directory, hugging_face, checkpointed):
    torch.compiler.reset()
    tower = load(directory, gradient_checkpointing=checkpointed)
    for block in tower.blocks:
        block.compile(dynamic=True, fullgraph=True, backend="aot_eager")
    assert_close(gradients(tower)[1], hugging_face[1])


@pytest.mark.gpu  # on a CPU compiling takes a C++ compiler and minutes
@two_towers
def test_gradients_of_a_compiled_tower(directory, hugging_face):
    assert_close(gradients(load(directory, compile=True))[1], hugging_face[1])


@two_towers
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("way", ["bfloat16", "autocast", "autocast, checkpointed"])
def test_gradients_in_bf16_are_no_further_than_hugging_faces(directory, hugging_face, way):
    autocast, exact = way != "bfloat16", hugging_face[1]
    dtype, checkpointed = "float32" if autocast else way, "checkpointed" in way
    tower = load(directory, dtype, gradient_checkpointing=checkpointed)
    model = load_hugging_face(directory, dtype).to(tower.device)
    with torch.autocast(tower.device.type, torch.bfloat16, enabled=autocast):
        ours, theirs = gradients(tower)[1], gradients(model)[1]
    for name, expected in exact.items():
        error = relative_error(theirs[name], expected)
        assert relative_error(ours[name], expected) < BF16_FACTOR_OF_ONE * error, name
    ours, theirs, exact = (all_of(x, hugging_face[1]) for x in (ours, theirs, exact))
    assert relative_error(ours, exact) < BF16_FACTOR * relative_error(theirs, exact)


def test_a_position_s_gradient_is_summed_in_fp32():
    config = SMALL_TOWERS["qwen3_vl"]
    layout = layout_tensors(plan_layout(config, [(1, 12, 12)] * 16), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(len(layout.positions), config.hidden_size, generator=generator)

    def gradient(dtype):
        table = PositionTable(config).to(dtype)
        learned = table(layout.positions, layout.frame_sizes).to(dtype)
        learned.backward(wanted.bfloat16().to(dtype))
        return numpy(table.weight.grad)

    assert relative_error(gradient(torch.bfloat16), gradient(torch.float32)) < 4e-3


@two_towers
def test_a_part_is_trained(directory):
    tower, whole = load(directory).requires_grad_(False), load(directory)
    for name in ("blocks.0.norm1", "blocks.1.mlp", "merger.fc2"):
        tower.get_submodule(name).requires_grad_(True)
    trained = [name for name, p in tower.named_parameters() if p.requires_grad]
    for each in (tower, whole):
        loss_of(each, patches_of(each)).backward()
    results = {name: numpy(p.grad) for name, p in tower.named_parameters() if p.grad is not None}
    assert list(results) == trained
    assert_close(results, {name: numpy(whole.get_parameter(name).grad) for name in trained})


@pytest.fixture
def mesh():
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@two_towers
@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_that_are_sharded_each(directory, mesh, checkpointed):
    from torch.distributed.fsdp import fully_shard

    options = {"device": "cpu", "gradient_checkpointing": checkpointed}
    tower, whole = load(directory, **options), load(directory, **options)
    for part in (*tower.blocks, tower):
        fully_shard(part, mesh=mesh)
    for each in (tower, whole):
        loss_of(each, patches_of(each)).backward()
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), whole.get_parameter(name).grad), name


def test_what_is_trained_is_what_hugging_face_would_hold(config, directory, tmp_path):
    tower, model = load(directory), load_hugging_face(directory)
    for each in (tower, model):
        # Its eps keeps it from making steps of what is only rounding.
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(each, patches_of(each)).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
    save_vision_tower(tower, tmp_path / "trained")
    assert VisionConfig.from_pretrained(tmp_path / "trained") == config
    ours, theirs = load_hugging_face(tmp_path / "trained").state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, before in random_tensors(config).items():
        stepped = numpy(theirs[name]) - before
        assert relative_error(numpy(ours[name]) - before, stepped) < 1e-4, name
    for trainable in (True, False):
        with torch.no_grad():
            again = loss_of(load(tmp_path / "trained", trainable=trainable), patches_of(tower))
            assert again.item() == pytest.approx(loss_of(tower, patches_of(tower)).item(), rel=1e-4)


@each_family_and("dtype", "bfloat16", "float32", "float16")
def test_what_is_loaded_is_saved_to_the_bit(config, tmp_path, dtype):
    write_checkpoint(tmp_path / "read", config, "visual.")
    save_vision_tower(load(tmp_path / "read", dtype), tmp_path / "written")
    written, read = load_file(tmp_path / "written" / "model.safetensors"), random_tensors(config)
    assert written.keys() == read.keys()
    for name, tensor in written.items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, read[name].astype(dtype))


@one_tower
def test_what_cannot_be_saved(directory, tmp_path):
    def refused(tower, message):
        with pytest.raises(ValueError, match=message):
            save_vision_tower(tower, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    refused(load(directory, trainable=False), r"those of a trainable tower: 'blocks\.0\..*' is")
    diverged = load(directory)
    with torch.no_grad():
        diverged.merger.fc1.bias.fill_(np.nan)
    refused(diverged, r"tensor 'merger\.mlp\.0\.bias' holds infinities or NaN")


@one_tower
def test_gradients_are_recorded_where_they_are_wanted(directory):
    tower = load(directory)
    patches = patches_of(tower)
    assert tower(patches, GRID).requires_grad
    assert not any(x.requires_grad for x in tower.hidden_states(patches, GRID))
    with torch.no_grad():
        assert not tower(patches, GRID).requires_grad


@one_tower
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda_graphs": True}, "cuda_graphs=True needs trainable=False"),
        ({"frame_attention": "fa2"}, "trainable=True needs frame_attention='fused', got 'fa2'"),
        ({"dtype": "int32"}, r"dtype must be one of .* got torch.int32"),
    ],
)
def test_what_cannot_be_trained_is_refused(directory, options, message):
    with pytest.raises(ValueError, match=message):
        load(directory, **options)


@one_tower
def test_the_example_of_a_step_runs(config, directory, tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "flax_models" / "README.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    [example] = [x for x in examples if "import load_vision_tower, save_vision_tower" in x]
    monkeypatch.chdir(tmp_path)
    patches = random_patches(config, GRID)
    names = {"directory": directory, "pixel_values": patches, "grid_thw": GRID}
    names["targets"] = torch.ones(len(patches) // config.merge_unit, config.out_hidden_size)
    exec(example, names)
    assert names["loss"].isfinite()
    assert VisionConfig.from_pretrained("path/to/trained_in_torch") == config
