"""Clips and video files, against Hugging Face's own processors of videos."""

import dataclasses
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flax_models import ImageError, VideoConfig, VisionConfig, preprocess, preprocess_videos
from flax_models.common import images, videos
from tests.hostile import examples
from tests.tower_checkpoints import SMALL_TOWERS
from tests.video_files import decode, write_video

QWEN2 = VideoConfig(min_pixels=56 * 56, max_pixels=28 * 28 * 40)
QWEN3 = dataclasses.replace(
    VideoConfig.of(VisionConfig.qwen3_vl_8b()), min_pixels=4096, max_pixels=32 * 32 * 300
)
both_processors = pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])


def clip(frames=4, height=60, width=80, seed=0):
    """Uint8 [frames, height, width, 3]."""
    shape = frames, height, width, 3
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def hugging_face(config):
    """Hugging Face's processor with these settings."""
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
        pytest.skip("older processors count an odd frame otherwise")
    values = dataclasses.asdict(config)
    size = {"shortest_edge": values.pop("min_pixels"), "longest_edge": values.pop("max_pixels")}
    values |= {name: list(values[name]) for name in ("image_mean", "image_std")}
    return getattr(transformers, values.pop("processor"))(size=size, **values)


def assert_equal(ours, theirs):
    pixel_values, grid_thw, _ = ours
    assert pixel_values.dtype == np.float32
    assert grid_thw.dtype == np.int64
    np.testing.assert_array_equal(grid_thw, theirs["video_grid_thw"])
    np.testing.assert_array_equal(pixel_values, theirs["pixel_values_videos"])


def their_timestamps(metadata, temporal_patch_size=2):
    """Those that Qwen3-VL's processor writes, of what its processor of videos returns."""
    processing = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    return processing.Qwen3VLProcessor._calculate_timestamps(
        None, np.asarray(metadata.frames_indices), metadata.fps or 24, temporal_patch_size
    )


def assert_same(ours, others):
    for our, other in zip(ours[:2], others[:2], strict=True):
        np.testing.assert_array_equal(our, other)
    for our, other in zip(ours[2], others[2], strict=True):
        np.testing.assert_array_equal(our, other)


# Sizes beside the limits and far from them; of one frame, and with odd numbers of frames.
SHAPES = [(4, 56, 84), (1, 100, 230), (5, 30, 20), (7, 200, 240), (3, 9, 700), (2, 900, 60)]


@both_processors
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cap", [None, 3, 26, 60], ids=str)
def test_equals_hugging_face(config, shape, cap):
    """With all frames; a cap is below the lower limit, between the two, or beside the upper."""
    if config is QWEN3 and shape[0] == 1:
        pytest.skip("refused")
    tokens = {"cap_pixels_per_frame": True, "max_video_tokens": cap} if cap else {}
    config = dataclasses.replace(config, do_sample_frames=False, **tokens)
    video = clip(*shape)
    theirs = hugging_face(config)(
        videos=[video], do_sample_frames=False, return_tensors="np", return_metadata=True
    )
    ours = preprocess_videos(video, config)
    assert_equal(ours, theirs)
    np.testing.assert_array_equal(ours[2][0], their_timestamps(theirs["video_metadata"][0]))


