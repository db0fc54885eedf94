"""Sizes of a tower as `config.json` states them, and files that state none."""

import json
from dataclasses import replace

import pytest

from flax_models import CheckpointError, VisionConfig
from flax_models.common.families import FAMILIES

# As published with Qwen2.5-VL 7B, less the language model.
PUBLISHED = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}


# Less the language model, what was published with Qwen2-VL 7B and Qwen3-VL 8B.
PUBLISHED_QWEN2 = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
PUBLISHED_QWEN3 = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
# Of Qwen3.5 27B, as published and as transformers 5 saves it; of both Omnis, less what is not the
# tower's.
PUBLISHED_QWEN3_5 = {
    "model_type": "qwen3_5",
    "vision_config": PUBLISHED_QWEN3["vision_config"]
    | {"deepstack_visual_indexes": [], "model_type": "qwen3_5", "out_hidden_size": 5120},
}
SAVED_QWEN3_5 = {
    "model_type": "qwen3_5",
    "vision_config": {
        name: value
        for name, value in PUBLISHED_QWEN3_5["vision_config"].items()
        if name != "deepstack_visual_indexes"
    }
    | {
        "model_type": "qwen3_5_vision",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    },
}
PUBLISHED_OMNI2_5 = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": PUBLISHED["vision_config"]
        | {"embed_dim": 1280, "model_type": "qwen2_5_omni_vision_encoder"},
    },
}
PUBLISHED_OMNI3 = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "vision_config": PUBLISHED_QWEN3["vision_config"]
        | {"image_size": 768, "model_type": "qwen3_omni_moe_vision_encoder"}
        | {"out_hidden_size": 2048},
    },
}


def write(directory, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "config.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    "config",
    [
        VisionConfig(
            patch_size=16, window_size=128, rope_theta=500.0, fullatt_block_indexes=(2, 40)
        ),
        VisionConfig.qwen2_vl_7b(),
        VisionConfig.of("qwen2_vl", intermediate_size=321, hidden_size=80, num_heads=1),
        VisionConfig.qwen3_vl_4b(),
        VisionConfig.of("qwen2_5_omni", temporal_patch_size=1, in_channels=4),
        VisionConfig.of("qwen3_omni_moe", spatial_merge_size=3),
        VisionConfig.of("qwen3_5"),
    ],
    ids=lambda config: f"{config.model_type}-{config.intermediate_size}",
)
def test_what_is_written_is_read_again(tmp_path, config):
    values = config.to_json()
    assert "_vision" in values["model_type"]
    assert VisionConfig.from_pretrained(write(tmp_path, values)) == config
    with pytest.raises(ValueError, match=r"norm_eps 1e-05 cannot be written"):
        replace(config, norm_eps=1e-5).to_json()


def test_reads_a_whole_model(tmp_path):
    assert VisionConfig.from_pretrained(write(tmp_path, PUBLISHED)) == VisionConfig.qwen2_5_vl_7b()


def test_reads_whole_models_of_the_other_families(tmp_path):
    for published, expected in (
        (PUBLISHED_QWEN2, VisionConfig.qwen2_vl_7b()),
        (PUBLISHED_QWEN3, VisionConfig.qwen3_vl_8b()),
        (PUBLISHED_QWEN3_5, VisionConfig.of("qwen3_5", out_hidden_size=5120)),
        (SAVED_QWEN3_5, VisionConfig.of("qwen3_5", out_hidden_size=5120)),
        (PUBLISHED_OMNI2_5, VisionConfig.of("qwen2_5_omni")),
        (PUBLISHED_OMNI3, VisionConfig.of("qwen3_omni_moe")),
        # Their thinkers alone.
        (PUBLISHED_OMNI2_5["thinker_config"], VisionConfig.of("qwen2_5_omni")),
        (PUBLISHED_OMNI3["thinker_config"], VisionConfig.of("qwen3_omni_moe")),
    ):
        assert VisionConfig.from_pretrained(write(tmp_path, published)) == expected


@pytest.mark.parametrize(
    ("family", "model_type"),
    [
        *(("qwen3_vl", f"qwen3_vl{rest}") for rest in ("", "_vision", "_moe", "_moe_vision")),
        *(("qwen3_5", f"qwen3_5{rest}") for rest in ("", "_vision", "_moe", "_moe_vision")),
        *(("qwen3_5", f"qwen4_exp{rest}") for rest in ("", "_vision")),
        ("qwen3_omni_moe", "qwen3_omni_moe_vision_encoder"),
    ],
)
def test_names_of_one_family(tmp_path, family, model_type):
    alone = PUBLISHED_QWEN3["vision_config"] | {"model_type": model_type}
    expected = VisionConfig.of(family, out_hidden_size=4096)
    assert VisionConfig.from_pretrained(write(tmp_path, alone)) == expected


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_5_vl_vision"])
def test_reads_a_tower_alone(tmp_path, model_type):
    alone = PUBLISHED["vision_config"] | {"model_type": model_type}
    assert VisionConfig.from_pretrained(str(write(tmp_path, alone))) == VisionConfig()


