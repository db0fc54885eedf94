import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from flax_models import ImageConfig, ImageError, VisionConfig, preprocess
from flax_models.common import images
from flax_models.common.images import smart_resize
from tests.hostile import examples

LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # ours, in their words
SIZES = [(56, 56), (333, 444), (20, 300), (101, 57), (1300, 1700), (30, 5000), (28, 28)]

sides = st.integers(1, 20_000)


def photograph(height, width, seed=0):
    """Something with slopes and edges, as uint8 [height, width, 3]."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(smooth) // 16 * 16 + generator.integers(0, 16, (height, width, 3)).astype(
        "u1"
    )


QWEN3 = ImageConfig.of(VisionConfig.qwen3_vl_8b())


both_backends = pytest.mark.parametrize("backend", ["torchvision", "pil"])


def hugging_face(backend, **values):
    """Hugging Face's image processor of a backend, under the name that the version gives it.

    4.57 takes no "size" but its defaults; every version takes the limits one by one.
    """
    pytest.importorskip("transformers")
    if backend == "torchvision":
        pytest.importorskip("torchvision")
        try:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl_fast import (
                Qwen2VLImageProcessorFast as Processor,
            )
        except ImportError:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
                Qwen2VLImageProcessor as Processor,
            )
        return Processor(size=dict(LIMITS), **values)
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )
    except ImportError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
            Qwen2VLImageProcessor as Processor,
        )
    return Processor(size=dict(LIMITS), **values)


def transformers_version():
    """Major and minor."""
    transformers = pytest.importorskip("transformers")
    return tuple(map(int, transformers.__version__.split(".")[:2]))


@pytest.mark.parametrize("size", SIZES, ids=str)
@both_backends
def test_equals_hugging_face(size, backend):
    image = photograph(*size)
    theirs = hugging_face(backend)(images=[image], return_tensors="np")
    pixel_values, grid_thw = preprocess(image, backend=backend)
    assert pixel_values.dtype == np.float32
    assert grid_thw.dtype == np.int64
    np.testing.assert_array_equal(grid_thw, theirs["image_grid_thw"])
    np.testing.assert_array_equal(pixel_values, theirs["pixel_values"])


@pytest.mark.parametrize("size", SIZES, ids=str)
@both_backends
def test_qwen3_equals_hugging_face(size, backend):
    """With the settings that its checkpoints publish."""
    published = {
        "min_pixels": 65536,
        "max_pixels": 16777216,
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = photograph(*size)
    theirs = hugging_face(backend, **published)(images=[image], return_tensors="np")
    pixel_values, grid_thw = preprocess(image, QWEN3, backend=backend)
    np.testing.assert_array_equal(grid_thw, theirs["image_grid_thw"])
    np.testing.assert_array_equal(pixel_values, theirs["pixel_values"])


# Hugging Face's processor takes an image of 1 or 3 rows for one of so many channels.
@both_backends
@given(
    *(st.integers(4, 300), st.integers(4, 300), st.integers(1, 60_000), st.integers(0, 60_000)),
    *(st.sampled_from([7, 14, 16]), st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=examples(50))
def test_any_size_and_settings_equal_hugging_face(
    backend, height, width, least, more, patch_size, temporal_patch_size, merge_size
):
    sizes = {
        "patch_size": patch_size,
        "temporal_patch_size": temporal_patch_size,
        "merge_size": merge_size,
    }
    limits = {"min_pixels": least, "max_pixels": least + more}
    image = photograph(height, width)
    processor = hugging_face(backend, **limits, **sizes)
    theirs = processor(images=[Image.fromarray(image)], return_tensors="np")
    pixel_values, grid_thw = preprocess(image, ImageConfig(**limits, **sizes), backend=backend)
    np.testing.assert_array_equal(grid_thw, theirs["image_grid_thw"])
    np.testing.assert_array_equal(pixel_values, theirs["pixel_values"])


@both_backends
def test_several_images_equal_hugging_face(backend):
    images = [photograph(*size, seed) for seed, size in enumerate(SIZES)]
    theirs = hugging_face(backend)(images=images, return_tensors="np")
    pixel_values, grid_thw = preprocess(images, backend=backend)
    np.testing.assert_array_equal(grid_thw, theirs["image_grid_thw"])
    np.testing.assert_array_equal(pixel_values, theirs["pixel_values"])


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "LA"])
@both_backends
def test_modes_equal_hugging_face(mode, backend):
    image = Image.fromarray(photograph(90, 120)).convert(mode)
    theirs = hugging_face(backend)(images=[image], return_tensors="np")
    np.testing.assert_array_equal(preprocess(image, backend=backend)[0], theirs["pixel_values"])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_laid_over_white(mode, tmp_path):
    colours = photograph(56, 84)
    if mode == "LA":
        colours[:] = colours[:, :, :1]
    alpha = photograph(56, 84, seed=1)[:, :, 0]
    if mode == "P":
        palette = colours.reshape(-1, 3)[:32]
        image = Image.fromarray(alpha % 32)
        image.putpalette(palette.tobytes())
        colours, alpha = palette[alpha % 32], np.where(alpha % 32 == 5, 0, 255)
        options = {"transparency": 5}
    else:
        image = Image.fromarray(np.dstack([colours, alpha])).convert(mode)
        options = {}
    image.save(tmp_path / "image.png", **options)
    opacity = alpha[:, :, None] / 255
    shown = np.round(colours * opacity + 255 * (1 - opacity)).astype(np.uint8)
    grey_level = 1 / 255 / 0.26
    pixel_values, _ = preprocess(tmp_path / "image.png")
    np.testing.assert_allclose(pixel_values, preprocess(shown)[0], atol=1.1 * grey_level)
    with Image.open(tmp_path / "image.png") as opened:
        np.testing.assert_array_equal(pixel_values, preprocess(opened)[0])
        processor = hugging_face("pil")
        if transformers_version() >= (5, 23):  # 5.17 and older ignore transparency
            theirs = processor(images=[opened], return_tensors="np")
            ours, _ = preprocess(opened, backend="pil")
            np.testing.assert_array_equal(ours, theirs["pixel_values"])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_smart_resize_equals_hugging_face(size):
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for limits in ((56 * 56, 28 * 28 * 1280), (128 * 28 * 28, 768 * 28 * 28), (4, 784)):
        assert smart_resize(*size, 28, *limits) == module.smart_resize(*size, 28, *limits)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_two_backends_are_near(size):
    """In photographs; Pillow's weights have more digits, and Pillow 13 may begin with columns."""
    image = photograph(*size)
    values, pillows = preprocess(image)[0], preprocess(image, backend="pil")[0]
    grey_level = 1 / 255 / 0.26
    assert np.abs(values - pillows).max() <= 2.1 * grey_level


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
@pytest.mark.parametrize("patch_size", [14, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pixel_values_of_fewer_bits_are_the_same_rounded(backend, patch_size, dtype):
    config = ImageConfig(patch_size=patch_size)
    clip = [photograph(60, 84, seed) for seed in range(3)]
    expected, grid_thw = preprocess([clip], config, backend=backend)
    found, grid = preprocess([clip], config, backend=backend, dtype=dtype)
    assert (expected.dtype, found.dtype) == ("float32", dtype)
    np.testing.assert_array_equal(found, expected.astype(dtype))
    np.testing.assert_array_equal(grid, grid_thw)


def test_refuses_another_backend_or_dtype():
    with pytest.raises(ValueError, match="backend must be 'torchvision' or 'pil', got 'cuda'"):
        preprocess(photograph(56, 56), backend="cuda")
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'u"):
        preprocess(photograph(56, 56), dtype="uint8")


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_clips_hold_their_frames_in_order(frames):
    """A patch of a clip is two frames' patches; frames alone equal Hugging Face's images."""
    clip = [photograph(60, 110, seed) for seed in range(frames)]
    pixel_values, grid_thw = preprocess([clip])
    alone, grids_alone = preprocess(clip)
    pairs = math.ceil(frames / 2)
    np.testing.assert_array_equal(grid_thw, [[pairs, *grids_alone[0, 1:]]])
    by_frame = pixel_values.reshape(pairs, -1, 3, 2, 196).transpose(0, 3, 1, 2, 4)
    shown = by_frame.reshape(2 * pairs, -1, 3, 196)
    expected = alone.reshape(frames, -1, 3, 2, 196)[:, :, :, 0]
    np.testing.assert_array_equal(shown[:frames], expected)
    np.testing.assert_array_equal(shown[frames:], expected[-1:].repeat(frames % 2, axis=0))


def test_patches_by_their_definition():
    """Without resizing, each patch is a square of the image, in the documented order."""
    image = photograph(56, 84)
    pixel_values, grid_thw = preprocess(image)
    np.testing.assert_array_equal(grid_thw, [[1, 4, 6]])
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    normal = (image / 255 - mean) / std
    token = 0
    for row in range(0, 4, 2):
        for column in range(0, 6, 2):
            for h, w in (
                (row, column),
                (row, column + 1),
                (row + 1, column),
                (row + 1, column + 1),
            ):
                square = normal[14 * h : 14 * h + 14, 14 * w : 14 * w + 14].transpose(2, 0, 1)
                patch = pixel_values[token].reshape(3, 2, 14, 14)
                np.testing.assert_allclose(patch, np.stack([square, square], axis=1), atol=1e-6)
                token += 1


def test_other_patch_sizes():
    config = ImageConfig(patch_size=16, temporal_patch_size=3, merge_size=1)
    pixel_values, grid_thw = preprocess(photograph(64, 96), config)
    np.testing.assert_array_equal(grid_thw, [[1, 4, 6]])
    assert pixel_values.shape == (24, 3 * 3 * 16 * 16)


def test_limits_apply_to_each_frame():
    image = photograph(300, 400)
    _, grids = preprocess([image, [image] * 6], ImageConfig(max_pixels=28 * 28 * 20))
    assert (grids[:, 1:] == grids[0, 1:]).all()
    assert grids[0, 1] * grids[0, 2] <= 4 * 20
    _, grids = preprocess(photograph(30, 40), ImageConfig(min_pixels=28 * 28 * 20))
    assert grids[0, 1] * grids[0, 2] >= 4 * 20


def test_one_input_in_all_its_forms(tmp_path):
    array = photograph(60, 80)
    path = tmp_path / "image.png"
    Image.fromarray(array).save(path)
    expected, grid_thw = preprocess([array])
    forms = [array, Image.fromarray(array), path, str(path), (array,), [[array]], array[None]]
    for form in forms:
        pixel_values, grid = preprocess(form)
        np.testing.assert_array_equal(pixel_values, expected)
        np.testing.assert_array_equal(grid, grid_thw)


def test_a_clips_frames_are_not_in_memory_at_once(tmp_path, monkeypatch):
    """Each is resized before the next is loaded."""
    path = tmp_path / "frame.png"
    Image.fromarray(photograph(60, 80)).save(path)
    events = []
    load, resize = images._to_rgb, images.resize_bicubic
    monkeypatch.setattr(images, "_to_rgb", lambda *a, **k: events.append("load") or load(*a, **k))
    monkeypatch.setattr(images, "resize_bicubic", lambda *a: events.append("resize") or resize(*a))
    preprocess([[path] * 3])
    assert events == ["load", "resize"] * 3


def test_a_single_array_of_frames_is_a_clip():
    clip = np.stack([photograph(56, 56, seed) for seed in range(4)])
    np.testing.assert_array_equal(preprocess(clip)[1], [[2, 4, 4]])
    np.testing.assert_array_equal(preprocess(list(clip))[1], [[1, 4, 4]] * 4)


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 mean nothing
@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_files_are_turned_upright_as_hugging_face_does(tmp_path, suffix, orientation):
    load_image = pytest.importorskip("transformers.image_utils").load_image
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / f"turned.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(photograph(60, 120)).save(path, exif=exif, **options)
    upright = np.asarray(load_image(str(path)))
    assert upright.shape == ((120, 60, 3) if 5 <= orientation <= 8 else (60, 120, 3))
    for file in (path, path.read_bytes()):
        np.testing.assert_array_equal(preprocess(file)[0], preprocess(upright)[0])


def test_tags_that_say_nothing_of_the_pixels_keep_no_file_from_being_read(tmp_path):
    """Of a file that says it was taken on its side, and in text what its resolution is."""
    array, path = photograph(60, 120), tmp_path / "turned.png"
    entries = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack("<HHI4s", 0x011A, 2, 3, b"72")
    exif = b"II*\0\x08\0\0\0\x02\0" + entries + bytes(4)
    Image.fromarray(array).save(path, exif=exif)
    np.testing.assert_array_equal(preprocess(path)[0], preprocess(np.rot90(array, -1))[0])
    Image.fromarray(array).save(path, exif=b"no TIFF header")
    np.testing.assert_array_equal(preprocess(path)[0], preprocess(array)[0])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_refuses_more_than_8_bits_a_channel(tmp_path, dtype):
    """Hugging Face makes such an image white from 255 up; arrays like it are refused too."""
    image = Image.fromarray(np.linspace(0, 9000, 60 * 80).astype(dtype).reshape(60, 80))
    with pytest.raises(ImageError, match=rf"it has mode {image.mode}, more than 8 bits a channel"):
        preprocess(image)
    image.save(tmp_path / "deep.tiff")
    with pytest.raises(ImageError, match=r"cannot read image 0 \(.*deep.tiff\): it has mode "):
        preprocess(tmp_path / "deep.tiff")


def test_inputs_are_left_as_they_were():
    array = photograph(60, 80)
    kept = array.copy()
    clip = [Image.fromarray(array)]
    preprocess([clip])
    preprocess(array)
    np.testing.assert_array_equal(array, kept)
    assert len(clip) == 1


@given(sides, sides, st.sampled_from([28, 32]), st.integers(1, 3000), st.integers(0, 3000))
def test_smart_resize_keeps_its_rules(height, width, factor, few, more):
    limits = (few * factor**2, (4 * few + more) * factor**2)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="at most 200 is supported"):
            smart_resize(height, width, factor, *limits)
        return
    new = smart_resize(height, width, factor, *limits)
    assert all(side % factor == 0 and side > 0 for side in new)
    area = math.prod(new)
    assert area <= limits[1] or factor in new
    assert area >= limits[0]
    assert smart_resize(width, height, factor, *limits) == new[::-1]


@pytest.mark.parametrize("size", [(0, 10), (10, -1)])
def test_smart_resize_needs_pixels(size):
    with pytest.raises(ImageError, match="an image must have pixels"):
        smart_resize(*size)


@pytest.mark.parametrize("images", [[], (), [[]]])
def test_refuses_emptiness(images):
    with pytest.raises(ImageError, match=r"no images were given|image 0 is a clip without frames"):
        preprocess(images)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((9, 9, 3)), r"image 0 must be a uint8 array .* got float64 \[9, 9, 3\]"),
        (np.zeros((9, 9), np.uint8), r"image 0 must be a uint8 array .* got uint8 \[9, 9\]"),
        (np.zeros((3, 9, 9), np.uint8), r"must be a uint8 array .* got uint8 \[3, 9, 9\]"),
        (np.zeros((0, 9, 3), np.uint8), r"must be a uint8 array .* got uint8 \[0, 9, 3\]"),
        (np.zeros((2, 9, 9), np.uint8)[None], r"frame 0 of image 0 must be a uint8 array"),
        (np.zeros((1, 201, 3), np.uint8), r"image 0: sides of 1 x 201 .* have the ratio 201"),
        (7, "expected an image, a clip or a list of them, got int"),
        ([None], "image 0 must be a PIL image, a path, bytes or a NumPy array, got NoneType"),
        ([[b"x"]], "cannot read frame 0 of image 0: cannot identify image file"),
    ],
)
def test_refuses_what_is_no_image(image, message):
    with pytest.raises(ImageError, match=message):
        preprocess(image)