@both_processors
@given(
    *(st.integers(2, 90), st.sampled_from([1, 2, 3]), st.integers(20, 60), st.integers(20, 60)),
    *(st.sampled_from([0.3, 1, 2, 2.5, 24]), st.sampled_from([8, 23.976, 24, 30])),
    st.one_of(st.none(), st.integers(2, 90)),
)
@settings(max_examples=examples(25))
def test_any_sampling_equals_hugging_face(
    config, frames, step, height, width, fps, video_fps, num_frames
):
    config = dataclasses.replace(config, temporal_patch_size=step, min_frames=3, max_frames=16)
    if frames < step:
        frames = step
    asked = {"fps": fps} if num_frames is None else {"num_frames": min(num_frames, frames)}
    processor, video = hugging_face(config), clip(frames, height, width)
    metadata = {"total_num_frames": frames, "fps": video_fps}
    try:
        theirs = processor(
            videos=[video],
            video_metadata=[metadata],
            do_sample_frames=True,
            return_tensors="np",
            return_metadata=True,
            **{"fps": None, "num_frames": None} | asked,
        )
    except (ValueError, ZeroDivisionError, IndexError):  # by number: refused, or past the end
        return
    ours = preprocess_videos(video, config, video_fps=video_fps, **asked)
    assert_equal(ours, theirs)
    np.testing.assert_array_equal(ours[2][0], their_timestamps(theirs["video_metadata"][0], step))


FPS, NUMBER = "fps", "num_frames"


@pytest.mark.parametrize(
    ("config", "shape", "rate", "asked", "grid", "indices"),
    [
        (QWEN2, (5, 30, 20), 10, {}, [3, 6, 4], range(5)),
        (QWEN2, (4, 9, 700), 10, {}, [2, 2, 36], range(4)),
        (QWEN2, (50, 64, 96), 10, {FPS: 1}, [2, 4, 6], [0, 12, 25, 37]),
        (QWEN2, (50, 64, 96), 29.97, {FPS: 4}, [3, 4, 6], [0, 8, 16, 25, 33, 41]),
        (QWEN2, (12, 60, 40), 24, {FPS: 2}, [2, 6, 4], [0, 3, 6, 9]),
        (QWEN2, (9, 300, 200), 10, {NUMBER: 6}, [3, 14, 10], [0, 1, 3, 4, 6, 7]),
        (QWEN3, (5, 30, 20), 10, {}, [3, 4, 2], range(5)),
        (QWEN3, (4, 9, 700), 10, {}, [2, 2, 152], range(4)),
        (QWEN3, (50, 64, 96), 10, {FPS: 1}, [3, 4, 6], [0, 12, 24, 37, 49]),
        (QWEN3, (97, 64, 150), 25, {FPS: 2}, [4, 4, 10], [0, 16, 32, 48, 64, 80, 96]),
        (QWEN3, (12, 60, 40), 24, {FPS: 2}, [2, 4, 2], [0, 4, 7, 11]),
        (QWEN3, (9, 300, 200), 10, {NUMBER: 6}, [3, 16, 10], [0, 2, 3, 5, 6, 8]),
    ],
)
def test_what_transformers_5_24_returned(config, shape, rate, asked, grid, indices):
    """Written down, for where its processors can't run."""
    config = dataclasses.replace(config, do_sample_frames=False)
    _, grid_thw, (seconds,) = preprocess_videos(clip(*shape), config, video_fps=rate, **asked)
    assert grid_thw.tolist() == [grid]
    padded = np.array([*indices, *indices[-1:]][: 2 * grid[0]]).reshape(-1, 2)
    np.testing.assert_allclose(seconds, padded.mean(axis=1) / rate, rtol=1e-12)


@pytest.mark.parametrize(("total", "num_frames"), [(30, 22), (52, 46), (86, 74)])
def test_frames_are_counted_in_fp32_as_hugging_face_does(total, num_frames):
    """In fp64 a product of these is nearly whole, and the frame before is taken."""
    video = clip(total, 28, 28)
    theirs = hugging_face(QWEN2)(
        videos=[video], do_sample_frames=True, num_frames=num_frames, return_tensors="np"
    )
    assert_equal(preprocess_videos(video, QWEN2, num_frames=num_frames), theirs)


def test_several_videos_equal_hugging_face():
    """Qwen3-VL's sample 2 frames a second, of 24 where nobody says how many there are."""
    given_videos = [clip(30), clip(100, 40, 120, seed=1), clip(7, 200, 64, seed=2)]
    theirs = hugging_face(QWEN3)(videos=given_videos, return_tensors="np")
    ours = preprocess_videos(given_videos, QWEN3)
    assert_equal(ours, theirs)
    assert ours[1][:, 0].tolist() == [2, 4, 2]
    theirs = hugging_face(QWEN2)(videos=given_videos, return_tensors="np")
    assert_equal(preprocess_videos(given_videos, QWEN2), theirs)


