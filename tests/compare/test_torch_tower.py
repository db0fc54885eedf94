"""The PyTorch tower: what every tower must do, and that it is the Flax tower's twin."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402

from compare.torch_tower import encode, layout_tensors, load_vision_tower  # noqa: E402
from flax_models import plan_layout  # noqa: E402
from tests.tower_checkpoints import GRIDS, random_patches, write_checkpoint  # noqa: E402
from tests.tower_contract import (  # noqa: E402
    CONFIG,
    FP32_TOLERANCE,
    HuggingFaceContract,
    TowerContract,
    relative_error,
)


class TorchTower:
    array = staticmethod(torch.tensor)

    @staticmethod
    def load(directory, dtype, **options):
        return load_vision_tower(directory, getattr(torch, dtype), **options)

    @staticmethod
    def numpy(array):
        return array.float().cpu().numpy()

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


class TestTorchTower(TorchTower, TowerContract):
    """What a tower must do by itself."""


class TestTorchTowerAgainstHuggingFace(TorchTower, HuggingFaceContract):
    """Equality with Hugging Face's tower."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tower"), CONFIG)


@pytest.fixture(scope="module")
def tower(directory):
    return load_vision_tower(directory, torch.float32)


def test_equals_the_flax_tower(tower, directory):
    pytest.importorskip("flax")
    from flax_models import load_vision_tower as load_flax_tower

    grid = GRIDS["mix"]
    patches = random_patches(CONFIG, grid)
    flax = np.asarray(load_flax_tower(directory, "float32")(patches, grid))
    assert relative_error(tower(patches, grid).cpu().numpy(), flax) < FP32_TOLERANCE


def test_nothing_is_recorded_for_gradients(tower):
    grid = GRIDS["clip"]
    patches = torch.tensor(random_patches(CONFIG, grid), requires_grad=True)
    assert not tower(patches, grid).requires_grad
    assert not any(state.requires_grad for state in tower.hidden_states(patches, grid))
    assert not any(parameter.requires_grad for parameter in tower.parameters())


def test_a_padded_layout_gives_the_same_embeddings(tower):
    grid = GRIDS["edge_windows"]
    patches = random_patches(CONFIG, grid)
    layout = layout_tensors(plan_layout(CONFIG, grid, pad_to=640), tower.device)
    padded = np.full((640, CONFIG.patch_dim), 1e3, np.float32)
    padded[: len(patches)] = patches
    ours = encode(tower, torch.tensor(padded, device=tower.device), layout)[: layout.num_merged]
    expected = tower(patches, grid)
    assert relative_error(ours.cpu().numpy(), expected.cpu().numpy()) < FP32_TOLERANCE


def test_encode_refuses_patches_of_another_layout(tower):
    _, layout = tower.prepare(np.zeros((16, CONFIG.patch_dim), np.float32), [(1, 4, 4)])
    with pytest.raises(ValueError, match=r"layout's shape \[16, 1176\], got \[8, 1176\]"):
        encode(tower, torch.zeros((8, CONFIG.patch_dim), device=tower.device), layout)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_kernel_and_reference_agree_in_the_tower(tower, directory, implementation):
    from triton_kernels.attention import INTERPRETED

    if implementation == "triton" and not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton's interpreter is off and there is no GPU")
    other = load_vision_tower(directory, torch.float32, implementation=implementation)
    grid = GRIDS["edge_windows"]
    patches = random_patches(CONFIG, grid)
    ours, expected = (each(patches, grid).cpu().numpy() for each in (other, tower))
    assert relative_error(ours, expected) < FP32_TOLERANCE


# torch.compile warns that true fp32 products are slower than tf32: they are what is compared here.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")
@pytest.mark.gpu  # on a CPU compiling takes a C++ compiler and minutes
def test_compiled_blocks_give_the_same_embeddings(tower, directory):
    compiled = load_vision_tower(directory, torch.float32, compile=True)
    for grid in GRIDS.values():
        patches = random_patches(CONFIG, grid)
        ours, expected = (each(patches, grid).cpu().numpy() for each in (compiled, tower))
        assert relative_error(ours, expected) < FP32_TOLERANCE
