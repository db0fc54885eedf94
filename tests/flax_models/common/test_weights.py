"""The rearrangement of a checkpoint's tensors that both towers share."""

import re

import ml_dtypes
import numpy as np
import pytest

from flax_models import CheckpointError, VisionConfig
from flax_models.common.checkpoint import expected_tensors
from flax_models.common.weights import published_tensors, tower_parameters, tower_weights
from tests.gated_contract import oracle
from tests.tower_checkpoints import SMALL_TOWERS, random_tensors

EARLY = [name for name, config in SMALL_TOWERS.items() if not config.family.late_norm]
LATE = [name for name, config in SMALL_TOWERS.items() if config.family.late_norm]


@pytest.fixture(params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.mark.parametrize("config", EARLY, indirect=True)
def test_the_padded_mlp_computes_the_same(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    width, padded = config.intermediate_size, config.aligned_intermediate_size
    [up], down = config.family.mlp_inputs, config.family.mlp_output
    x = np.random.default_rng(1).standard_normal((5, config.hidden_size)).astype(np.float32)
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        ours = x @ weights[f"{mlp}.up.weight"].T + weights[f"{mlp}.up.bias"]
        theirs = x @ tensors[f"{mlp}.{up}.weight"].T + tensors[f"{mlp}.{up}.bias"]
        assert ours.shape == (5, padded)
        np.testing.assert_allclose(ours[:, :width], theirs, rtol=1e-5, atol=1e-5)
        assert not ours[:, width:].any()
        weight = weights[f"{mlp}.down.weight"]
        np.testing.assert_array_equal(weight[:, :width], tensors[f"{mlp}.{down}.weight"])
        assert not weight[:, width:].any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("config", LATE, indirect=True)
def test_the_channels_of_biases_are_1_in_every_dtype(config, dtype):
    """To the bit: what they multiply, the biases of attention and MLP, are not scaled."""
    weights = tower_weights(config, random_tensors(config), dtype)
    bias = weights["blocks.0.mlp.bias"].reshape(2, -1)[:, channels_of_biases(config)]
    gate, up = bias.astype(np.float32)
    np.testing.assert_array_equal(gate / (1 + np.exp(-gate)) * up, [1, 1])


def channels_of_biases(config):
    return slice(config.intermediate_size, config.intermediate_size + 2)


@pytest.mark.parametrize("config", LATE, indirect=True)
def test_a_late_norm_computes_the_same(config):
    """From the stream behind each attention, without its bias, to that behind the MLP, in fp64."""
    tensors = {name: x.astype(np.float64) for name, x in random_tensors(config).items()}
    weights = tower_weights(config, tensors, np.float64)
    stream = 3 * np.random.default_rng(1).standard_normal((5, config.hidden_size))
    for index in range(config.depth):
        block, mlp = f"blocks.{index}", f"blocks.{index}.mlp"

        def linear(name, x, mlp=mlp):
            return x @ tensors[f"{mlp}.{name}.weight"].T + tensors[f"{mlp}.{name}.bias"]

        x = stream + tensors[f"{block}.attn.proj.bias"]
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True)) * tensors[f"{block}.norm2.weight"]
        gate, up = (linear(name, normed) for name in config.family.mlp_inputs)
        expected = x + linear(config.family.mlp_output, gate / (1 + np.exp(-gate)) * up)

        product = stream @ weights[f"{mlp}.gate_up.weight"].T
        biases = [weights[f"{mlp}.{name}"] for name in ("stream_bias", "product_bias", "bias")]
        activated = oracle(product, stream, biases, eps=0)
        assert activated.shape == (5, config.aligned_intermediate_size)
        np.testing.assert_allclose(activated[:, channels_of_biases(config)], 1, rtol=1e-13)
        assert not activated[:, config.intermediate_size + 2 :].any()
        ours = stream + activated @ weights[f"{mlp}.down.weight"].T
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)  # of fp32 sums
    assert not any(name.endswith(("norm2.weight", "attn.proj.bias")) for name in weights)


