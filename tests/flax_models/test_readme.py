"""Examples of the Flax tower in the README and its own, run as they stand."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax

from flax_models import VisionConfig
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint
from tests.video_files import write_video

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("family", ["head_dim_80", "qwen3_vl"])
def test_the_examples_run_and_agree(tmp_path, monkeypatch, family):
    examples = [
        example
        for page in (ROOT / "README.md", ROOT / "flax_models" / "README.md")
        for example in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        if "from flax_models" in example or "output=" in example
    ]
    # A call, the same once more, a video, other outputs, a jit of one's own, several devices, a
    # step of training, an exported program.
    assert len(examples) == 8
    if family == "qwen3_vl":  # those that DeepStack's features make another
        examples = [e for e in examples if "split_tower" not in e and "trainable" not in e]
        assert len(examples) == 6
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("path/to/Qwen2.5-VL-7B-Instruct"), SMALL_TOWERS[family])
    frames = np.random.default_rng(0).integers(0, 256, (4, 60, 90, 3), np.uint8)
    Image.fromarray(frames[0]).save("photo.jpg")
    names = {f"frame{i}": frame for i, frame in enumerate(frames)}
    if importlib.util.find_spec("av"):
        write_video("clip.mp4", frames)
    else:
        examples = [example for example in examples if "clip.mp4" not in example]
    found = []
    for example in examples:
        exec(example, names)
        found.append(jax.tree.leaves(names["embeddings"]))  # of Qwen3-VL also DeepStack's features
    if family != "qwen3_vl":
        assert np.isfinite(names["value"])
        assert VisionConfig.from_pretrained("path/to/trained") == SMALL_TOWERS[family]
    assert names["vectors"].shape == (len(names["images"]), names["tower"].config.hidden_size)
    for leaves in zip(*found, strict=True):
        assert len(leaves[0]) == names["grid_thw"].prod(axis=1).sum() // 4
        for ours in leaves[1:]:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(leaves[0]))
