"""Animations: what stands for which of their frames, and that no frame stands for another."""

import copy

import numpy as np
import pytest
from PIL import Image, ImageSequence

from flax_models import ImageError, preprocess

FRAMES = 4
REPEATED = "repeats an animation, of which each is frame 3: pass copies of its frames"
OPTIONS = {"gif": {}, "png": {}, "tiff": {}, "webp": {"lossless": True}, "avif": {}}


@pytest.fixture(params=OPTIONS)
def path(tmp_path, request):
    Image.init()
    if request.param.upper() not in Image.SAVE_ALL:
        pytest.skip("this Pillow writes no such animations")
    values = np.random.default_rng(0).integers(0, 256, (FRAMES, 56, 84, 3), dtype=np.uint8)
    first, *others = map(Image.fromarray, values)
    file = tmp_path / f"animation.{request.param}"
    first.save(file, save_all=True, append_images=others, **OPTIONS[request.param])
    return file


@pytest.fixture
def animation(path):
    with Image.open(path) as opened:
        yield opened


def frames_of(path):
    """Each frame as an array, by a file opened for it alone."""
    frames = []
    for number in range(FRAMES):
        with Image.open(path) as opened:
            opened.seek(number)
            frames.append(np.asarray(opened.convert("RGB")))
    assert len({frame.tobytes() for frame in frames}) == FRAMES
    return frames


def assert_same(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our, their)


def test_frames_from_pillows_iterator_are_one_object(animation):
    frames = list(ImageSequence.Iterator(animation))
    with pytest.raises(ImageError, match=f"image 0 {REPEATED}"):
        preprocess([frames])
    with pytest.raises(ImageError, match=f"image 1 {REPEATED}"):
        preprocess([frames[:1], frames[1:]])
    with pytest.raises(ImageError, match=f"image 1 {REPEATED}"):
        preprocess(frames)  # as many images


def test_a_file_that_is_closed_by_then(path):
    with Image.open(path) as opened:
        frames = list(ImageSequence.Iterator(opened))
    with pytest.raises(ImageError, match=REPEATED):
        preprocess([frames])


def test_an_animation_that_is_back_at_its_start(animation):
    frames = []
    for number in range(FRAMES):
        animation.seek(number)
        frames.append(animation)
    animation.seek(0)
    with pytest.raises(ImageError, match="each is frame 0: pass copies"):
        preprocess([frames])
    with pytest.raises(ImageError, match="image 1 repeats an animation"):
        preprocess([Image.new("RGB", (84, 56)), (frames[0], Image.new("RGB", (84, 56)), frames[1])])


@pytest.mark.parametrize("lazy", [ImageSequence.Iterator, lambda file: (x for x in [file])])
def test_what_yields_frames_is_no_list_of_them(animation, lazy):
    with pytest.raises(ImageError, match=r"must be a PIL image, .* or a NumPy array, got \w+"):
        preprocess([lazy(animation)])
    with pytest.raises(ImageError, match=r"expected an image, a clip or a list of them, got \w+"):
        preprocess(lazy(animation))


@pytest.mark.parametrize(
    "copied",
    [
        ImageSequence.all_frames,
        lambda file: [frame.copy() for frame in ImageSequence.Iterator(file)],
        lambda file: [copy.copy(frame) for frame in ImageSequence.Iterator(file)],
        lambda file: [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)],
    ],
    ids=["all_frames", "copy", "copy.copy", "arrays"],
)
def test_copies_are_the_frames(path, animation, copied):
    assert_same(preprocess([copied(animation)]), preprocess([frames_of(path)]))


def test_a_file_is_its_first_frame_and_an_image_the_one_it_is_at(path, animation):
    frames = frames_of(path)
    assert_same(preprocess(path), preprocess(frames[0]))
    assert_same(preprocess(animation), preprocess(frames[0]))
    animation.seek(2)
    assert_same(preprocess(animation), preprocess(frames[2]))


def test_what_may_be_repeated(path, animation):
    """Still images, files, and as several images what nobody has moved from its first frame."""
    frames = frames_of(path)
    still = Image.fromarray(frames[1])
    for one, array in ((still, frames[1]), (path, frames[0]), (frames[2], frames[2])):
        assert_same(preprocess([[one, one], one]), preprocess([[array, array], array]))
    assert_same(preprocess([animation] * 3), preprocess([frames[0]] * 3))


def test_an_animation_of_one_frame_is_a_still_image(path):
    alone = path.with_stem("alone")
    Image.fromarray(frames_of(path)[0]).save(alone, **OPTIONS[path.suffix[1:]])
    with Image.open(alone) as opened:
        assert_same(preprocess([[opened] * 2]), preprocess([[alone] * 2]))
