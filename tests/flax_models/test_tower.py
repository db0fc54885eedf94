"""The Flax tower: what every tower must do, and what one under jax.jit must."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from flax_models import blocks, choose_bucket, encode, load_vision_tower, plan_layout  # noqa: E402
from tests.random_calls import random_calls, tokens_of  # noqa: E402
from tests.tower_checkpoints import GRIDS, WINDOWS_ALONE, random_patches, write_checkpoint  # noqa: E402
from tests.tower_contract import (  # noqa: E402
    CONFIG,
    FP32_TOLERANCE,
    HuggingFaceContract,
    TowerContract,
    relative_error,
)


class FlaxTower:
    array = staticmethod(jnp.asarray)
    free_memory = "flax_models.tower._free_memory"

    @staticmethod
    def load(directory, dtype, **options):
        return load_vision_tower(directory, dtype, **options)

    @staticmethod
    def numpy(array):
        return np.asarray(array, np.float32)

    @staticmethod
    def has_gpu():
        return jax.default_backend() == "gpu"


class TestFlaxTower(FlaxTower, TowerContract):
    """What a tower must do by itself."""


class TestFlaxTowerAgainstHuggingFace(FlaxTower, HuggingFaceContract):
    """Equality with Hugging Face's tower."""


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tower"), CONFIG)
    return load_vision_tower(directory, jnp.float32)


@pytest.fixture
def traced_tokens(monkeypatch):
    """The number of tokens of each attention that has been traced: one for each compilation."""
    tokens = []
    attention = blocks.fused_rope_attention_qkvpacked

    def counted(qkv, *arguments, **keywords):
        tokens.append(qkv.shape[0])
        return attention(qkv, *arguments, **keywords)

    monkeypatch.setattr(blocks, "fused_rope_attention_qkvpacked", counted)
    return tokens


@pytest.mark.parametrize("name", ["edge_windows", "clip", "mix"])
def test_a_bucketed_call_equals_the_unpadded_one(tower, name):
    grid = GRIDS[name]
    patches = random_patches(CONFIG, grid)
    unpadded = encode(tower, jnp.asarray(patches), plan_layout(CONFIG, grid))
    assert tower.prepare(patches, grid)[0].shape[0] > len(patches)
    assert relative_error(np.asarray(tower(patches, grid)), np.asarray(unpadded)) < FP32_TOLERANCE


def test_padding_never_leaks(tower):
    grid = GRIDS["edge_windows"]
    patches, layout = tower.prepare(random_patches(CONFIG, grid), grid)
    spoilt = patches.copy()
    spoilt[layout.num_tokens :] = 1e3
    compiled = jax.jit(encode)
    clean, dirty = (
        np.asarray(compiled(tower, values, layout))[: layout.num_merged]
        for values in (patches, spoilt)
    )
    np.testing.assert_array_equal(clean, dirty)


def test_one_compilation_serves_every_mix_of_a_bucket(tower, traced_tokens):
    bucket = 320  # of no other test, so that nothing is compiled yet
    tower = nnx.clone(tower)
    tower.token_buckets = (bucket,)
    mixes = [[(1, 8, 8)], [(1, 12, 10), (2, 4, 4)], [(4, 8, 10)], [(1, 2, 2)] * 5, [(1, 2, 2)]]
    for grid in mixes:
        embeddings = tower(random_patches(CONFIG, grid), grid)
        assert embeddings.shape[0] == np.prod(grid, axis=1).sum() // 4
    assert traced_tokens == [bucket, bucket]  # blocks that see windows, blocks that see frames


