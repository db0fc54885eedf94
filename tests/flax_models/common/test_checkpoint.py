import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from flax_models import CheckpointError, VisionConfig, read_checkpoint
from flax_models.common.checkpoint import expected_tensors


def random_tensors(config, dtype=np.float32):
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(dtype)
        for name, shape in expected_tensors(config).items()
    }


def save_single(directory, tensors):
    save_file(tensors, directory / "model.safetensors")
    return directory


def save_sharded(directory, tensors, shards):
    """Deal the tensors out to files as a hand of cards, with an index."""
    names = sorted(tensors)
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, directory / file)
    write_index(directory, files)
    return directory


def write_index(directory, weight_map):
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize("kind", ["tower", "whole", "sharded"])
def test_reads_what_hugging_face_saves(hf_model, hf_checkpoints, kind):
    directory = getattr(hf_checkpoints, kind)
    assert (directory / "model.safetensors").exists() == (kind != "sharded")
    tensors = read_checkpoint(VisionConfig.from_pretrained(directory), directory)
    theirs = {name: p.detach().numpy() for name, p in hf_model.model.visual.named_parameters()}
    assert set(tensors) == set(theirs)
    assert_same(tensors, {name: theirs[name] for name in tensors})


PREFIXES = ["", "visual.", "model.visual.", "thinker.visual.", "thinker.model.visual."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("shards", [None, 3])
def test_prefixes_and_shards(tmp_path, tiny_config, prefix, shards):
    tensors = random_tensors(tiny_config)
    stored = {prefix + name: array for name, array in tensors.items()}
    stored["model.embed_tokens.weight"] = np.zeros((4, 4), np.float32)
    if shards is None:
        save_single(tmp_path, stored)
    else:
        save_sharded(tmp_path, stored, shards)
    assert_same(read_checkpoint(tiny_config, str(tmp_path)), tensors)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_keeps_the_stored_dtype(tmp_path, tiny_config, dtype):
    tensors = random_tensors(tiny_config, dtype)
    assert_same(read_checkpoint(tiny_config, save_single(tmp_path, tensors)), tensors)


def test_expected_tensors_of_the_published_tower():
    shapes = expected_tensors(VisionConfig.qwen2_5_vl_7b())
    assert len(shapes) == 1 + 32 * 12 + 5
    assert shapes["patch_embed.proj.weight"] == (1280, 3, 2, 14, 14)
    assert shapes["blocks.31.mlp.down_proj.weight"] == (1280, 3420)
    assert shapes["merger.mlp.2.weight"] == (3584, 5120)
    assert sum(math.prod(shape) for shape in shapes.values()) == 676_550_144


def test_expected_tensors_of_the_other_families():
    shapes = expected_tensors(VisionConfig.qwen2_vl_7b())
    assert len(shapes) == 1 + 32 * 12 + 6
    assert shapes["blocks.31.mlp.fc2.weight"] == (1280, 5120)
    assert sum(math.prod(shape) for shape in shapes.values()) == 675_759_104
    shapes = expected_tensors(VisionConfig.qwen3_vl_8b())
    assert len(shapes) == 3 + 27 * 12 + 4 * 6
    assert shapes["pos_embed.weight"] == (2304, 1152)
    assert shapes["merger.norm.bias"] == (1152,)
    assert shapes["deepstack_merger_list.2.norm.bias"] == (4608,)


def test_opens_only_the_files_that_hold_vision_tensors(tmp_path, tiny_config):
    tensors = random_tensors(tiny_config)
    save_file(tensors, tmp_path / "vision.safetensors")
    files = dict.fromkeys(tensors, "vision.safetensors")
    write_index(
        tmp_path, files | {"model.layers.0.mlp.up_proj.weight": "never-written.safetensors"}
    )
    assert_same(read_checkpoint(tiny_config, tmp_path), tensors)


def test_reads_only_vision_tensors(tmp_path, tiny_config, monkeypatch):
    read = []

    class Recorder:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.file.__exit__(*exception)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr("flax_models.common.checkpoint.safe_open", Recorder)
    tensors = {f"visual.{name}": array for name, array in random_tensors(tiny_config).items()}
    save_single(tmp_path, tensors | {"lm_head.weight": np.zeros((8, 8), np.float32)})
    read_checkpoint(tiny_config, tmp_path)
    assert sorted(read) == sorted(tensors)


def test_progress_goes_to_standard_error(tmp_path, tiny_config, capfd):
    save_single(tmp_path, random_tensors(tiny_config))
    read_checkpoint(tiny_config, tmp_path)
    assert capfd.readouterr() == ("", "")
    read_checkpoint(tiny_config, tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "reading weights" in err


def test_missing_directory_and_missing_files(tmp_path, tiny_config):
    with pytest.raises(CheckpointError, match=r"no such checkpoint directory: .*absent"):
        read_checkpoint(tiny_config, tmp_path / "absent")
    with pytest.raises(
        CheckpointError, match=r"holds neither model.safetensors nor model.safetensors.index.json"
    ):
        read_checkpoint(tiny_config, tmp_path)


def test_missing_shard(tmp_path, tiny_config):
    save_sharded(tmp_path, random_tensors(tiny_config), 3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no such checkpoint file: .*model-1.safetensors"):
        read_checkpoint(tiny_config, tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(tmp_path, tiny_config, kept):
    save_single(tmp_path, random_tensors(tiny_config))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or truncated"):
        read_checkpoint(tiny_config, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read .*index.json as JSON"),
        ("[]", "index.json holds a JSON list, not an object"),
        ("{}", "index.json is damaged, it needs a 'weight_map'"),
        ('{"weight_map": 3}', "index.json is damaged, it needs a 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "index.json is damaged, it needs a 'weight_map'"),
    ],
)
def test_damaged_index(tmp_path, tiny_config, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tiny_config, tmp_path)


def test_shard_without_the_tensor_that_the_index_promises(tmp_path, tiny_config):
    tensors = random_tensors(tiny_config)
    del tensors["blocks.1.attn.qkv.bias"]
    save_file(tensors, tmp_path / "a.safetensors")
    write_index(tmp_path, dict.fromkeys(expected_tensors(tiny_config), "a.safetensors"))
    with pytest.raises(CheckpointError, match=r"a.safetensors lacks the tensor 'blocks.1.attn.qkv"):
        read_checkpoint(tiny_config, tmp_path)


@pytest.mark.parametrize("missing", ["patch_embed.proj.weight", "blocks.1.norm2.weight"])
def test_missing_tensor(tmp_path, tiny_config, missing):
    tensors = {f"visual.{name}": array for name, array in random_tensors(tiny_config).items()}
    del tensors[f"visual.{missing}"]
    with pytest.raises(CheckpointError, match=f"lacks the tensor 'visual.{missing}'$"):
        read_checkpoint(tiny_config, save_single(tmp_path, tensors))


def test_many_missing_tensors_are_counted(tmp_path, tiny_config):
    save_single(tmp_path, {"visual.merger.ln_q.weight": np.zeros(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"'visual.patch_embed.proj.weight' and \d+ more"):
        read_checkpoint(tiny_config, tmp_path)


def test_no_vision_tower_at_all(tmp_path, tiny_config):
    save_single(tmp_path, {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=r"holds no vision tower"):
        read_checkpoint(tiny_config, tmp_path)


def test_wrong_shape(tmp_path, tiny_config):
    tensors = random_tensors(tiny_config)
    tensors["blocks.0.attn.qkv.weight"] = np.zeros((32, 96), np.float32)
    with pytest.raises(
        CheckpointError,
        match=r"'blocks.0.attn.qkv.weight' .* has shape \[32, 96\]; .* asks for \[96, 32\]",
    ):
        read_checkpoint(tiny_config, save_single(tmp_path, tensors))


def test_wrong_dtype(tmp_path, tiny_config):
    tensors = random_tensors(tiny_config)
    tensors["merger.mlp.0.bias"] = np.zeros(128, np.int8)
    with pytest.raises(
        CheckpointError, match=r"'merger.mlp.0.bias' .* is I8; expected BF16, F16, F32"
    ):
        read_checkpoint(tiny_config, save_single(tmp_path, tensors))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite(tmp_path, tiny_config, dtype, value):
    tensors = random_tensors(tiny_config, dtype)
    tensors["blocks.1.mlp.up_proj.weight"][2, 3] = value
    message = r"'blocks.1.mlp.up_proj.weight' in .*model.safetensors holds infinities or NaN"
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tiny_config, save_single(tmp_path, tensors))


def test_tensors_that_the_configuration_does_not_know(tmp_path, tiny_config):
    deeper = VisionConfig(**{**vars(tiny_config), "depth": 3})
    save_single(tmp_path, random_tensors(deeper))
    with pytest.raises(
        CheckpointError, match=r"holds the tensor 'blocks.2.attn.proj.bias' and 11 more, which"
    ):
        read_checkpoint(tiny_config, tmp_path)


@pytest.mark.parametrize("name", ["pos_embed.weight", "deepstack_merger_list.0.norm.bias"])
def test_tensors_of_qwen3_that_are_missing_or_too_many(tmp_path, name):
    config = VisionConfig.of(
        "qwen3_vl",
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=36,
        num_position_embeddings=25,
        deepstack_visual_indexes=(0,),
    )
    tensors = random_tensors(config)
    fewer = VisionConfig.of("qwen2_vl", depth=2, hidden_size=32, num_heads=2)
    save_single(tmp_path, random_tensors(fewer) | {name: tensors[name]})
    with pytest.raises(CheckpointError, match=rf"'{name}.*configuration knows nothing of"):
        read_checkpoint(fewer, tmp_path)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks the tensor '{name}'$"):
        read_checkpoint(config, save_single(tmp_path, tensors))


TWO_PREFIXES = [
    *(("", "visual."), ("visual.", ""), ("", "model.visual."), ("model.visual.", "")),
    *(("visual.", "model.visual."), ("model.visual.", "visual.")),
    ("thinker.visual.", "visual."),
]
ONE_TENSOR = ["blocks.0.attn.qkv.weight"]


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("doubled", [None, ONE_TENSOR], ids=["whole", "partly"])
@pytest.mark.parametrize(("first", "second"), TWO_PREFIXES)
def test_a_tower_under_two_prefixes(tmp_path, tiny_config, first, second, doubled, shards):
    """Of both, transformers' classes read different ones."""
    tensors = random_tensors(tiny_config)
    stored = {first + name: array for name, array in tensors.items()}
    stored |= {second + name: tensors[name] + 1 for name in doubled or tensors}
    save_single(tmp_path, stored) if shards is None else save_sharded(tmp_path, stored, shards)
    with pytest.raises(CheckpointError, match="by more than one prefix") as raised:
        read_checkpoint(tiny_config, tmp_path)
    for prefix in (first, second):
        assert re.search(f"'{prefix}(patch_embed|blocks|merger)", str(raised.value))


@pytest.mark.parametrize(("first", "second"), TWO_PREFIXES)
def test_a_tower_divided_between_two_prefixes(tmp_path, tiny_config, first, second):
    tensors = random_tensors(tiny_config)
    stored = {(second if name in ONE_TENSOR else first) + name: tensors[name] for name in tensors}
    with pytest.raises(CheckpointError, match="by more than one prefix"):
        read_checkpoint(tiny_config, save_single(tmp_path, stored))


@pytest.mark.parametrize(("prefix", "other"), TWO_PREFIXES[-3:])
def test_unknown_tensors_under_another_prefix(tmp_path, tiny_config, prefix, other):
    stored = {prefix + name: array for name, array in random_tensors(tiny_config).items()}
    stored[f"{other}blocks.2.norm1.weight"] = np.ones(32, np.float32)
    message = f"'{other}blocks.2.norm1.weight', which its configuration knows nothing of"
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tiny_config, save_single(tmp_path, stored))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("visual.patch_embed.proj.weight", "b.safetensors"),
        ("model.visual.patch_embed.proj.weight", "b.safetensors"),
        ("visual.blocks.2.norm1.weight", "a.safetensors"),
    ],
)
def test_vision_tensors_that_the_index_has_elsewhere_or_not(tmp_path, tiny_config, name, place):
    """transformers reads them, as it reads all of each file."""
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for tensor, array in random_tensors(tiny_config).items():
        part = "a.safetensors" if tensor.startswith("patch_embed") else "b.safetensors"
        parts[part][f"visual.{tensor}"] = array
    index = {tensor: part for part, tensors in parts.items() for tensor in tensors}
    parts[place][name] = np.zeros((32, 3, 2, 14, 14), np.float32)
    for part, tensors in parts.items():
        save_file(tensors, tmp_path / part)
    write_index(tmp_path, index)
    with pytest.raises(CheckpointError, match=rf"{place} holds the tensor '{name}', which the in"):
        read_checkpoint(tiny_config, tmp_path)


def test_every_tensor_is_checked_before_any_is_read(tmp_path, tiny_config, monkeypatch):
    tensors = random_tensors(tiny_config)
    tensors["merger.mlp.2.bias"] = np.zeros(3, np.float32)
    save_single(tmp_path, tensors)
    monkeypatch.setattr(
        "flax_models.common.checkpoint._File.read", lambda *_: pytest.fail("was read")
    )
    with pytest.raises(CheckpointError, match=r"merger.mlp.2.bias"):
        read_checkpoint(tiny_config, tmp_path)


def test_arrays_outlive_the_file(tmp_path, tiny_config):
    tensors = read_checkpoint(tiny_config, save_single(tmp_path, random_tensors(tiny_config)))
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, stored[name])