@pytest.mark.parametrize("nested", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vision", 5, None])
@pytest.mark.parametrize("published", [PUBLISHED, PUBLISHED_QWEN2, PUBLISHED_QWEN3])
def test_the_whole_models_type_decides(tmp_path, published, nested):
    """As in transformers, whatever the nested type says; tests of whole files hold the values."""
    expected = VisionConfig.from_pretrained(write(tmp_path, published))
    vision = published["vision_config"] | {"model_type": nested}
    disagreeing = write(tmp_path, published | {"vision_config": vision})
    assert VisionConfig.from_pretrained(disagreeing) == expected
    transformers = pytest.importorskip("transformers")
    theirs = type(transformers.AutoConfig.from_pretrained(disagreeing).vision_config)
    assert theirs is type(transformers.CONFIG_MAPPING[published["model_type"]]().vision_config)


def test_the_thinkers_tower_counts_in_an_omni_model_and_nowhere_else(tmp_path):
    other = {"vision_config": PUBLISHED["vision_config"] | {"depth": 2}}
    assert VisionConfig.from_pretrained(write(tmp_path, PUBLISHED_OMNI2_5 | other)).depth == 32
    write(tmp_path, PUBLISHED | {"thinker_config": other})
    assert VisionConfig.from_pretrained(tmp_path).depth == 32


def test_a_nested_type_counts_where_the_whole_model_states_none(tmp_path):
    vision = PUBLISHED["vision_config"] | {"model_type": "qwen2_5_vl"}
    write(tmp_path, {"vision_config": vision})
    assert VisionConfig.from_pretrained(tmp_path) == VisionConfig()


def test_reads_rotary_settings(tmp_path):
    rope = {"rope_type": "axial", "rope_theta": 500.0}
    vision = PUBLISHED["vision_config"] | {"rope_parameters": rope}
    write(tmp_path, PUBLISHED | {"vision_config": vision})
    assert VisionConfig.from_pretrained(tmp_path).rope_theta == 500.0


@pytest.mark.parametrize(
    ("rotation", "theta"),
    [
        ({"rope_theta": 5.0}, 5.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "axial"}}, 5.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, 7.0),
        ({"rope_theta": 5.0, "rope_parameters": None}, 5.0),
    ],
)
def test_theta_by_itself_counts_where_the_parameters_have_none(tmp_path, rotation, theta):
    """As in transformers 5."""
    write(tmp_path, PUBLISHED | {"vision_config": PUBLISHED["vision_config"] | rotation})
    assert VisionConfig.from_pretrained(tmp_path).rope_theta == theta


@pytest.mark.parametrize("published", [PUBLISHED, PUBLISHED_QWEN2, PUBLISHED_QWEN3])
def test_reads_the_other_names_that_transformers_takes(tmp_path, published):
    vision = dict(published["vision_config"])
    del vision["num_heads"], vision["depth"]
    vision |= {"num_attention_heads": 8, "num_hidden_layers": 32}
    config = VisionConfig.from_pretrained(
        write(tmp_path, published | {"vision_config": vision | {"num_heads": 8}})
    )
    assert (config.num_heads, config.depth) == (8, 32)


def test_reads_what_hugging_face_saves(hf_model, hf_checkpoints):
    theirs = hf_model.config.vision_config
    for directory in (hf_checkpoints.tower, hf_checkpoints.whole, hf_checkpoints.sharded):
        ours = VisionConfig.from_pretrained(directory)
        assert ours.model_type == hf_model.config.model_type
        assert ours.family.activation == theirs.hidden_act
        # Sizes are under other names in Qwen2-VL: those of its layers tell.
        block, merger = hf_model.model.visual.blocks[0], hf_model.model.visual.merger
        *_, last = merger.parameters()
        assert ours.hidden_size == block.attn.proj.out_features
        assert ours.intermediate_size in {len(p) for p in block.mlp.parameters()}
        assert ours.out_hidden_size == len(last)
        for name in (
            *("depth", "num_heads", "in_channels"),
            *("patch_size", "temporal_patch_size", "spatial_merge_size"),
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name, absent in {
            "window_size": None,
            "fullatt_block_indexes": (),
            "num_position_embeddings": None,
            "deepstack_visual_indexes": (),
        }.items():
            stated = getattr(theirs, name, absent)
            assert getattr(ours, name) == (tuple(stated) if isinstance(stated, list) else stated)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (PUBLISHED_QWEN2, {"mlp_ratio": None}, "must be numbers, got 1280 and None"),
        (PUBLISHED_QWEN2, {"mlp_ratio": 0}, "intermediate_size must be a positive integer, got 0"),
        (PUBLISHED_QWEN2, {"hidden_act": "gelu"}, "is 'gelu'; qwen2_vl has 'quick_gelu'"),
        (PUBLISHED_QWEN3, {"hidden_act": "silu"}, "is 'silu'; qwen3_vl has 'gelu_pytorch_tanh'"),
        (PUBLISHED_QWEN3, {"patch_size": [16, 16]}, r"must be a positive integer, got \[16, 16\]"),
        (PUBLISHED_QWEN3, {"deepstack_visual_indexes": "8"}, "must be block numbers from 0"),
    ],
)
def test_refuses_files_of_the_other_families(tmp_path, published, changes, message):
    vision = published["vision_config"] | changes
    with pytest.raises(ValueError, match="config.json: .*" + message):
        VisionConfig.from_pretrained(write(tmp_path, published | {"vision_config": vision}))