@pytest.mark.parametrize("name", sorted(SMALL_TOWERS))
def test_the_published_settings_of_a_family_equal_hugging_face(name):
    config = VideoConfig.of(SMALL_TOWERS[name])
    video = clip(5, 100, 180)
    sampled = {"do_sample_frames": config.do_sample_frames}
    theirs = hugging_face(config)(videos=[video], return_tensors="np", **sampled)
    assert_equal(preprocess_videos([video], config), theirs)


def test_limits_are_of_the_whole_clip_or_of_each_frame():
    for config, counted in ((QWEN2, 1), (QWEN3, 20)):
        config = dataclasses.replace(config, do_sample_frames=False)
        _, grid_thw, _ = preprocess_videos(clip(20, 200, 240), config)
        pixels = grid_thw[0, 1:].prod() * config.patch_size**2
        assert config.max_pixels // 2 < pixels * counted <= config.max_pixels


def test_timestamps_by_their_definition():
    config = dataclasses.replace(QWEN3, do_sample_frames=False)
    _, _, (seconds, others) = preprocess_videos([clip(5), clip(2)], config, video_fps=[10, None])
    np.testing.assert_allclose(seconds, [0.05, 0.25, 0.4])
    np.testing.assert_allclose(others, [0.5 / 24])
    assert seconds.dtype == np.float64
    _, _, (seconds,) = preprocess_videos(clip(100), QWEN3, video_fps=25)  # 4 seconds: 8 frames
    np.testing.assert_allclose(seconds * 25, [7, 35, 64, 92])


def test_one_video_in_all_its_forms(tmp_path):
    array = clip()
    pictures = [Image.fromarray(frame) for frame in array]
    paths = [tmp_path / f"{number}.png" for number in range(len(array))]
    for path, picture in zip(paths, pictures, strict=True):
        picture.save(path)
    expected = preprocess_videos([array])
    for form in (array, list(array), pictures, tuple(pictures), [pictures], [list(array)], [paths]):
        assert_same(preprocess_videos(form), expected)


def test_frames_that_are_not_sampled_are_not_loaded(tmp_path):
    Image.fromarray(clip()[0]).save(tmp_path / "frame.png")
    frames = [tmp_path / "frame.png", tmp_path / "none.png"] * 4
    _, grid_thw, _ = preprocess_videos([frames], num_frames=4)
    assert grid_thw[0, 0] == 2


@pytest.mark.parametrize(
    ("given_videos", "arguments", "message"),
    [
        ([], {}, "no videos were given"),
        ([[]], {}, "video 0 has no frames"),
        (clip()[:0], {}, "video 0 has no frames"),
        (3, {}, "expected a video or a list of them, got int"),
        (clip()[0], {}, r"expected a video or a list of them, got ndarray \[60, 80, 3\]"),
        ([clip(), 3], {}, "video 1 must be a path, an array .* or a list of images, got int"),
        (clip().astype(float), {}, r"frame 0 of video 0 must be a uint8 array .* got float64"),
        (
            [[clip()[0], clip(1, 8, 8)[0]]],
            {},
            r"frames of video 0 must have one size; \(width, height\) of frame 0 is \(80, 60\)",
        ),
        (clip(2, 1, 300), {}, "video 0: sides of 1 x 300 pixels .* have the ratio 300"),
        (clip(5), {"num_frames": 6}, "video 0 has 5 frames, fewer than num_frames 6"),
        (clip(5), {"num_frames": 1}, "video 0 has 5 frames, of which 0 would be sampled"),
        (clip(1), {"fps": 2, "video_fps": 24}, "video 0 has 1 frame, of which 0 would be"),
        (clip(7), {"num_frames": 7}, "video 0 has 7 frames, of which 8 would be sampled"),
    ],
)
def test_refuses_videos(given_videos, arguments, message):
    with pytest.raises(ImageError, match=message):
        preprocess_videos(given_videos, **arguments)


