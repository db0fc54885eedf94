"""Image settings: by family, from checkpoints, and what is refused."""

import json
from dataclasses import asdict

import pytest

from flax_models import CheckpointError, ImageConfig, VisionConfig
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# As published with Qwen2-VL and Qwen2.5-VL, and with Qwen3-VL.
PUBLISHED_QWEN2 = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "image_processor_type": "Qwen2VLImageProcessor",
}
PUBLISHED_QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


@pytest.fixture
def checkpoint(tmp_path):
    def write(name, settings=None, file="preprocessor_config.json"):
        directory = write_checkpoint(tmp_path / name, SMALL_TOWERS[name])
        if settings is not None:
            (directory / file).write_text(json.dumps(settings))
        return directory

    return write


def test_published_settings_of_qwen2(checkpoint):
    for name in ("qwen2_vl", "head_dim_16"):
        config = ImageConfig.from_pretrained(checkpoint(name, PUBLISHED_QWEN2))
        assert config == ImageConfig(max_pixels=12845056)
        assert (config.image_mean, config.image_std) == (CLIP_MEAN, CLIP_STD)


def test_published_settings_of_qwen3(checkpoint):
    config = ImageConfig.from_pretrained(checkpoint("qwen3_vl", PUBLISHED_QWEN3))
    assert config == ImageConfig.of(VisionConfig.qwen3_vl_8b())
    assert asdict(config) == {
        "min_pixels": 256 * 256,
        "max_pixels": 4096 * 4096,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    }


def test_published_settings_of_qwen3_omni(checkpoint):
    settings = PUBLISHED_QWEN2 | {
        name: PUBLISHED_QWEN3[name] for name in ("image_mean", "image_std")
    }
    audio = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
    config = ImageConfig.from_pretrained(
        checkpoint("qwen3_omni_moe", settings | audio | {"patch_size": 16})
    )
    assert config == ImageConfig.of(SMALL_TOWERS["qwen3_omni_moe"])
    assert (config.min_pixels, config.max_pixels) == (3136, 12845056)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"min_pixels": 3136}, (3136, 28 * 28 * 1280)),
        ({"size": {"shortest_edge": 4000, "longest_edge": 50000}}, (4000, 50000)),
        ({"min_pixels": 5000, "size": {"longest_edge": 50000}}, (5000, 50000)),
        (
            {"max_pixels": 60000, "size": {"shortest_edge": 4000, "longest_edge": 50000}},
            (4000, 60000),
        ),
        # As transformers 4.47 saves them.
        (
            {
                "min_pixels": 3136,
                "max_pixels": 60000,
                "size": {"min_pixels": 3136, "max_pixels": 60000},
            },
            (3136, 60000),
        ),
    ],
)
def test_limits_in_all_their_forms_equal_hugging_faces(checkpoint, limits, expected):
    settings = {k: v for k, v in PUBLISHED_QWEN2.items() if k not in ("min_pixels", "max_pixels")}
    directory = checkpoint("qwen2_vl", settings | limits)
    config = ImageConfig.from_pretrained(directory)
    assert (config.min_pixels, config.max_pixels) == expected
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    theirs = processing.Qwen2VLImageProcessorPil.from_pretrained(directory).size
    assert (theirs["shortest_edge"], theirs["longest_edge"]) == expected


@pytest.mark.parametrize("name", ["qwen2_vl", "head_dim_16", "qwen3_vl", "qwen3_5", "qwen2_5_omni"])
def test_without_a_file_those_of_the_family(checkpoint, name):
    config = ImageConfig.from_pretrained(checkpoint(name))
    assert config == ImageConfig.of(SMALL_TOWERS[name])
    assert (config == ImageConfig()) == ("qwen3" not in name)