@pytest.mark.parametrize(
    ("published", "required"),
    [
        (PUBLISHED, ["hidden_size"]),
        (PUBLISHED_QWEN3, FAMILIES["qwen3_vl"].config_keys.values()),
    ],
)
def test_refuses_files_that_leave_sizes_out(tmp_path, published, required):
    for name in required:
        vision = {k: value for k, value in published["vision_config"].items() if k != name}
        with pytest.raises(ValueError, match=f"config.json: it has no value for {name} of"):
            VisionConfig.from_pretrained(write(tmp_path, published | {"vision_config": vision}))


# What transformers 4.49 saves of Qwen2-VL 7B and 72B and of Qwen2.5-VL 3B, 7B and 32B.
@pytest.mark.parametrize(
    ("model_type", "stated", "expected"),
    [
        ("qwen2_vl", {}, VisionConfig.qwen2_vl_7b()),
        ("qwen2_vl", {"hidden_size": 8192}, VisionConfig.of("qwen2_vl", out_hidden_size=8192)),
        (
            "qwen2_5_vl",
            {"hidden_size": 1280, "out_hidden_size": 2048},
            VisionConfig.qwen2_5_vl_3b(),
        ),
        ("qwen2_5_vl", {"hidden_size": 1280}, VisionConfig.qwen2_5_vl_7b()),
        (
            "qwen2_5_vl",
            {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 5120},
            VisionConfig.qwen2_5_vl_32b(),
        ),
    ],
)
def test_reads_files_that_leave_out_what_transformers_takes_anyway(
    tmp_path, model_type, stated, expected
):
    vision = {"in_chans": 3, "model_type": model_type, "spatial_patch_size": 14, **stated}
    write(tmp_path, {"model_type": model_type, "vision_config": vision})
    assert VisionConfig.from_pretrained(tmp_path) == expected


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe"])
def test_what_files_leave_out_is_transformers_default(model_type):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CONFIG_MAPPING[model_type]()
    theirs = getattr(theirs, "thinker_config", theirs).vision_config
    stated = {name: getattr(theirs, name) for name in FAMILIES[model_type].config_defaults}
    assert FAMILIES[model_type].config_defaults == stated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vision_config": PUBLISHED["vision_config"] | {"hidden_act": "gelu"}},
            "config.json: hidden_act is 'gelu'; qwen2_5_vl has 'silu'",
        ),
        ({"model_type": "llava"}, "config.json: unknown model type 'llava'; supported: qwen2_vl"),
        # Text alone, and what transformers would make another tower of or none.
        ({"model_type": "qwen2_5_vl_text"}, "unknown model type 'qwen2_5_vl_text'"),
        ({"model_type": "glm4v"}, "unknown model type 'glm4v'; supported: qwen2_vl"),
        ({"model_type": ["qwen2_5_vl"]}, r"unknown model type \['qwen2_5_vl'\]"),
        (
            {"model_type": None, "vision_config": {"model_type": "x"}},
            "unknown model type 'x'; supported: qwen2_vl",
        ),
        (
            {"vision_config": {"depth": 2}},
            "config.json: it has no value for hidden_size of the vision",
        ),
        (
            {"vision_config": PUBLISHED["vision_config"] | {"num_heads": 7}},
            "config.json: hidden_size 1280 is not divisible by num_heads 7",
        ),
        (
            {"vision_config": PUBLISHED["vision_config"] | {"rope_parameters": {"rope_type": "y"}}},
            "config.json: rope_type 'y' is not supported",
        ),
        (
            {"vision_config": PUBLISHED["vision_config"] | {"num_attention_heads": 8}},
            "config.json: num_attention_heads is 8, but num_heads is 16",
        ),
        (
            {"vision_config": PUBLISHED["vision_config"] | {"rope_parameters": 3}},
            "config.json: rope_parameters must be a JSON object, got 3",
        ),
    ],
)
def test_refuses_files_that_make_no_tower(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig.from_pretrained(write(tmp_path, PUBLISHED | changes))


def test_a_file_without_model_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown model type None"):
        VisionConfig.from_pretrained(write(tmp_path, PUBLISHED["vision_config"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "config.json holds a JSON list, not an object"),
        ('{"depth": ', "cannot read .*config.json as JSON"),
        (PUBLISHED_OMNI3 | {"thinker_config": 3}, "'thinker_config' in .* is not a JSON object"),
        ({"vision_config": 3}, "'vision_config' in .* is not a JSON object"),
    ],
)
def test_refuses_files_that_are_no_configuration(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        VisionConfig.from_pretrained(write(tmp_path, content))


def test_missing_directory_and_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such checkpoint directory: .*absent"):
        VisionConfig.from_pretrained(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        VisionConfig.from_pretrained(tmp_path)