@pytest.mark.parametrize("config", LATE, indirect=True)
def test_what_is_computed_has_the_towers_dtype_or_the_checkpoints(config):
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in random_tensors(config).items()}
    for dtype in (None, "bfloat16", np.float32):
        for name, weight in tower_weights(config, tensors, dtype).items():
            computed = re.search(r"mlp\.", name)
            assert weight.dtype == (dtype or "bfloat16" if computed else "bfloat16"), name


def test_published_widths_are_aligned():
    widths = {
        VisionConfig.qwen2_vl_7b(): (5120, 5120),
        VisionConfig.qwen2_5_vl_7b(): (3420, 3456),
        VisionConfig.qwen2_5_vl_72b(): (3456, 3520),  # two channels more carry biases
        VisionConfig.qwen3_vl_4b(): (4096, 4096),
        VisionConfig.qwen3_vl_8b(): (4304, 4352),
    }
    for config, (published, stored) in widths.items():
        assert (config.intermediate_size, config.aligned_intermediate_size) == (published, stored)


def test_everything_else_is_passed_on_without_a_copy(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.norm1.weight"):
        if name in tensors:
            assert weights[name] is tensors[name]
    mergers = {"merger": "merger"} | {
        f"deepstack_mergers.{i}": f"{config.family.deepstack}.{i}"
        for i in range(len(config.deepstack_visual_indexes))
    }
    for ours, theirs in mergers.items():
        for layer, stored in zip(("norm", "fc1", "fc2"), config.family.merger, strict=True):
            assert weights[f"{ours}.{layer}.weight"] is tensors[f"{theirs}.{stored}.weight"]
    if config.num_position_embeddings:
        assert weights["position_table.weight"] is tensors["pos_embed.weight"]
    assert weights["patch_embed.proj.weight"].shape == (config.hidden_size, config.patch_dim)
    assert np.shares_memory(weights["patch_embed.proj.weight"], tensors["patch_embed.proj.weight"])


def test_q_k_and_v_of_their_own_become_one_product():
    tensors = random_tensors(SMALL_TOWERS["qwen2_5_omni"])
    weights = tower_weights(SMALL_TOWERS["qwen2_5_omni"], tensors)
    for part in ("weight", "bias"):
        parts = np.split(weights[f"blocks.1.attn.qkv.{part}"], 3)
        for name, ours in zip("qkv", parts, strict=True):
            np.testing.assert_array_equal(ours, tensors[f"blocks.1.attn.{name}.{part}"])


def test_trainable_parameters_taken_apart_are_the_tensors(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors, trainable=True)
    published = published_tensors(config, weights)
    assert list(published) == list(tensors)
    for name, tensor in published.items():
        np.testing.assert_array_equal(tensor, tensors[name])
    for name in ("blocks.1.mlp.down.bias", "blocks.0.attn.proj.bias", "merger.fc1.weight"):
        rest = {key: weight for key, weight in weights.items() if key != name}
        with pytest.raises(ValueError, match=rf"{re.escape(name)}' is missing"):
            published_tensors(config, rest)
        with pytest.raises(ValueError, match="'another' is none of them"):
            published_tensors(config, {**weights, "another": weights[name]})


@pytest.mark.parametrize("config", ["head_dim_16", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_padding_that_is_not_0_is_not_left_out(config, dtype):
    tensors = {name: x.astype(dtype) for name, x in random_tensors(config).items()}
    weights = tower_weights(config, tensors, trainable=True)
    first = "gate_up" if config.family.late_norm else "up"
    for name in (f"{first}.weight", f"{first}.bias", "down.weight"):
        spoilt = weights[f"blocks.1.mlp.{name}"].copy()
        spoilt[(slice(None), -1) if name == "down.weight" else -1] = 1e-3
        with pytest.raises(ValueError, match=rf"'blocks\.1\.mlp\.{name}' must be 0 beyond"):
            published_tensors(config, {**weights, f"blocks.1.mlp.{name}": spoilt})


def test_a_missing_tensor(config):
    tensors = random_tensors(config)
    missing = f"blocks.1.mlp.{config.family.mlp_inputs[-1]}.bias"
    del tensors[missing]
    with pytest.raises(KeyError, match=re.escape(missing)):
        tower_weights(config, tensors)


@pytest.mark.parametrize("config", LATE, indirect=True)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_what_a_large_bias_adds_to_the_product_is_finite(config, dtype):
    tensors = random_tensors(config)
    tensors["blocks.0.attn.proj.bias"][3] = 6e4
    tensors["blocks.0.mlp.up_proj.weight"][:, 3] *= 40
    weights = tower_weights(config, tensors, dtype)
    gate_up, stream_bias, product_bias = (
        weights[f"blocks.0.mlp.{name}"].astype(np.float64)
        for name in ("gate_up.weight", "stream_bias", "product_bias")
    )
    exact = gate_up @ stream_bias
    assert np.abs(exact).max() > np.finfo(np.float16).max
    rounding = 1e-6 if dtype == np.float16 else 2**-8
    np.testing.assert_allclose(product_bias, exact, rtol=rounding, atol=1e-2)


@pytest.mark.parametrize("config", LATE, indirect=True)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
@pytest.mark.parametrize("biases", [(6e4, 6e4), (2e4, 0.375), (-2e4, 2e4)])
def test_neither_of_the_streams_biases_is_lost_in_the_other(config, dtype, biases):
    tensors = random_tensors(config)
    for name, value in zip(("attn.proj.bias", "mlp.down_proj.bias"), biases, strict=True):
        tensors[f"blocks.0.{name}"][3] = value
    columns = tower_weights(config, tensors, dtype)["blocks.0.mlp.down.weight"]
    attention, mlp = np.array(biases).astype(dtype)
    np.testing.assert_array_equal(columns[3, channels_of_biases(config)], [mlp, attention])


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_numbers_beyond_fp16_are_refused(config, stored):
    """Of any tensor: infinite parameters would make NaN of every image."""
    for name in expected_tensors(config):
        tensors = {key: x.astype(stored) for key, x in random_tensors(config).items()}
        tensors[name].reshape(-1)[-1] = -4e6
        message = "too large for float16: load in bfloat16"
        with pytest.raises(CheckpointError, match=message) as error:
            dict(tower_parameters(config, tensors, np.float16))
        if name.startswith("blocks.") and not re.search(r"\.mlp\.|\.[qkv]\.", name):
            assert repr(name) in str(error.value)
    for dtype in ("bfloat16", np.float32):
        parameters = dict(tower_parameters(config, tensors, dtype))
        assert all(np.isfinite(x.astype(np.float32)).all() for x in parameters.values())


@pytest.mark.parametrize("config", LATE, indirect=True)
def test_a_folded_norm_that_fp16_is_too_narrow_for(config):
    """Neither the matrix nor the norm is, and not what they make of a row."""
    tensors = random_tensors(config)
    norm, gate, up = (f"blocks.1.{name}" for name in ("norm2", "mlp.gate_proj", "mlp.up_proj"))
    tensors[f"{norm}.weight"] *= 1e-5
    for linear in (gate, up):
        tensors[f"{linear}.bias"][:] = 0
    tensors[f"{gate}.weight"] *= 1e5
    words = f"the tensor '{up}.weight' times '{norm}.weight' is too small for float16: load in "
    with pytest.raises(CheckpointError, match=words + "bfloat16"):
        tower_weights(config, tensors, np.float16)
    for dtype in (ml_dtypes.bfloat16, np.float32):
        tower_weights(config, tensors, dtype)


@pytest.mark.parametrize("config", LATE, indirect=True)
@pytest.mark.parametrize("smaller", ["norm2.weight", "mlp.up_proj.weight"])
def test_what_is_small_in_the_checkpoint_too_is_loaded(config, smaller):
    """Beside its bias, or as fp16 would hold it anyway, nothing is lost."""
    tensors = random_tensors(config)
    tensors[f"blocks.1.{smaller}"] *= 1e-6
    if smaller != "norm2.weight":
        tensors["blocks.1.mlp.up_proj.bias"][:] = 0
    weight = tower_weights(config, tensors, np.float16)["blocks.1.mlp.gate_up.weight"]
    assert weight.any()