def test_refuses_fewer_frames_than_a_temporal_patch_has():
    with pytest.raises(ImageError, match="it has 1 frame, fewer than temporal_patch_size 2"):
        preprocess_videos(clip(1), QWEN3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fps": 0}, "fps must be a finite number above 0, got 0"),
        ({"fps": float("nan")}, "fps must be a finite number above 0, got nan"),
        ({"num_frames": 0}, "num_frames must be a positive integer, got 0"),
        ({"num_frames": 2.0}, "num_frames must be a positive integer, got 2.0"),
        ({"fps": 1, "num_frames": 2}, "give fps or num_frames, not both; got 1 and 2"),
        ({"fps": 1}, "sampling video 0 by fps needs its own: give video_fps"),
        ({"video_fps": -1}, "video_fps must be finite numbers above 0, got -1"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"video_fps": [1, 2]}, "video_fps has 2 numbers, and there are 1 videos"),
    ],
)
def test_refuses_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        preprocess_videos(clip(), **arguments)


def test_an_animation_that_repeats_is_named(tmp_path):
    frames = [Image.fromarray(frame) for frame in clip()]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as opened:
        opened.seek(1)
        with pytest.raises(ImageError, match="video 0 repeats an animation"):
            preprocess_videos([opened, opened])


# --- files


@pytest.fixture
def path(tmp_path):
    write_video(tmp_path / "clip.mp4", clip(25, 48, 64))
    return tmp_path / "clip.mp4"


@both_processors
@pytest.mark.parametrize("asked", [{}, {"fps": 3}, {"num_frames": 6}], ids=str)
def test_a_file_equals_hugging_face(path, config, asked):
    """As it is decoded by its PyAV backend, of which it gets indices and a rate."""
    processor = hugging_face(config)
    video_utils = pytest.importorskip("transformers.video_utils")
    values = {"fps": config.fps, "num_frames": None}
    if asked:
        values = {"fps": None, "num_frames": None} | asked
    sampled = bool(asked) or config.do_sample_frames

    def choose(metadata, **_):
        if sampled:
            return np.asarray(processor.sample_frames(metadata, **values))
        return np.arange(metadata.total_num_frames)

    frames, metadata = video_utils.read_video_pyav(os.fspath(path), choose)
    theirs = processor(videos=[frames], do_sample_frames=False, return_tensors="np")
    ours = preprocess_videos(path, config, **asked)
    assert_equal(ours, theirs)
    np.testing.assert_array_equal(ours[2][0], their_timestamps(metadata))


@pytest.mark.parametrize("suffix", ["mkv", "avi", "mov", "ts"])
def test_files_hold_their_frames(tmp_path, suffix):
    """In Matroska and MPEG-TS nothing says how many there are."""
    path = tmp_path / f"clip.{suffix}"
    frames = write_video(path, clip(9), fps=5, codec="mpeg2video" if suffix == "ts" else "mpeg4")
    assert len(frames) == 9
    assert_same(preprocess_videos(path), preprocess_videos(frames, video_fps=5))
    assert_same(
        preprocess_videos([os.fspath(path), frames], num_frames=4, video_fps=5),
        preprocess_videos([frames, frames], num_frames=4, video_fps=5),
    )