@pytest.mark.parametrize(
    "name",
    ["Qwen2VLImageProcessorPil", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessorFast", None],
)
def test_names_of_the_one_processor(checkpoint, name):
    settings = PUBLISHED_QWEN2 | {"image_processor_type": name}
    config = ImageConfig.from_pretrained(checkpoint("qwen2_vl", settings))
    assert config == ImageConfig(max_pixels=12845056)


def test_the_whole_models_type_decides_what_a_family_leaves_to_it(checkpoint):
    directory = checkpoint("qwen3_vl")
    vision = json.loads((directory / "config.json").read_text()) | {"model_type": "qwen2_5_vl"}
    whole = {"model_type": "qwen3_vl", "vision_config": vision}
    (directory / "config.json").write_text(json.dumps(whole))
    assert ImageConfig.from_pretrained(directory) == ImageConfig.of(SMALL_TOWERS["qwen3_vl"])


def test_what_hugging_face_saves(checkpoint):
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    directory = checkpoint("qwen3_vl")
    settings = {name: value for name, value in PUBLISHED_QWEN3.items() if name != "size"}
    limits = {"shortest_edge": 4096, "longest_edge": 40960}
    processor = processing.Qwen2VLImageProcessorPil(size=limits, **settings)
    processor.save_pretrained(directory)
    config = ImageConfig.from_pretrained(directory)
    assert (config.min_pixels, config.max_pixels, config.patch_size) == (4096, 40960, 16)
    # With those of a whole processor, which count before a file of their own.
    whole = {"image_processor": json.loads((directory / "preprocessor_config.json").read_text())}
    whole["image_processor"]["size"]["longest_edge"] = 8192
    (directory / "processor_config.json").write_text(json.dumps(whole))
    assert ImageConfig.from_pretrained(directory).max_pixels == 8192
    for settings in ({"processor_class": "P"}, {"image_processor": None}):
        (directory / "processor_config.json").write_text(json.dumps(settings))
        assert ImageConfig.from_pretrained(directory) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 0}, "patch_size must be a positive integer, got 0"),
        ({"min_pixels": 2.0}, "min_pixels must be a positive integer, got 2.0"),
        ({"max_pixels": 100}, "min_pixels 3,136 is above max_pixels 100"),
        (
            {"min_pixels": 10**13, "max_pixels": 10**13},
            "min_pixels must be at most 67,108,864, got 10,000,000,000,000",
        ),
        ({"image_mean": 0.5}, "image_mean must be three finite numbers, for r, g and b; got 0.5"),
        ({"image_std": (1, 1, 0)}, r"image_std must be above 0, got \(1.0, 1.0, 0.0\)"),
    ],
)
def test_refuses_values(values, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 16}, "patch_size is 16, but the tower's patch_size is 14"),
        ({"merge_size": 4}, "merge_size is 4, but the tower's spatial_merge_size is 2"),
        (
            {"image_processor_type": "SiglipImageProcessor"},
            "image_processor_type is 'SiglipImageProcessor'; only Qwen2VLImageProcessor is done",
        ),
        ({"image_processor_type": 3}, "image_processor_type is 3; only Qwen2VLImageProcessor"),
        ({"do_normalize": False}, "do_normalize is False; only True is done"),
        ({"resample": 2}, "resample is 2; only 3 is done"),
        ({"image_std": (1, float("nan"), 1)}, "image_std must be three finite numbers"),
        ({"image_mean": (0, 10**400, 0)}, "image_mean must be three finite numbers"),
        (
            {"max_pixels": None, "size": {"min_pixels": 1, "max_pixels": 784}},
            "preprocessor_config.json: size must have longest_edge, got {'min_",
        ),
        (
            {"min_pixels": None, "max_pixels": None, "size": {"longest_edge": 1}},
            "size must have shortest_edge and longest_edge, got {'long",
        ),
        ({"max_pixels": None, "size": 448}, "size must have longest_edge, got 448"),
        ({"min_pixels": 10**400, "max_pixels": 10**400}, "min_pixels must be at most 67,108,864"),
        ({"image_std": "x"}, r"preprocessor_config.json: image_std must be three finite numbers"),
    ],
)
def test_refuses_files(checkpoint, changes, message):
    directory = checkpoint("qwen2_vl", PUBLISHED_QWEN2 | changes)
    with pytest.raises(ValueError, match=message):
        ImageConfig.from_pretrained(directory)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_refuses_damaged_files(checkpoint, file):
    directory = checkpoint("qwen2_vl")
    (directory / file).write_text("{")
    with pytest.raises(CheckpointError, match=rf"cannot read .*{file} as JSON"):
        ImageConfig.from_pretrained(directory)
    (directory / "processor_config.json").write_text('{"image_processor": 3}')
    with pytest.raises(CheckpointError, match=r"'image_processor' in .* is not a JSON object"):
        ImageConfig.from_pretrained(directory)
