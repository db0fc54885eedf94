"""Whole vLLMs, with the plugin found by vLLM itself: the same answers with and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import checkpoints

SCRIPT = Path(__file__).with_name("answer.py")


def answer(checkpoint, file, **environment):
    """Tokens, their log-probabilities, and what the processes said of the plugin."""
    process = subprocess.run(
        [sys.executable, SCRIPT, checkpoint, file],
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    found = json.loads(file.read_text())
    said = [line for line in process.stdout.splitlines() if "Fused RoPE" in line]
    return found["tokens"], sum(found["logprobs"], []), said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("Qwen2_5_VL")
    checkpoints.save("Qwen2_5_VL", folder)
    return folder


@pytest.fixture(scope="module")
def own(checkpoint):
    options = {"FUSED_ROPE_VLLM": "attention", "VLLM_PLUGINS": "another"}
    return answer(checkpoint, checkpoint / "own", VLLM_ENABLE_V1_MULTIPROCESSING="0", **options)


def test_a_plugin_that_is_not_asked_for_says_nothing(own):
    assert own[2] == []
    assert len({tuple(tokens) for tokens in own[0]}) == 3  # what is seen counts


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_answers_are_the_same(checkpoint, own, tmp_path, workers):
    options = {"FUSED_ROPE_VLLM": "attention", "VLLM_ENABLE_V1_MULTIPROCESSING": workers}
    tokens, logprobs, said = answer(checkpoint, tmp_path / "ours", **options)
    assert tokens == own[0]
    assert logprobs == pytest.approx(own[1], abs=1e-4)
    assert any("replaces the attention of Qwen2_5_VisionAttention" in line for line in said)


def test_on_a_cpu_it_stands_aside_unless_its_parts_are_named(checkpoint, own, tmp_path):
    options = {"FUSED_ROPE_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    tokens, logprobs, said = answer(checkpoint, tmp_path / "aside", **options)
    assert (tokens, logprobs) == own[:2]
    assert all("off, as it needs an NVIDIA GPU" in line for line in said)
    assert len(said) == 1
