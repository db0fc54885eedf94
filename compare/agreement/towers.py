"""Do the towers agree with Hugging Face's, after every layer and at the end?"""

import tempfile
from collections.abc import Sequence

import torch

from compare.agreement.metrics import relative_rms_error, tower_verdict
from compare.common.console import number, print_table, progress, say
from compare.common.environment import has_gpu
from compare.common.errors import one_line
from compare.common.result_files import Record
from compare.implementations import huggingface
from compare.implementations.towers import (
    Directory,
    TowerImplementation,
    exact_tower,
    free_memory,
    hugging_face_sdpa,
    our_towers,
)
from compare.workloads import photographs
from compare.workloads.photographs import Inputs
from compare.workloads.towers import SMALL_TOWERS, TOWERS
from flax_models import VisionConfig

_SMALL_WIDTH = 252  # pixels of the first photograph where the tower is small


def check_towers(
    towers: Sequence[TowerImplementation] | None = None, *, small: bool | None = None
) -> list[Record]:
    """Hold the towers of every family to the tower rule on real photographs; print the tables.

    Args:
        towers: default our two.
        small: small towers and small photographs instead of real sizes; default: where there is no
            GPU.

    Returns:
        A record for each layer of each tower, and one with `layer` None for the embeddings, which
        DeepStack's features count among.
    """
    small = not has_gpu() if small is None else small
    towers = our_towers() if towers is None else towers
    records = []
    for name, config in (SMALL_TOWERS if small else TOWERS).items():
        workload = f"{name}-photographs"
        try:
            inputs = photographs.agreement_input(config, _SMALL_WIDTH if small else None)
            say(
                f"Agreement of {name}: {config.depth} layers of width {config.hidden_size}, "
                f"{len(inputs[0])} patches of two photographs"
            )
            of_family = _check_family(workload, config, inputs, towers)
        except Exception as error:  # nothing to judge by: what is checked besides still counts
            reference = hugging_face_sdpa().name
            of_family = [Record(workload, reference, passed=False, note=one_line(error))]
        _print(of_family)
        records += of_family
    return records


def _check_family(
    workload: str, config: VisionConfig, inputs: Inputs, towers: Sequence[TowerImplementation]
) -> list[Record]:
    baseline = hugging_face_sdpa()
    with tempfile.TemporaryDirectory() as directory:
        huggingface.random_checkpoint(directory, config)
        exact = _exact_states(directory, inputs)
        limits = _errors(baseline, directory, inputs, exact)
        records = _records(workload, baseline, limits)
        for tower in progress(towers, "tower agreement"):
            try:
                errors = _errors(tower, directory, inputs, exact)
            except Exception as error:  # a tower that fails is a result: the other still counts
                failed = Record(workload, tower.name, passed=False, note=one_line(error))
                records.append(failed)
                continue
            judged = zip(_records(workload, tower, errors), errors, limits, strict=True)
            records += [record.judged(tower_verdict(*held)) for record, *held in judged]
    return records


def _exact_states(directory: Directory, inputs: Inputs) -> list[torch.Tensor]:
    with exact_tower(directory) as tower:
        return list(tower.states(*tower.put(*inputs)))


def _errors(
    implementation: TowerImplementation,
    directory: Directory,
    inputs: Inputs,
    exact: list[torch.Tensor],
) -> list[float]:
    """Relative RMS error after each layer and, last, of the embeddings."""
    free_memory()  # of the tower before
    tower = implementation.load(directory)
    states = tower.states(*tower.put(*inputs))
    return [relative_rms_error(s, e) for s, e in zip(states, exact, strict=True)]


def _records(
    workload: str, implementation: TowerImplementation, errors: Sequence[float]
) -> list[Record]:
    """A record for each error with its layer; the last one is the embeddings', of no layer."""
    return [
        Record(
            workload, implementation.name, relative_rms_error=error, dtype="bfloat16", layer=layer
        )
        for layer, error in zip([*range(len(errors) - 1), None], errors, strict=True)
    ]


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
        f"{records[0].workload} (bf16; relative RMS error against the fp32 Hugging Face tower)",
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