@pytest.mark.parametrize(("degrees", "turns"), [(90, 1), (180, 2), (270, 3)])
def test_files_are_turned_upright(path, degrees, turns):
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 44  # of 16.16 fixed-point numbers; behind times and a duration
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    for place, value in ((0, cos), (4, sin), (12, -sin), (16, cos)):
        data[matrix + place : matrix + place + 4] = (value << 16).to_bytes(4, "big", signed=True)
    path.write_bytes(data)
    frames = write_video(path.with_name("other.mp4"), clip(25, 48, 64))
    turned = np.rot90(frames, -turns, axes=(1, 2))  # clockwise, as players show it
    assert_same(preprocess_videos(path, QWEN2), preprocess_videos(turned, QWEN2, video_fps=10))


def test_a_file_that_is_cut_at_its_start_by_a_list_of_edits(path):
    """Its header counts what nobody is shown, too."""
    data = bytearray(path.read_bytes())
    start = data.index(b"elst") + 16
    data[start : start + 4] = (5 * 1024 + 100).to_bytes(4, "big")
    path.write_bytes(data)
    frames = decode(path)
    assert len(frames) < 25
    assert_same(preprocess_videos(path, QWEN2), preprocess_videos(frames, QWEN2, video_fps=10))


def test_only_frames_that_are_asked_for_are_converted(path, monkeypatch):
    events = []
    resized = images.resize_bicubic
    monkeypatch.setattr(images, "resize_bicubic", lambda *a: events.append("resize") or resized(*a))
    from_array = Image.fromarray
    monkeypatch.setattr(
        videos.Image, "fromarray", lambda *a: events.append("load") or from_array(*a)
    )
    preprocess_videos(path, num_frames=4)
    assert events == ["load", "resize"] * 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("clip.mp4", b"no video"),
        ("clip.mp4", b""),
        ("list.ffconcat", b"ffconcat version 1.0\nfile clip.mp4\n"),
        ("list.m3u8", b"#EXTM3U\n#EXTINF:1,\nclip.ts\n#EXT-X-ENDLIST\n"),
    ],
)
def test_refuses_other_files(tmp_path, name, content):
    """Among them those by which FFmpeg would open further ones."""
    pytest.importorskip("av")
    write_video(tmp_path / "clip.mp4", clip())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=rf"cannot read video 0 \(.*{name}\): it is no AVI, Mat"):
        preprocess_videos(tmp_path / name)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/clip.mp4", "concat:{}"])
def test_opens_no_addresses(path, address):
    with pytest.raises(ImageError, match="it is no AVI"):
        preprocess_videos(address.format(path))


def test_refuses_what_is_missing_or_damaged(path, monkeypatch):
    with pytest.raises(ImageError, match=r"cannot read video 0 \(none.mp4\): No such file"):
        preprocess_videos("none.mp4")
    with pytest.raises(ImageError, match=r"video 0 \(.*\) has 25 frames, fewer than num_frames 26"):
        preprocess_videos(path, num_frames=26)
    monkeypatch.setattr(images, "_MAX_SOURCE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"cannot read video 0 \(.*\): it has 3,072 pixels, more"):
        preprocess_videos(path)
    with pytest.raises(ImageError, match="it has 3,072 pixels"):
        videos.check_video_file(path, VideoConfig())


def test_a_file_that_ends_early(path):
    data = path.read_bytes()
    start = data.index(b"mdat") + 4
    path.write_bytes(data[: start + 1500] + bytes(len(data) - start - 1500))
    with pytest.raises(ImageError, match=r"cannot read video 0 \(.*clip.mp4\): "):
        preprocess_videos(path)


def test_a_file_without_video(tmp_path):
    av = pytest.importorskip("av")
    with av.open(os.fspath(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ImageError, match="it has no video in it"):
        preprocess_videos(tmp_path / "sound.mp4")


def test_without_pyav_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"video files need PyAV: pip install '\.\[video\]'"):
        preprocess_videos("clip.mp4")
    preprocess_videos(clip())


def test_frames_of_a_clip_are_those_of_images():
    """Where the limits don't differ."""
    config = VideoConfig(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    for ours, theirs in zip(preprocess_videos(clip(), config), preprocess([clip()]), strict=False):
        np.testing.assert_array_equal(ours, theirs)