def test_any_image_takes_few_compilations(tmp_path, compilations):
    """200 images of 56 to 1344 px, one or several a call: at most 16, and none after that."""
    directory = write_checkpoint(tmp_path, WINDOWS_ALONE)
    tower = load_vision_tower(directory, jnp.float32, implementation="reference")
    calls = [*random_calls(0, 100, 1), *random_calls(1, 100, 6)]
    compilations.clear()
    for grid in calls:
        patches = np.zeros((tokens_of(grid), WINDOWS_ALONE.patch_dim), np.float32)
        assert tower(patches, grid).shape == (len(patches) // 4, WINDOWS_ALONE.out_hidden_size)
    assert 10 <= len(compilations) <= 16
    compilations.clear()
    for grid in random_calls(2, 10, 3):
        tower(np.zeros((tokens_of(grid), WINDOWS_ALONE.patch_dim), np.float32), grid)
    assert not compilations


def test_updated_parameters_take_effect(tower):
    grid = GRIDS["clip"]
    patches = random_patches(CONFIG, grid)
    ours = nnx.clone(tower)
    before = np.asarray(ours(patches, grid))
    nnx.update(ours, jax.tree.map(lambda value: value * 0.5, nnx.state(ours)))
    after = np.asarray(ours(patches, grid))
    expected = jax.jit(encode)(ours, *ours.prepare(patches, grid))
    np.testing.assert_array_equal(after, np.asarray(expected)[: len(after)])
    assert relative_error(after, before) > 0.1
    np.testing.assert_array_equal(np.asarray(tower(patches, grid)), before)


def test_encode_under_a_jit_of_the_callers_own(tower, traced_tokens):
    graphdef, parameters = nnx.split(tower)
    bucket = choose_bucket(CONFIG, GRIDS["mix"], [448])

    @jax.jit
    def pooled(parameters, pixel_values, layout):
        embeddings = encode(nnx.merge(graphdef, parameters), pixel_values, layout)
        real = jnp.arange(len(embeddings)) < layout.num_merged
        return jnp.where(real[:, None], embeddings, 0).sum(axis=0) / layout.num_merged

    for grid in (GRIDS["mix"], GRIDS["clip"]):
        patches = random_patches(CONFIG, grid)
        padded = np.pad(patches, ((0, bucket.tokens - len(patches)), (0, 0)))
        ours = pooled(parameters, padded, plan_layout(CONFIG, grid, pad_to=bucket))
        expected = np.asarray(tower(patches, grid)).mean(axis=0)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert pooled._cache_size() == 1
    assert traced_tokens.count(bucket.tokens) == 2


def test_a_call_under_jit_leaves_no_tracer_behind(tower):
    grid = [(1, 4, 6)]
    patches = random_patches(CONFIG, grid)
    inside = jax.jit(lambda values: tower(values, grid))(patches)
    np.testing.assert_allclose(inside, tower(patches, grid), rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter(tower):
    grid = [(1, 4, 6)]
    patches, layout = tower.prepare(random_patches(CONFIG, grid), grid)

    def loss(tower):
        return (encode(tower, jnp.asarray(patches), layout)[: layout.num_merged] ** 2).sum()

    for path, gradient in nnx.to_flat_state(nnx.state(jax.jit(jax.grad(loss))(tower))):
        assert np.abs(gradient[...]).max() > 0, path


def test_encode_refuses_patches_of_another_layout(tower):
    layout = plan_layout(CONFIG, [(1, 4, 4)], pad_to=32)
    with pytest.raises(ValueError, match=r"padded shape \[32, 1176\], got \[16, 1176\]"):
        encode(tower, jnp.zeros((16, 1176)), layout)


def test_more_tokens_than_the_largest_bucket(tower):
    small = nnx.clone(tower)
    small.token_buckets = (16, 32)
    with pytest.raises(ValueError, match=r"64 tokens.* largest token bucket \(32\)"):
        small(np.zeros((64, 1176), np.float32), [(1, 8, 8)])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_kernel_and_reference_agree_in_the_tower(tower, implementation):
    other = nnx.clone(tower)
    other.implementation = implementation
    grid = GRIDS["edge_windows"]
    patches = random_patches(CONFIG, grid)
    ours, theirs = np.asarray(other(patches, grid)), np.asarray(tower(patches, grid))
    assert relative_error(ours, theirs) < FP32_TOLERANCE


def test_loading_on_a_named_device(tmp_path):
    tower = load_vision_tower(write_checkpoint(tmp_path, CONFIG), device="cpu")
    cpu = jax.devices("cpu")[0]
    assert all(leaf.devices() == {cpu} for leaf in jax.tree.leaves(tower))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(tower))
    grid = [(1, 4, 4)]
    assert tower(random_patches(CONFIG, grid), grid).devices() == {cpu}
