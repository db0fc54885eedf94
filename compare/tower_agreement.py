"""Do the towers agree with Hugging Face's, after every layer and at the end?"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from compare import huggingface, photographs
from compare.console import number, print_table, progress, say
from compare.environment import has_gpu
from compare.errors import one_line
from compare.metrics import relative_rms_error, tower_verdict
from compare.results import Record
from compare.towers import (
    Directory,
    HuggingFaceTower,
    TowerImplementation,
    free_memory,
    hugging_face_sdpa,
    our_towers,
)
from flax_models import VisionConfig

WORKLOAD = "tower-photographs"

# As the real towers are built, small enough for a CPU: two heads of 80, windows and frames.
SMALL_CONFIG = VisionConfig(
    depth=4,
    hidden_size=160,
    num_heads=2,
    intermediate_size=342,
    out_hidden_size=192,
    fullatt_block_indexes=(1, 3),
)
Inputs = tuple[np.ndarray, np.ndarray]  # pixel_values, grid_thw
_SMALL_WIDTH = 252  # pixels of the first photograph where the tower is small


def check_towers(
    towers: Sequence[TowerImplementation] | None = None, *, small: bool | None = None
) -> list[Record]:
    """Hold the towers to the tower rule on real photographs and print the table.

    Args:
        towers: default our two.
        small: a small tower and small photographs instead of Qwen2.5-VL 7B's sizes; default: where
            there is no GPU.

    Returns:
        A record for each layer of each tower, and one with `layer` None for the embeddings.
    """
    small = not has_gpu() if small is None else small
    config = SMALL_CONFIG if small else VisionConfig.qwen2_5_vl_7b()
    inputs = photographs.agreement_input(_SMALL_WIDTH if small else None)
    say(
        f"Tower agreement: {config.depth} layers of width {config.hidden_size}, "
        f"{len(inputs[0])} patches of two photographs"
    )
    yardstick = hugging_face_sdpa()
    with tempfile.TemporaryDirectory() as directory:
        huggingface.random_checkpoint(directory, config)
        exact = _exact_states(directory, inputs)
        limits = _errors(yardstick, directory, inputs, exact)
        records = [_record(yardstick, layer, error) for layer, error in _numbered(limits)]
        for tower in progress(our_towers() if towers is None else towers, "tower agreement"):
            try:
                errors = _errors(tower, directory, inputs, exact)
            except Exception as error:  # a tower that fails is a result: the other still counts
                failed = Record(WORKLOAD, tower.name, passed=False, note=one_line(error))
                records.append(failed)
                continue
            for (layer, error), limit in zip(_numbered(errors), limits, strict=True):
                verdict = tower_verdict(error, limit)
                judged = {"error_limit": verdict.limit, "passed": verdict.passed}
                records.append(replace(_record(tower, layer, error), **judged))
    _print(records)
    return records


def _exact_states(directory: Directory, inputs: Inputs) -> list[torch.Tensor]:
    with huggingface.true_fp32():
        tower = HuggingFaceTower(huggingface.load(directory, torch.float32))
        states = list(tower.states(*tower.put(*inputs)))
    del tower
    free_memory()
    return states


def _errors(
    implementation: TowerImplementation,
    directory: Directory,
    inputs: Inputs,
    exact: list[torch.Tensor],
) -> list[float]:
    """Relative RMS error after each layer and, last, of the embeddings."""
    tower = implementation.load(directory)
    states = tower.states(*tower.put(*inputs))
    errors = [relative_rms_error(s, e) for s, e in zip(states, exact, strict=True)]
    del tower, states
    free_memory()
    return errors


def _numbered(errors: Sequence[float]) -> Iterator[tuple[int | None, float]]:
    """Each error with its layer; the last one is the embeddings', of no layer."""
    return zip([*range(len(errors) - 1), None], errors, strict=True)


def _record(implementation: TowerImplementation, layer: int | None, error: float) -> Record:
    return Record(
        WORKLOAD,
        implementation.name,
        relative_rms_error=error,
        dtype="bfloat16",
        layer=layer,
    )


def _print(records: Sequence[Record]) -> None:
    """One row for each layer, one column for each tower, a mark where the rule is broken."""
    names = list(dict.fromkeys(record.implementation for record in records))
    cells = {(record.layer, record.implementation): record for record in records}
    layers = list(dict.fromkeys(record.layer for record in records))
    rows = [
        [
            "embeddings" if layer is None else f"layer {layer}",
            *(_cell(cells.get((layer, name))) for name in names),
        ]
        for layer in layers
    ]
    print_table(
        "Tower agreement (bf16; relative RMS error against the fp32 Hugging Face tower)",
        ("after", *names),
        rows,
    )


def _cell(record: Record | None) -> str:
    if record is None:
        return "–"
    if record.note:
        return f"FAILED {record.note}"
    text = number(record.relative_rms_error)
    return f"{text} FAILED, limit {number(record.error_limit)}" if record.passed is False else text
