"""A tower of vLLM's beside Hugging Face's, of the same checkpoint."""

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from compare.implementations.huggingface import true_fp32
from tests.vllm import checkpoints

# What vLLM takes on a CPU. For fp32 on a GPU it would take its Triton attention, which multiplies
# in tf32: no limit of fp32 holds for that.
FP32_ATTENTION = "TORCH_SDPA"
GRIDS = [[1, 8, 8], [2, 6, 10], [1, 2, 2]]  # an image of whole windows, a clip of cut ones


class Case:
    """A checkpoint, Hugging Face's tower of it, and vLLM's as often as it is asked for."""

    def __init__(self, family, folder):
        self.theirs = checkpoints.save(family, folder).model.visual
        arguments = EngineArgs(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            mm_encoder_attn_backend=FP32_ATTENTION,
        )
        self.config = arguments.create_engine_config()
        channels = self.theirs.config.patch_size**2 * 3 * self.theirs.config.temporal_patch_size
        torch.manual_seed(1)
        tokens = sum(t * h * w for t, h, w in GRIDS)
        self.pixels = torch.randint(0, 256, (tokens, channels)).float()

    def build(self):
        self.config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(self.config):
            return get_model(vllm_config=self.config).visual

    def inputs(self, tower):
        """What vLLM's tower takes, and Hugging Face's of the same: from 0.32 on it normalises."""
        if hasattr(tower, "input_norm"):
            pixels = self.pixels.to(tower.device)
            return pixels, tower.input_norm(pixels, torch.float32).cpu()
        return (self.pixels / 127.5 - 1,) * 2

    @torch.inference_mode()
    def run(self, tower):
        with set_current_vllm_config(self.config), true_fp32():
            return tower(self.inputs(tower)[0], GRIDS).cpu()

    @torch.inference_mode()
    def expected(self, tower):
        found = self.theirs(self.inputs(tower)[1], torch.tensor(GRIDS))
        deep = getattr(found, "deepstack_features", None) or []  # vLLM has them in further columns
        return torch.cat([found.pooler_output, *deep], dim=-1)


def error(result, expected):
    return float((result - expected).norm() / expected.norm())
