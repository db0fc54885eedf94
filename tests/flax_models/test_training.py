"""A trainable Flax tower: its gradients are Hugging Face's, and what is saved is its format."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from flax_models import (  # noqa: E402
    VisionConfig,
    encode,
    load_vision_tower,
    plan_layout,
    read_checkpoint,
    save_vision_tower,
)
from flax_models.common.weights import published_tensors  # noqa: E402
from flax_models.tower import VisionTower  # noqa: E402
from tests.pallas_kernels.no_gpu import products  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    SMALL_TOWERS,
    each_family_and,
    random_patches,
    random_tensors,
    save_hugging_face_tower,
    write_checkpoint,
)
from tests.tower_contract import (  # noqa: E402
    BF16_FACTOR,
    FP32_TOLERANCE,
    relative_error,
    side_by_side,
)

GRID = [(1, 18, 26), (2, 10, 8)]
TOLERANCE = 3e-5  # relative RMS of each parameter's gradient in fp32
BF16_FACTOR_OF_ONE = 1.5  # of one parameter's; BF16_FACTOR is of all together
RATE = 1e-3


@pytest.fixture(scope="module", params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def directory(config, tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return save_hugging_face_tower(tmp_path_factory.mktemp("hugging_face"), config)


@pytest.fixture(scope="module")
def hugging_face(directory):
    return hugging_face_gradients(directory, "float32")[0]


def loss_weights(config):
    """Of each number that a call returns, DeepStack's features beside the embeddings."""
    columns = config.out_hidden_size * (1 + len(config.deepstack_visual_indexes))
    tokens = np.prod(GRID, axis=1).sum() // config.merge_unit
    return np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)


def hugging_face_gradients(directory, dtype):
    """Of every parameter, fp32, and the model that has them."""
    import torch

    from compare.implementations.huggingface import vision_classes

    config = VisionConfig.from_pretrained(directory)
    model = vision_classes(config.model_type).model
    model = model.from_pretrained(directory, dtype=getattr(torch, dtype))
    patches = torch.from_numpy(random_patches(config, GRID)).to(model.dtype)
    output = model(patches, grid_thw=torch.tensor(GRID))
    if isinstance(output, torch.Tensor):  # transformers before 5
        output = (output, [])
    elif not isinstance(output, tuple):
        output = (output.pooler_output, getattr(output, "deepstack_features", []))
    beside = torch.cat([output[0], *output[1]], dim=1).float()
    (beside * torch.from_numpy(loss_weights(config))).sum().backward()
    gradients = {name: p.grad.float().numpy() for name, p in model.named_parameters()}
    return gradients, model


def make_loss(tower):
    """The same loss of a tower, and its gradient."""
    patches, layout = tower.prepare(random_patches(tower.config, GRID), GRID)
    weights = loss_weights(tower.config)

    def loss(tower):
        rows = jax.tree.leaves(encode(tower, jnp.asarray(patches), layout))
        beside = jnp.concatenate(rows, axis=1)[: layout.num_outputs].astype(jnp.float32)
        return (beside * weights).sum()

    return loss


def gradients(tower):
    """Of every published tensor; fails where that of padding is not 0."""
    state = nnx.to_flat_state(nnx.state(jax.jit(jax.grad(make_loss(tower)))(tower)))
    arrays = {".".join(map(str, path)): np.asarray(value[...]) for path, value in state}
    tensors = published_tensors(tower.config, arrays)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


@pytest.mark.parametrize("config", ["head_dim_16", "qwen3_vl"], indirect=True)
def test_a_trainable_tower_encodes_as_the_others(config, tmp_path):
    write_checkpoint(tmp_path, config)
    patches = random_patches(config, GRID)
    other = load_vision_tower(tmp_path, jnp.float32)
    tower = load_vision_tower(tmp_path, jnp.float32, trainable=True, remat=True)
    ours, theirs = (side_by_side(each(patches, GRID)) for each in (tower, other))
    assert relative_error(ours, theirs) < FP32_TOLERANCE
    states = (each.hidden_states(patches, GRID) for each in (tower, other))
    for ours, theirs in zip(*states, strict=True):
        assert relative_error(np.asarray(ours), np.asarray(theirs)) < FP32_TOLERANCE


@each_family_and("remat", False, True)
def test_gradients_are_hugging_faces(directory, hugging_face, remat):
    ours = gradients(load_vision_tower(directory, jnp.float32, trainable=True, remat=remat))
    assert ours.keys() == hugging_face.keys()
    for name, gradient in ours.items():
        assert relative_error(gradient, hugging_face[name]) < TOLERANCE, name


@pytest.mark.parametrize("config", ["qwen2_5_omni"], indirect=True)
def test_gradients_through_the_kernels(directory, hugging_face):
    options = {"trainable": True, "implementation": "kernel"}
    for name, gradient in gradients(load_vision_tower(directory, jnp.float32, **options)).items():
        assert relative_error(gradient, hugging_face[name]) < TOLERANCE, name


@pytest.mark.parametrize("config", ["head_dim_16", "qwen3_vl"], indirect=True)
def test_gradients_in_bf16_are_no_further_than_hugging_faces(directory, hugging_face):
    theirs, _ = hugging_face_gradients(directory, "bfloat16")
    ours = gradients(load_vision_tower(directory, jnp.bfloat16, trainable=True))
    for name, exact in hugging_face.items():
        error = relative_error(theirs[name], exact)
        assert relative_error(ours[name], exact) < BF16_FACTOR_OF_ONE * error, name
    ours, theirs, exact = (
        np.concatenate([x[name].reshape(-1) for name in hugging_face])
        for x in (ours, theirs, hugging_face)
    )
    assert relative_error(ours, exact) < BF16_FACTOR * relative_error(theirs, exact)