def test_refuses_frames_of_different_sizes():
    clip = [photograph(60, 80), photograph(60, 80), photograph(60, 84)]
    with pytest.raises(
        ImageError,
        match=r"frames of image 1 must have one size; .* frame 0 is \(80, 60\), of frame 2 \(84, ",
    ):
        preprocess([photograph(60, 80), clip])


def test_names_the_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ImageError, match=r"cannot read image 0 \(.*absent.png\): No such file"):
        preprocess(tmp_path / "absent.png")
    with pytest.raises(ImageError, match=r"cannot read image 0 \(.*\): Is a directory"):
        preprocess(tmp_path)
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(ImageError, match=r"image 0 \(.*text.png\): cannot identify image file"):
        preprocess(tmp_path / "text.png")


def test_names_the_frame_that_is_truncated(tmp_path):
    path = tmp_path / "cut.jpg"
    Image.fromarray(photograph(200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with Image.open(path) as opened:
        for image in (path, opened):
            with pytest.raises(ImageError, match=r"cannot read frame 1 of image 0.*truncated"):
                preprocess([[photograph(200, 200), image]])


def bomb(path, width, height):
    """Write a PNG file of which only the header exists."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + b"\0" * 4)
    return path


# Pillow warns of files between its limit and twice that, from PIL/Image.py; stays as long as ours
# has to refuse them by itself.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 100_000])
def test_decompression_bombs_are_not_decoded(tmp_path, side):
    with pytest.raises(ImageError, match=r"cannot read image 0 \(.*bomb.png\): .* pixels"):
        preprocess(bomb(tmp_path / "bomb.png", side, side))
