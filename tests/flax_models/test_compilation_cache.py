"""`python -m flax_models` keeps what XLA compiles; the library leaves that to its users."""

import os
import pwd
import subprocess
import sys

import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("flax")

from flax_models.__main__ import keep_compilations
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

CACHE = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture
def no_cache_named(monkeypatch):
    monkeypatch.setenv(CACHE, "")  # put back afterwards, whatever sets it meanwhile
    monkeypatch.delenv(CACHE)


@pytest.mark.usefixtures("no_cache_named")
def test_a_program_keeps_what_it_compiles(tmp_path):
    image = tmp_path / "image.png"
    Image.new("RGB", (56, 56)).save(image)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL_TOWERS["head_dim_16"])
    arguments = [image, "--checkpoint", checkpoint, "--out", tmp_path / "out.npz"]
    caches = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run(
        [sys.executable, "-m", "flax_models", *map(str, arguments)],
        env=os.environ | caches,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    kept = [path.name for path in (tmp_path / "fused-rope-attention" / "jax").iterdir()]
    assert any("of_values" in name for name in kept)  # the tower


@pytest.mark.usefixtures("no_cache_named")
def test_compilations_are_kept_under_home_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compilations()
    assert os.environ[CACHE] == str(tmp_path / ".cache" / "fused-rope-attention" / "jax")


def test_a_cache_that_the_user_named_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for named in ("/somewhere", ""):  # JAX takes an empty name for none
        monkeypatch.setenv(CACHE, named)
        keep_compilations()
        assert os.environ[CACHE] == named
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_cache_named")
def test_a_cache_that_cannot_be_written_to_is_done_without(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    keep_compilations()
    assert CACHE not in os.environ


def test_the_library_leaves_jax_as_it_is(tmp_path):
    import jax

    from flax_models import load_vision_tower

    before = jax.config.jax_compilation_cache_dir
    load_vision_tower(write_checkpoint(tmp_path, SMALL_TOWERS["head_dim_16"]))
    assert jax.config.jax_compilation_cache_dir == before
    assert os.environ.get(CACHE) == before


@pytest.mark.usefixtures("no_cache_named")
def test_a_user_without_a_home_does_without(monkeypatch):
    """As in a container whose user is a number that no file of passwords knows."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    keep_compilations()
    assert CACHE not in os.environ
