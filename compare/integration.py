"""What one line is worth: Hugging Face's own tower, untouched and accelerated, in one run."""

from collections.abc import Sequence

import torch

from compare import huggingface
from compare.ceilings import Ceilings
from compare.results import Record
from compare.tower_bench import bench_towers
from compare.tower_workloads import TowerWorkload
from compare.towers import Directory, HuggingFaceTower, Tower, TowerImplementation, peer_towers


def bench_integration(workloads: Sequence[TowerWorkload]) -> tuple[list[Record], Ceilings]:
    """Measure Hugging Face's tower with SDPA, with varlen flash attention, and accelerated.

    Returns:
        A record for each tower on each workload, and the ceilings.
    """
    return bench_towers(workloads, [*accelerated_towers(), *peer_towers()])


def accelerated_towers() -> list[TowerImplementation]:
    """`accelerate(model)` alone, and with each block compiled."""
    return [
        TowerImplementation("accelerated", _load, ours=True),
        TowerImplementation("accelerated, compiled", _load_compiled, ours=True),
    ]


def _load(directory: Directory) -> Tower:
    from triton_kernels.integrations.transformers import accelerate

    return HuggingFaceTower(accelerate(huggingface.load(directory, torch.bfloat16)))


def _load_compiled(directory: Directory) -> Tower:
    tower = _load(directory)
    for block in tower.model.blocks:
        block.compile(dynamic=True)
    return tower
