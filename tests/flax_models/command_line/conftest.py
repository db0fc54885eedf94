"""A checkpoint and images for `python -m flax_models`, which runs in the tests' process."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

CONFIG = SMALL_TOWERS["head_dim_16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three images of different sizes, two of them with the same name."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    paths = []
    for name, height, width in (("a.png", 60, 150), ("b.png", 112, 84), ("more/a.png", 70, 70)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        paths.append(path)
    return paths


@pytest.fixture
def run(checkpoint, images, tmp_path, capsys):
    """Run the command line; returns the exit status, standard output and standard error."""

    from flax_models.__main__ import main

    def run(*options, out="out.npz", images=images, checkpoint=checkpoint):
        arguments = [*images, "--checkpoint", checkpoint, "--out", tmp_path / out, *options]
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse's own errors
            status = exit_.code
        return status, *capsys.readouterr()

    return run


def read(path):
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = dict(file)
        return arrays, arrays.pop("images").tolist()
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["images"])


def refused(result, tmp_path, *words):
    """One sentence on standard error that has the words; exit status 2; nothing written."""
    status, stdout, stderr = result
    assert status == 2
    assert stdout == ""
    assert all(word in stderr for word in words), stderr
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))
    return True
