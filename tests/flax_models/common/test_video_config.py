"""Settings of videos: by family, from checkpoints, and what is refused."""

import json

import pytest

from flax_models import CheckpointError, VideoConfig
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

# As published with Qwen3-VL, and what of Qwen2.5-VL's image processor concerns videos too.
PUBLISHED_QWEN3 = {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
}
PUBLISHED_QWEN2 = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}


@pytest.fixture
def checkpoint(tmp_path):
    def write(name, settings=None, file="video_preprocessor_config.json"):
        directory = write_checkpoint(tmp_path / name, SMALL_TOWERS[name])
        if settings is not None:
            (directory / file).write_text(json.dumps(settings))
        return directory

    return write


def assert_equals_hugging_face(directory):
    """Every value that their processor of this checkpoint has."""
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoVideoProcessor.from_pretrained(directory)
    ours = VideoConfig.from_pretrained(directory)
    assert ours.processor == type(theirs).__name__
    assert (ours.min_pixels, ours.max_pixels) == (
        theirs.size["shortest_edge"],
        theirs.size["longest_edge"],
    )
    for name in ("patch_size", "temporal_patch_size", "merge_size", "min_frames", "max_frames"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("do_sample_frames", "fps", "num_frames"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("cap_pixels_per_frame", "max_video_tokens"):  # of transformers 5.17 and later
        assert getattr(ours, name) == (getattr(theirs, name, None) or getattr(ours, name))
    assert list(ours.image_mean) == list(theirs.image_mean)
    assert list(ours.image_std) == list(theirs.image_std)


@pytest.mark.parametrize(
    ("name", "settings", "file"),
    [
        ("qwen3_vl", PUBLISHED_QWEN3, "video_preprocessor_config.json"),
        (
            "qwen3_5",
            PUBLISHED_QWEN3 | {"fps": 3, "max_frames": 9},
            "video_preprocessor_config.json",
        ),
        ("qwen3_vl", {"video_processor_type": "Qwen3VLVideoProcessor"}, "preprocessor_config.json"),
        (
            "qwen3_vl",
            PUBLISHED_QWEN3 | {"min_pixels": 9, "max_pixels": 99},
            "video_preprocessor_config.json",
        ),
        ("qwen2_vl", PUBLISHED_QWEN2, "preprocessor_config.json"),
        ("head_dim_16", PUBLISHED_QWEN2 | {"fps": 2}, "preprocessor_config.json"),
        (
            "head_dim_16",
            {
                "video_processor_type": "Qwen2VLVideoProcessor",
                "do_sample_frames": True,
                "num_frames": 8,
                "min_frames": 2,
                "cap_pixels_per_frame": True,
                "max_video_tokens": 900,
                "size": {"shortest_edge": 4000, "longest_edge": 9000},
            },
            "video_preprocessor_config.json",
        ),
    ],
)
def test_what_a_file_says_equals_hugging_face(checkpoint, name, settings, file):
    directory = checkpoint(name, settings, file)
    VideoConfig.from_pretrained(directory)
    assert_equals_hugging_face(directory)


def test_a_whole_processors_settings_count_first_then_those_of_videos(checkpoint):
    directory = checkpoint("qwen3_vl", PUBLISHED_QWEN3 | {"max_frames": 10})
    (directory / "preprocessor_config.json").write_text(json.dumps({"max_frames": 20}))
    assert VideoConfig.from_pretrained(directory).max_frames == 10
    assert_equals_hugging_face(directory)
    whole = {"video_processor": PUBLISHED_QWEN3 | {"max_frames": 30}}
    (directory / "processor_config.json").write_text(json.dumps(whole))
    assert VideoConfig.from_pretrained(directory).max_frames == 30
    assert_equals_hugging_face(directory)


@pytest.mark.parametrize("name", sorted(SMALL_TOWERS))
def test_without_a_file_those_of_the_family(checkpoint, name):
    config = VideoConfig.from_pretrained(checkpoint(name))
    assert config == VideoConfig.of(SMALL_TOWERS[name])
    assert (config == VideoConfig()) == ("qwen3" not in name)
    assert config.do_sample_frames == (name in ("qwen3_vl", "qwen3_5"))


def test_published_settings_of_qwen3_are_those_of_the_family(checkpoint):
    config = VideoConfig.from_pretrained(checkpoint("qwen3_vl", PUBLISHED_QWEN3))
    assert config == VideoConfig.of(SMALL_TOWERS["qwen3_vl"])


@pytest.mark.parametrize(
    ("name", "processor"),
    [("qwen2_5_omni", "Qwen2_5OmniProcessor"), ("qwen3_omni_moe", "Qwen3OmniMoeProcessor")],
)
def test_omni_models_have_limits_of_their_own(checkpoint, name, processor):
    patches = {"patch_size": SMALL_TOWERS[name].patch_size}
    directory = checkpoint(name, PUBLISHED_QWEN2 | patches, "preprocessor_config.json")
    config = VideoConfig.from_pretrained(directory)
    assert (config.min_pixels, config.max_pixels) == (
        128 * (2 * config.patch_size) ** 2,
        768 * (2 * config.patch_size) ** 2,
    )
    pytest.importorskip("torchvision")
    whole = getattr(pytest.importorskip("transformers"), processor)
    if not isinstance(size := getattr(whole, "videos_kwargs", {}).get("size"), dict):
        pytest.skip("older processors keep them elsewhere")
    assert (config.min_pixels, config.max_pixels) == (size["shortest_edge"], size["longest_edge"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"processor": "LlavaVideoProcessor"},
            "processor must be Qwen2VLVideoProcessor or Qwen3VL",
        ),
        ({"fps": 0}, "fps must be a finite number above 0, got 0"),
        ({"fps": 2, "num_frames": 4}, "give fps or num_frames, not both; got 2 and 4"),
        ({"max_frames": 0}, "max_frames must be a positive integer, got 0"),
        ({"max_pixels": 1}, "min_pixels 100,352 is above max_pixels 1"),
    ],
)
def test_refuses_values(values, message):
    with pytest.raises(ValueError, match=message):
        VideoConfig(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"video_processor_type": "LlavaVideoProcessor"},
            "video_processor_type is 'LlavaVideoProcessor'; only Qwen2VLVideoProcessor and Qwen3VL",
        ),
        ({"patch_size": 14}, "patch_size is 14, but the tower's patch_size is 16"),
        ({"do_rescale": False}, "do_rescale is False; only True is done"),
        ({"fps": "2"}, "video_preprocessor_config.json: fps must be a finite number above 0"),
        ({"size": {"longest_edge": 9}}, "size must have shortest_edge and longest_edge, got"),
    ],
)
def test_refuses_files(checkpoint, changes, message):
    directory = checkpoint("qwen3_vl", PUBLISHED_QWEN3 | changes)
    with pytest.raises(ValueError, match=message):
        VideoConfig.from_pretrained(directory)


def test_refuses_damaged_files(checkpoint):
    directory = checkpoint("qwen3_vl")
    (directory / "video_preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*video_preprocessor_config.json as"):
        VideoConfig.from_pretrained(directory)
    (directory / "processor_config.json").write_text('{"video_processor": 3}')
    with pytest.raises(CheckpointError, match=r"'video_processor' in .* is not a JSON object"):
        VideoConfig.from_pretrained(directory)
