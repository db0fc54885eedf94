"""A trainable PyTorch tower trains as Hugging Face's does, and is written back in its format."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402

from compare.implementations.huggingface import vision_classes  # noqa: E402
from compare.torch_tower import load_vision_tower, save_vision_tower  # noqa: E402
from compare.torch_tower.training import published_tensors  # noqa: E402
from flax_models import CheckpointError, VisionConfig  # noqa: E402
from tests.compare.torch_tower.torch_results import tensors  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    SMALL_TOWERS,
    random_patches,
    random_tensors,
    save_hugging_face_tower,
    write_checkpoint,
)

TOLERANCE = 1e-4  # relative, in fp32
GRID = [(1, 6, 20), (2, 4, 6), (1, 2, 2)]


def relative_error(result, expected):
    expected = expected.double().cpu()
    return ((result.detach().double().cpu() - expected).norm() / expected.norm()).item()


def assert_close(results, expected):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert result.shape == expected[name].shape
        assert relative_error(result, expected[name]) < TOLERANCE, name


def load(directory, dtype=torch.float32, **options):
    return load_vision_tower(directory, dtype, **{"compile": False, "trainable": True, **options})


def load_hugging_face(directory):
    model_type = VisionConfig.from_pretrained(directory).model_type
    model = vision_classes(model_type).model.from_pretrained(directory, dtype=torch.float32)
    return model.train()


def loss_of(output):
    """Of all that a tower returns."""
    if hasattr(output, "pooler_output"):
        features = getattr(output, "deepstack_features", None)
        output = (output.pooler_output, features or ())
    return sum(x.float().square().mean() for x in tensors(output))


def gradients_of_hugging_face(directory, patches, grid=GRID):
    model = load_hugging_face(directory)
    patches = torch.tensor(patches, requires_grad=True)
    loss = loss_of(model(patches, grid_thw=torch.tensor(grid)))
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}, patches.grad


def gradients(tower, patches, grid=GRID):
    """Loss, gradients of published tensors, and of patches."""
    patches = torch.tensor(patches, requires_grad=True)
    loss = loss_of(tower(patches, grid))
    loss.backward()
    of_parameters = {name: p.grad for name, p in tower.named_parameters()}
    return loss, published_tensors(tower.config, of_parameters), patches.grad


@pytest.fixture(scope="module", params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def directory(config, tmp_path_factory):
    return save_hugging_face_tower(tmp_path_factory.mktemp("hugging_face"), config)


@pytest.fixture(scope="module")
def patches(config):
    return random_patches(config, GRID)


@pytest.fixture(scope="module")
def expected(directory, patches):
    return gradients_of_hugging_face(directory, patches)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_loss_and_gradients_are_hugging_faces(directory, patches, expected, checkpointed):
    tower, runs = load(directory), []
    tower.gradient_checkpointing = checkpointed
    for block in tower.blocks:
        block.attn.register_forward_hook(lambda *_: runs.append(1))
    loss, of_parameters, of_patches = gradients(tower, patches)
    assert loss.item() == pytest.approx(expected[0].item(), rel=TOLERANCE)
    assert_close(of_parameters, expected[1])
    assert relative_error(of_patches, expected[2]) < TOLERANCE
    assert len(runs) == len(tower.blocks) * (1 + checkpointed)


def test_what_is_trained_is_what_hugging_face_would_hold(config, directory, patches, tmp_path):
    tower, model = load(directory), load_hugging_face(directory)
    grid = torch.tensor(GRID)
    for each, call in ((tower, (patches, GRID)), (model, (torch.tensor(patches), grid))):
        # Its eps keeps it from making steps of what is only rounding.
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(each(*call)).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
    save_vision_tower(tower, tmp_path / "trained")
    assert VisionConfig.from_pretrained(tmp_path / "trained") == config
    assert_close(load_hugging_face(tmp_path / "trained").state_dict(), model.state_dict())
    for trainable in (True, False):
        loaded = load(tmp_path / "trained", trainable=trainable)
        with torch.no_grad():
            ours, theirs = loss_of(loaded(patches, GRID)), loss_of(tower(patches, GRID))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_trained_is_written_as_it_was_read(config, tmp_path, dtype):
    write_checkpoint(tmp_path / "read", config, "visual.")
    save_vision_tower(load(tmp_path / "read", dtype), tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    read = random_tensors(config)
    assert written.keys() == read.keys()
    for name, tensor in written.items():
        assert str(tensor.dtype) == str(dtype).removeprefix("torch.")
        assert (tensor == read[name].astype(tensor.dtype)).all(), name


class OfOneTower:
    @pytest.fixture(scope="class")
    @classmethod
    def config(cls):
        return SMALL_TOWERS["head_dim_16"]

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, config, tmp_path_factory):
        return write_checkpoint(tmp_path_factory.mktemp("tower"), config)


class TestTrainableTower(OfOneTower):
    @pytest.mark.filterwarnings("ignore:In CPU autocast")
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_autocast_is_the_callers(self, config, directory, checkpointed):
        patches = random_patches(config, GRID)
        exact = gradients_of_hugging_face(directory, patches)[1]
        with torch.autocast("cpu", torch.bfloat16):
            theirs = gradients_of_hugging_face(directory, patches)[1]
        tower = load(directory)
        tower.gradient_checkpointing = checkpointed
        with torch.autocast(tower.device.type, torch.bfloat16):
            assert tower(patches, GRID).dtype == torch.bfloat16
            ours = gradients(tower, patches)[1]
        ours, theirs, exact = (
            torch.cat([x[name].flatten().cpu() for name in exact]) for x in (ours, theirs, exact)
        )
        assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact)

    # From the compiler, which asks each block's input for it, and hides the warning that is no
    # error.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_compiled_blocks(self, config, directory, checkpointed):
        torch.compiler.reset()
        tower = load(directory)
        tower.gradient_checkpointing = checkpointed
        patches = random_patches(config, GRID)
        expected = gradients_of_hugging_face(directory, patches)[1]
        for block in tower.blocks:
            block.compile(dynamic=True, fullgraph=True, backend="aot_eager")
        assert_close(gradients(tower, patches)[1], expected)

    def test_gradients_by_the_kernels(self, config, directory):
        from triton_kernels.attention import INTERPRETED

        if not (INTERPRETED or torch.cuda.is_available()):
            pytest.skip("Triton's interpreter is off and there is no GPU")
        grid = [(1, 2, 10), (1, 2, 2)]
        patches = random_patches(config, grid)
        expected = gradients_of_hugging_face(directory, patches, grid)[1]
        tower = load(directory, implementation="kernel", token_buckets=(32,))  # rows of padding too
        assert_close(gradients(tower, patches, grid)[1], expected)

    def test_only_a_part_is_trained(self, config, directory):
        tower = load(directory).requires_grad_(False)
        tower.blocks[2].mlp.requires_grad_(True)
        patches = random_patches(config, GRID)
        loss_of(tower(patches, GRID)).backward()
        expected = gradients_of_hugging_face(directory, patches)[1]
        results = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
        results = published_tensors(config, results)
        assert_close(results, {n: x for n, x in expected.items() if "blocks.2.mlp" in n})

    def test_hidden_states_are_for_comparison(self, config, directory):
        patches = random_patches(config, GRID)
        tower = load(directory)
        assert not any(x.requires_grad for x in tower.hidden_states(patches, GRID))
        with torch.no_grad():
            assert not tower(patches, GRID).requires_grad

    def test_a_tower_for_inference_is_not_saved(self, directory, tmp_path):
        tower = load(directory, trainable=False)
        with pytest.raises(ValueError, match="loaded with trainable=True can be saved"):
            save_vision_tower(tower, tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cuda_graphs": True}, "cuda_graphs=True needs trainable=False"),
            ({"frame_attention": "fa2"}, "trainable=True needs frame_attention='fused', got 'fa2'"),
            ({"dtype": torch.int32}, r"dtype must be one of .* got torch.int32"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, directory, options, message):
        with pytest.raises(ValueError, match=message):
            load(directory, **options)

    def test_a_tensor_beyond_fp16(self, config, tmp_path):
        pytest.importorskip("transformers")
        name = "blocks.0.mlp.gate_proj.bias"
        tensor = random_tensors(config)[name]
        tensor[3] = 1e5
        save_hugging_face_tower(tmp_path, config, **{name: tensor})
        with pytest.raises(CheckpointError, match=f"{name!r} is too large for torch.float16"):
            load(tmp_path, torch.float16)
