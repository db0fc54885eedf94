"""The README's examples of the Flax tower, run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax

from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("family", ["head_dim_80", "qwen3_vl"])
def test_the_examples_run_and_agree(tmp_path, monkeypatch, family):
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    a_call, a_jit = (example for example in examples if "flax_models" in example)
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("path/to/Qwen2.5-VL-7B-Instruct"), SMALL_TOWERS[family])
    frames = np.random.default_rng(0).integers(0, 256, (4, 60, 90, 3), np.uint8)
    Image.fromarray(frames[0]).save("photo.jpg")
    names = {f"frame{i}": frame for i, frame in enumerate(frames)}
    exec(a_call, names)
    called = jax.tree.leaves(names["embeddings"])  # of Qwen3-VL also DeepStack's features
    exec(a_jit, names)
    for ours, theirs in zip(jax.tree.leaves(names["embeddings"]), called, strict=True):
        assert len(theirs) == names["grid_thw"].prod(axis=1).sum() // 4
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
