"""Writes what a whole vLLM answers, of an image, of two and of a clip: tokens and probabilities."""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = f"{START} <|image_pad|> {END}", f"{START} <|video_pad|> {END}"


def main(checkpoint, file, options="{}"):
    llm = LLM(
        checkpoint,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 2, "video": 1},
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
        mm_encoder_attn_backend="TORCH_SDPA",  # true fp32, see towers.py
        **{"enforce_eager": True} | json.loads(options),
    )
    values = np.random.default_rng(0)
    images = [values.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((112, 84), (56, 140))]
    clip = values.integers(0, 256, (4, 84, 112, 3), np.uint8)
    metadata = {"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3], "duration": 2.0}
    pictures = [Image.fromarray(image) for image in images]
    video = (clip, metadata | {"do_sample_frames": False, "video_backend": "opencv"})
    prompts = [
        {"prompt": f"w1 {IMAGE} w2", "multi_modal_data": {"image": pictures[:1]}},
        {"prompt": f"w3 {IMAGE} w4 {IMAGE} w5", "multi_modal_data": {"image": pictures}},
        {"prompt": f"{VIDEO} w6", "multi_modal_data": {"video": [video]}},
    ]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, greedy)]
    tokens = [list(output.token_ids) for output in outputs]
    found = [p.logprob for out in outputs for token in out.logprobs for p in token.values()]
    Path(file).write_text(json.dumps([tokens, found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
