"""Whole vLLMs, with the plugin found by vLLM itself: the same answers with and without."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vllm import checkpoints

SCRIPT = Path(__file__).with_name("answer.py")
ON_A_GPU = torch.cuda.is_available()
# Each rank has a GPU to itself; on a CPU they share it.
TWO_RANKS = pytest.mark.gpu(2 if ON_A_GPU else 0)
# On a CPU the plugin is on only by its parts' names.
ASKED_FOR = "1" if ON_A_GPU else "attention"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The language model's attention would multiply in tf32: where a number is near a step of that,
    # fp32's last bit moves an answer by more than any limit of fp32.
    "TRITON_F32_DEFAULT": "ieee",
    # Nothing is drawn, and FlashInfer may be missing.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def answer(checkpoint, file, options="{}", **environment):
    """Tokens, their log-probabilities, and what the processes said of the plugin."""
    process = subprocess.run(
        [sys.executable, SCRIPT, checkpoint, file, options],
        env=os.environ | ENVIRONMENT | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    said = [line for line in process.stdout.splitlines() if "Fused RoPE" in line]
    return *json.loads(file.read_text()), said


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """By a family's name, the checkpoint and what vLLM alone answers."""

    @functools.cache
    def find(family):
        folder = tmp_path_factory.mktemp(family)
        checkpoints.save(family, folder)
        others = {"FUSED_ROPE_VLLM": ASKED_FOR, "VLLM_PLUGINS": "another"}
        return folder, *answer(folder, folder / "own", **others)

    return find


def test_a_plugin_that_is_not_asked_for_says_nothing(own):
    _, tokens, _, said = own("Qwen2_5_VL")
    assert said == []
    assert len({tuple(each) for each in tokens}) == 3  # what is seen counts


@pytest.mark.parametrize(
    ("family", "workers", "options"),
    [
        ("Qwen2_5_VL", "0", "{}"),
        ("Qwen2_5_VL", "1", "{}"),
        *(
            pytest.param(family, "1", options, marks=TWO_RANKS)
            for family, options in (
                ("Qwen2_5_VL", '{"tensor_parallel_size": 2}'),
                ("Qwen2_5_VL", '{"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}'),
                ("Qwen2VL", '{"tensor_parallel_size": 2}'),
            )
        ),
    ],
)
def test_the_answers_are_the_same(own, tmp_path, family, workers, options):
    folder, tokens, logprobs, _ = own(family)
    environment = {"FUSED_ROPE_VLLM": ASKED_FOR, "VLLM_ENABLE_V1_MULTIPROCESSING": workers}
    found = answer(folder, tmp_path / "ours", options, **environment)
    assert found[0] == tokens
    assert found[1] == pytest.approx(logprobs, abs=1e-4)
    assert any("replaces the attention of Qwen2" in line for line in found[2])


@pytest.mark.skipif(ON_A_GPU, reason="is what it does on a CPU")
def test_on_a_cpu_it_stands_aside_unless_its_parts_are_named(own, tmp_path):
    folder, tokens, logprobs, _ = own("Qwen2_5_VL")
    found = answer(folder, tmp_path / "aside", FUSED_ROPE_VLLM="1")
    assert found[:2] == (tokens, logprobs)
    (line,) = found[2]
    assert "off, as it needs an NVIDIA GPU" in line
