"""A tower of a fixed layout, as torch.export and ONNX take it."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from compare.torch_tower import (  # noqa: E402
    FixedLayoutTower,
    attention,
    inputs,
    load_vision_tower,
)
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint  # noqa: E402
from tests.tower_contract import FP32_TOLERANCE, relative_error  # noqa: E402

GRID = [(1, 12, 16), (2, 4, 6)]
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.fixture(scope="module", params=["head_dim_80", "qwen2_vl", "qwen3_vl"])
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def directory(config, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tower"), config)


def load(directory, dtype="float32"):
    return load_vision_tower(directory, getattr(torch, dtype), compile=False, cuda_graphs=False)


def patches_of(config, tower):
    return torch.from_numpy(random_patches(config, GRID)).to(tower.device)


def assert_equal(ours, theirs):
    for our, their in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert relative_error(our.cpu().numpy(), their.cpu().numpy()) < FP32_TOLERANCE


# From PyTorch 2.11's own torch.export.load, of bytes that it reads.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize(
    "strict",
    [False, pytest.param(True, marks=pytest.mark.skipif(OLD, reason="needs PyTorch 2.13"))],
)
def test_a_program_with_the_attention_as_one_operator(config, directory, tmp_path, strict):
    tower = load(directory)
    patches = patches_of(config, tower)
    program = torch.export.export(FixedLayoutTower(tower, GRID), (patches,), strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("fused_rope_attention.qkvpacked.default") == config.depth
    others = {name.partition(".")[0] for name in called} - {"fused_rope_attention"}
    assert others <= {"aten", "<built-in function getitem>"}
    assert not program.constants.keys() & tower.state_dict().keys()
    torch.export.save(program, tmp_path / "tower.pt2")
    served = torch.export.load(tmp_path / "tower.pt2").module()
    assert_equal(served(patches), tower(patches, GRID))


@pytest.mark.parametrize("config", ["head_dim_80"], indirect=True)
def test_nothing_is_kept_that_autograd_would_refuse(config, directory):
    tower = load(directory)
    inputs._tensors.clear()
    attention._kept_frequencies.cache_clear()
    with torch.inference_mode():
        tower(patches_of(config, tower), GRID)
        fixed = FixedLayoutTower(tower, GRID)
    kept = *fixed.buffers(), attention._kept_frequencies(config, tower.device)
    assert not any(x.is_inference() for x in kept)


@pytest.mark.parametrize("config", ["head_dim_80"], indirect=True)
@pytest.mark.parametrize("output", ["patches", "pooled"])
def test_other_outputs(config, directory, output):
    tower = load(directory)
    patches = patches_of(config, tower)
    fixed = FixedLayoutTower(tower, GRID, output=output)
    served = torch.export.export(fixed, (patches,)).module()
    assert_equal(served(patches), tower(patches, GRID, output=output))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(config, directory, dtype):
    tower = load(directory, dtype)
    fixed, patches = FixedLayoutTower(tower, GRID), patches_of(config, tower)
    program = torch.export.export(fixed, (patches,)).module()
    wide = load(directory)(patches, GRID)
    found, eager = (
        [
            relative_error(our.float().cpu().numpy(), exact.cpu().numpy())
            for our, exact in zip(tree_leaves(run(patches)), tree_leaves(wide), strict=True)
        ]
        for run in (program, lambda patches: tower(patches, GRID))
    )
    assert np.less_equal(found, 1.5 * np.array(eager)).all()


def test_the_layout_is_in_no_state_dict(config, directory):
    tower = load(directory)
    fixed = FixedLayoutTower(tower, GRID)
    assert fixed.state_dict().keys() == {f"tower.{name}" for name in tower.state_dict()}


def test_bad_input(config, directory):
    tower = load(directory)
    with pytest.raises(ValueError, match="grid_thw"):
        FixedLayoutTower(tower, [(1, 3, 4)])
    with pytest.raises(ValueError, match="pixel_values must have the layout's shape"):
        FixedLayoutTower(tower, GRID)(patches_of(config, tower)[:-4])


# From Python's copyreg on a class of PyTorch's that is to go.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_onnx(config, directory, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    from triton_kernels.integrations.onnx import export

    tower = load(directory).cpu()
    patches = patches_of(config, tower)
    program = export(FixedLayoutTower(tower, GRID), (patches,), verbose=False)
    nodes = [node.op_type for node in program.model.graph if node.domain == "fused_rope_attention"]
    assert nodes == ["qkvpacked"] * config.depth
    program.save(tmp_path / "tower.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tower.onnx")
    ours = session.run(None, {session.get_inputs()[0].name: patches.numpy()})
    assert_equal(list(map(torch.from_numpy, ours)), tower(patches, GRID))
