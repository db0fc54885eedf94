"""Towers of every family that are small enough to be loaded in a test, and what is done to them."""

import torch

from compare.implementations import huggingface
from compare.implementations.towers import TowerImplementation
from compare.workloads.towers import TowerWorkload, Visual
from flax_models import VisionConfig

# Two blocks, by whose numbers tests tell layers apart.
_SIZES = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 36,
    "out_hidden_size": 24,
}
CONFIG = VisionConfig(**_SIZES, fullatt_block_indexes=(1,))
QWEN2 = VisionConfig.of("qwen2_vl", **(_SIZES | {"intermediate_size": 128}))
QWEN3 = VisionConfig.of(
    "qwen3_vl", **_SIZES, num_position_embeddings=25, deepstack_visual_indexes=(0,)
)
TOWERS = {"tower": CONFIG, "qwen2-tower": QWEN2, "qwen3-tower": QWEN3}


def square(side, tower="tower"):
    return TowerWorkload(f"{tower}-{side}", (Visual(side, side),), TOWERS[tower])


def implementation(tower):
    return TowerImplementation(
        "torch", lambda d: tower(huggingface.load(d, torch.bfloat16)), ours=True
    )


def failing_once(function):
    """A function as it is, but for its first call."""
    calls = []

    def called(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room for the reference")
        return function(*arguments)

    return called