@pytest.mark.parametrize("config", ["head_dim_16", "qwen2_vl", "qwen3_vl"], indirect=True)
def test_gradients_in_fp32_are_never_multiplied_in_tf32(config, tmp_path):
    """Which a GPU would by default."""
    options = {"trainable": True, "implementation": "kernel"}
    tower = load_vision_tower(write_checkpoint(tmp_path, config), jnp.float32, **options)
    found = [
        eqn.params["precision"]
        for eqn in products(jax.make_jaxpr(jax.grad(make_loss(tower)))(tower))
    ]
    assert len(found) > 3 * 4 * config.depth  # forward, and two of each backward
    assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("config", ["head_dim_16", "qwen2_vl", "qwen3_vl"], indirect=True)
def test_a_step_makes_what_hugging_face_would_hold(config, directory, tmp_path):
    import torch

    tower = load_vision_tower(directory, jnp.float32, trainable=True)
    optimizer = nnx.Optimizer(tower, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
    optimizer.update(tower, jax.jit(jax.grad(make_loss(tower)))(tower))
    save_vision_tower(tower, tmp_path / "trained")
    ours = load_file(tmp_path / "trained" / "model.safetensors")

    _, model = hugging_face_gradients(directory, "float32")
    torch.optim.SGD(model.parameters(), RATE, momentum=0.9).step()
    assert ours.keys() == model.state_dict().keys()
    for name, before in random_tensors(config).items():
        stepped = model.state_dict()[name].numpy() - before
        assert relative_error(ours[name] - before, stepped) < 1e-4, name  # rounded as parameters

    read = type(model).from_pretrained(tmp_path / "trained")
    settings, expected = read.config.to_dict(), model.config.to_dict()
    apart = {"architectures", "_name_or_path"}
    assert {**settings, **dict.fromkeys(apart)} == {**expected, **dict.fromkeys(apart)}
    for name, tensor in read.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), ours[name])


@each_family_and("dtype", "bfloat16", "float32", "float16")
def test_what_is_loaded_is_saved_to_the_bit(config, tmp_path, dtype):
    write_checkpoint(tmp_path / "first", config)
    for source, target in (("first", "second"), ("second", "third")):
        tower = load_vision_tower(tmp_path / source, dtype, trainable=True)
        save_vision_tower(tower, tmp_path / target)
    assert VisionConfig.from_pretrained(tmp_path / "third") == config
    for name, tensor in read_checkpoint(config, tmp_path / "third").items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, random_tensors(config)[name].astype(dtype))


@pytest.mark.parametrize("config", ["head_dim_16", "qwen2_vl", "qwen3_vl"], indirect=True)
def test_what_a_backward_pass_keeps(config):
    """Of a bf16 tower no fp32 intermediates of blocks; with `remat` each block's input alone."""
    layout = plan_layout(config, GRID)
    tokens = len(layout.window_order)
    patches = jax.ShapeDtypeStruct((tokens, config.patch_dim), jnp.bfloat16)

    def channels_kept(dtype, **options):
        def backward(tower, patches):
            return jax.vjp(lambda tower: encode(tower, patches, layout), tower)[1]

        tower = nnx.eval_shape(lambda: VisionTower(config, trainable=True, **options))
        kept = jax.tree.leaves(jax.eval_shape(backward, tower, patches))
        rows = [x for x in kept if x.shape[:1] == (tokens,) and x.dtype == dtype]
        return [x.size // tokens for x in rows]

    assert all(channels < config.hidden_size for channels in channels_kept(jnp.float32))
    inputs = sorted(channels_kept(jnp.bfloat16, remat=True))
    # The merger's too, and patches.
    assert inputs == [config.hidden_size] * (config.depth + 1) + [config.patch_dim]


@pytest.fixture
def tower(tmp_path):
    directory = write_checkpoint(tmp_path / "checkpoint", SMALL_TOWERS["head_dim_16"])
    return load_vision_tower(directory, jnp.float32, trainable=True)


def test_what_cannot_be_saved(tower, tmp_path):
    target = tmp_path / "target"

    def refused(tower, error, message):
        with pytest.raises(error, match=message):
            save_vision_tower(tower, target)
        assert not target.exists()

    folded = load_vision_tower(tmp_path / "checkpoint", jnp.float32)
    refused(folded, ValueError, r"those of a trainable tower: 'blocks\.0\..*' is")
    adapted = nnx.clone(tower)
    adapted.merger.lora = nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(0))
    refused(adapted, ValueError, r"trainable tower: 'merger\.lora\.lora_a' is none of them")
    padded = nnx.clone(tower)
    width = tower.config.intermediate_size
    down = padded.blocks[1].mlp.down
    down.weight[...] = down.weight[...].at[3, width].set(1.0)
    refused(padded, ValueError, r"'blocks\.1\.mlp\.down\.weight' must be 0 beyond .*\[64, 84\]")
    diverged = nnx.clone(tower)
    diverged.merger.fc1.bias[...] *= np.nan
    refused(diverged, ValueError, r"tensor 'merger\.mlp\.0\.bias' holds infinities or NaN")


def test_where_nothing_is_saved(tower, tmp_path):
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json"):
        directory = tmp_path / name.replace(".", "_")
        directory.mkdir()
        (directory / name).write_text("{}")
        with pytest.raises(FileExistsError, match=rf"holds a checkpoint, its {name}"):
            save_vision_tower(tower, directory)
        assert [path.name for path in directory.iterdir()] == [name]
    with pytest.raises(NotADirectoryError, match="below_a_file"):
        save_vision_tower(tower, tmp_path / "config_json" / "config.json" / "below_a_file")
