"""The Flax tower: what every tower must do, and what one under jax.jit must."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from flax_models import (  # noqa: E402
    attention,
    choose_bucket,
    encode,
    load_vision_tower,
    plan_layout,
)
from flax_models import tower as tower_module  # noqa: E402
from flax_models.compiled import COMPILER_OPTIONS, compiled  # noqa: E402
from tests.pallas_kernels.no_gpu import products  # noqa: E402
from tests.random_calls import random_calls, tokens_of  # noqa: E402
from tests.tower_checkpoints import (  # noqa: E402
    GRIDS,
    SMALL_TOWERS,
    WINDOWS_ALONE,
    random_patches,
    write_checkpoint,
)
from tests.tower_contract import (  # noqa: E402
    CONFIG,
    FP32_TOLERANCE,
    HuggingFaceContract,
    TowerContract,
    relative_error,
    side_by_side,
)


class FlaxTower:
    array = staticmethod(jnp.asarray)
    module = "flax_models.tower"

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


@pytest.fixture(scope="module", params=["head_dim_16", "qwen3_vl"])
def config(request):
    """With windows; and without, with a table of positions and DeepStack."""
    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def tower(config, tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tower"), config)
    return load_vision_tower(directory, jnp.float32)


@pytest.fixture
def traced_tokens(monkeypatch):
    """The number of tokens of each attention that has been traced: one for each compilation."""
    tokens = []
    fused = attention.fused_rope_attention_qkvpacked

    def counted(qkv, *arguments, **keywords):
        tokens.append(qkv.shape[0])
        return fused(qkv, *arguments, **keywords)

    monkeypatch.setattr(attention, "fused_rope_attention_qkvpacked", counted)
    return tokens


@pytest.mark.parametrize("name", ["edge_windows", "mix"])
def test_a_bucketed_call_equals_the_unpadded_one(config, tower, name):
    grid = GRIDS[name]
    patches = random_patches(config, grid)
    unpadded = encode(tower, jnp.asarray(patches), plan_layout(config, grid))
    assert tower.prepare(patches, grid)[0].shape[0] > len(patches)
    bucketed = tower(patches, grid)
    assert relative_error(side_by_side(bucketed), side_by_side(unpadded)) < FP32_TOLERANCE


def test_padding_never_leaks(config, tower):
    grid = GRIDS["edge_windows"]
    patches, layout = tower.prepare(random_patches(config, grid), grid)
    spoilt = patches.copy()
    spoilt[layout.num_tokens :] = 1e3
    compiled = jax.jit(encode)
    clean, dirty = (
        side_by_side(compiled(tower, values, layout))[: layout.num_merged]
        for values in (patches, spoilt)
    )
    np.testing.assert_array_equal(clean, dirty)


def test_one_compilation_serves_every_mix_of_a_bucket(config, tower, traced_tokens):
    bucket = 320  # of no other test, so that nothing is compiled yet
    tower = nnx.clone(tower)
    tower.token_buckets = (bucket,)
    mixes = [[(1, 8, 8)], [(1, 12, 10), (2, 4, 4)], [(4, 8, 10)], [(1, 2, 2)] * 5, [(1, 2, 2)]]
    for grid in mixes:
        result = side_by_side(tower(random_patches(config, grid), grid))
        assert len(result) == np.prod(grid, axis=1).sum() // 4
    # Blocks that see windows, if there are any, and blocks that see frames.
    assert traced_tokens == [bucket] * (1 + config.family.windows)


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


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_an_fp32_tower_never_multiplies_in_tf32(config, tmp_path, implementation):
    """Which a GPU would by default."""
    directory = write_checkpoint(tmp_path, config)
    tower = load_vision_tower(directory, jnp.float32, implementation=implementation)
    grid = GRIDS["clip"]
    inputs = tower.prepare(random_patches(tower.config, grid), grid)
    found = {eqn.params["precision"] for eqn in products(jax.make_jaxpr(encode)(tower, *inputs))}
    assert found == {(jax.lax.Precision.HIGHEST,) * 2}


def test_updated_parameters_take_effect(config, tower):
    grid = GRIDS["clip"]
    patches = random_patches(config, grid)
    ours = nnx.clone(tower)
    before = side_by_side(ours(patches, grid))
    nnx.update(ours, jax.tree.map(lambda value: value * 0.5, nnx.state(ours)))
    after = side_by_side(ours(patches, grid))
    program = jax.jit(encode, compiler_options=COMPILER_OPTIONS)
    expected = side_by_side(program(ours, *ours.prepare(patches, grid)))
    np.testing.assert_array_equal(after, expected[: len(after)])
    assert relative_error(after, before) > 0.1
    np.testing.assert_array_equal(side_by_side(tower(patches, grid)), before)


@pytest.mark.parametrize("config", ["head_dim_16"], indirect=True)
def test_blocks_one_by_one_are_compiled_by_the_tower_s_options(config, tower, monkeypatch):
    """Without them XLA may round between a product and the residual sum."""
    run_block = tower_module._run_block
    refused = jax.jit(run_block.__wrapped__, compiler_options={"no_such_option": True})
    monkeypatch.setattr(run_block, "_by_options", refused)
    grid = GRIDS["smaller_than_a_window"]
    patches = random_patches(config, grid)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        next(tower.hidden_states(patches, grid))
    # Within another program, whose options hold, none may be given.
    assert jnp.isfinite(jax.jit(encode)(tower, *tower.prepare(patches, grid))).all()


class Adapted(nnx.Module):
    """A layer with a sum of low rank beside it."""

    def __init__(self, layer):
        outputs, inputs = layer.weight.shape
        self.layer = layer
        self.lora = nnx.LoRA(
            inputs, 2, outputs, b_initializer=nnx.initializers.normal(), rngs=nnx.Rngs(0)
        )

    def __call__(self, x):
        return self.layer(x) + self.lora(x)


@pytest.mark.parametrize("config", ["head_dim_16"], indirect=True)
def test_what_is_replaced_between_calls_takes_effect(config, tower):
    grid = GRIDS["smaller_than_a_window"]
    patches = random_patches(config, grid)
    ours = nnx.clone(tower)
    before = ours(patches, grid)
    ours.blocks[1].attn.qkv = Adapted(ours.blocks[1].attn.qkv)
    adapted = ours(patches, grid)
    assert relative_error(adapted, before) > 1e-3
    ours.merger.fc2.weight = nnx.Param(ours.merger.fc2.weight[...] * 2)
    after = ours(patches, grid)
    assert relative_error(after, adapted) > 0.1
    expected = jax.jit(encode)(ours, *ours.prepare(patches, grid))[: len(after)]
    assert relative_error(after, expected) < FP32_TOLERANCE


def test_encode_under_a_jit_of_the_callers_own(config, tower, traced_tokens):
    graphdef, parameters = nnx.split(tower)
    bucket = choose_bucket(config, GRIDS["mix"], [448])

    @jax.jit
    def pooled(parameters, pixel_values, layout):
        result = encode(nnx.merge(graphdef, parameters), pixel_values, layout)
        rows = jnp.concatenate(jax.tree.leaves(result), axis=1)
        real = jnp.arange(len(rows)) < layout.num_merged
        return jnp.where(real[:, None], rows, 0).sum(axis=0) / layout.num_merged

    for grid in (GRIDS["mix"], GRIDS["clip"]):
        patches = random_patches(config, grid)
        padded = np.pad(patches, ((0, bucket.tokens - len(patches)), (0, 0)))
        ours = pooled(parameters, padded, plan_layout(config, grid, pad_to=bucket))
        expected = side_by_side(tower(patches, grid)).mean(axis=0)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert pooled._cache_size() == 1
    assert traced_tokens.count(bucket.tokens) == 1 + config.family.windows


def test_a_call_under_jit_leaves_no_tracer_behind(config, tower):
    grid = [(1, 4, 6)]
    patches = random_patches(config, grid)
    inside = jax.jit(lambda values: tower(values, grid))(patches)
    np.testing.assert_allclose(
        side_by_side(inside), side_by_side(tower(patches, grid)), rtol=1e-5, atol=1e-5
    )


def test_where_nothing_is_promoted_silently(config, tower):
    grid = [(1, 4, 6)]
    half = nnx.clone(tower)
    nnx.update(half, jax.tree.map(lambda value: value.astype(jnp.bfloat16), nnx.state(half)))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert jnp.isfinite(side_by_side(half(random_patches(config, grid), grid))).all()


def test_a_call_on_constants_under_a_jit_of_the_callers_own(config, tower):
    grid = [(1, 4, 6)]
    outside = tower(random_patches(config, grid), grid)
    inside = jax.eval_shape(lambda: tower(random_patches(config, grid), grid))
    assert jax.tree.map(jnp.shape, inside) == jax.tree.map(jnp.shape, outside)


def test_gradients_reach_every_parameter(config, tower):
    grid = [(1, 4, 6)]
    patches, layout = tower.prepare(random_patches(config, grid), grid)

    def loss(tower):
        result = encode(tower, jnp.asarray(patches), layout)
        return sum((rows[: layout.num_merged] ** 2).sum() for rows in jax.tree.leaves(result))

    for path, gradient in nnx.to_flat_state(nnx.state(jax.jit(jax.grad(loss))(tower))):
        assert np.abs(gradient[...]).max() > 0, path


def test_a_call_waits_for_what_it_reads(config, tower, monkeypatch):
    """JAX 0.11.2 does not always on a GPU: nothing may be on its way there when the tower's
    program, or the one that pads, is launched. NumPy arrays, which JAX would upload, have no
    `is_ready`.
    """
    grid = [(1, 4, 6)]

    @jax.jit
    def slow(patches):
        square = jnp.eye(1024)
        for _ in range(20):
            square = square @ square
        return patches * square[0, 0]

    for _ in range(2):  # the first compiles
        patches = slow(random_patches(config, grid))
        tower.prepare(patches, grid)
        assert patches.is_ready()

    def watched(function, module):
        run = compiled(function, module)

        def run_watched(*arguments):
            assert all(leaf.is_ready() for leaf in jax.tree.leaves(arguments))
            return run(*arguments)

        return run_watched

    monkeypatch.setattr("flax_models.tower.compiled", watched)
    tower(random_patches(config, grid), grid)


def test_what_a_residual_sum_reads_nothing_else_does(config, tower):
    """So XLA has cuBLAS write it over the stream; test_compile_ahead.py sees that it does."""
    layout = plan_layout(config, GRIDS["mix"])
    windows, _ = attention.layout_segments(config, layout, "reference", "fused")
    stream = jnp.zeros((len(layout.window_order), config.hidden_size))
    program = str(jax.make_jaxpr(tower.blocks[0])(stream, windows))
    assert program.count(" = optimization_barrier ") == 2


def test_encode_refuses_patches_of_another_layout(config, tower):
    layout = plan_layout(config, [(1, 4, 4)], pad_to=32)
    dim = config.patch_dim
    with pytest.raises(ValueError, match=rf"padded shape \[32, {dim}\], got \[16, {dim}\]"):
        encode(tower, jnp.zeros((16, dim)), layout)


def test_more_tokens_than_the_largest_bucket(config, tower):
    small = nnx.clone(tower)
    small.token_buckets = (16, 32)
    with pytest.raises(ValueError, match=r"64 tokens.* largest token bucket \(32\)"):
        small(np.zeros((64, config.patch_dim), np.float32), [(1, 8, 8)])


@pytest.mark.parametrize("config", ["head_dim_16"], indirect=True)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_kernel_and_reference_agree_in_the_tower(config, tower, implementation):
    other = nnx.clone(tower)
    other.implementation = implementation
    grid = GRIDS["edge_windows"]
    patches = random_patches(config, grid)
    ours, theirs = side_by_side(other(patches, grid)), side_by_side(tower(patches, grid))
    assert relative_error(ours, theirs) < FP32_TOLERANCE


def test_a_dtype_that_jax_does_not_know(tmp_path):
    for unknown in ("bf16", object()):
        with pytest.raises(ValueError, match="dtype must be one of bfloat16, float16, float32"):
            load_vision_tower(write_checkpoint(tmp_path, CONFIG), unknown)


def test_loading_on_a_named_device(tmp_path):
    tower = load_vision_tower(write_checkpoint(tmp_path, CONFIG), device="cpu")
    cpu = jax.devices("cpu")[0]
    assert all(leaf.devices() == {cpu} for leaf in jax.tree.leaves(tower))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(tower))
    grid = [(1, 4, 4)]
    assert tower(random_patches(CONFIG, grid), grid).devices() == {cpu}
