"""Do the kernels agree: with fp64, with the unfused computation, and with each other?"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from compare.agreement.expected import Expected
from compare.agreement.metrics import equal_share, max_abs_error, relative_rms_error, twin_verdict
from compare.common.console import number, print_table, progress
from compare.common.environment import has_gpu
from compare.common.errors import UnavailableError, one_line
from compare.common.result_files import Record
from compare.implementations import kernels
from compare.implementations.kernels import FUSE, KernelImplementation
from compare.implementations.warm_up import warm_up
from compare.workloads.arrays import arguments_of, from_jax, poison
from compare.workloads.kernels import (
    KERNEL_WORKLOADS,
    Grid,
    KernelInputs,
    KernelWorkload,
    Kind,
    variant,
)

# A pair of ours made for one way of fusing; tests put wrong ones in their place.
Twins = Callable[[str], list[KernelImplementation]]

# Sides that are no multiple of the window, a one-window image, a clip of three temporal patches.
_MIXED_IMAGES: Grid = ((1, 62, 90), (1, 8, 8), (3, 10, 22), (1, 2, 34))
_MIXED_FRAMES: Grid = ((1, 26, 38), (2, 12, 18), (1, 2, 2))
_SMALL_IMAGES: Grid = ((1, 10, 12), (1, 2, 6))
_SMALL_FRAMES: Grid = ((1, 12, 14), (2, 2, 6))


def our_twins(fuse: str) -> list[KernelImplementation]:
    """The Triton and the Pallas kernel."""
    return [kernels.triton(fuse), kernels.pallas(fuse)]


def cases() -> list[tuple[KernelWorkload, Sequence[str]]]:
    """What is checked on this machine: workloads, and the ways of fusing for each.

    On a GPU every head_dim, dtype and way of fusing on odd shapes, and the named workloads as they
    are timed. Without one, interpreters: small shapes.
    """
    if not has_gpu():
        return [
            *_cases("windows", _SMALL_IMAGES, heads=2, bf16_dims=(80, 72), other_dims=(80,)),
            *_cases("frames", _SMALL_FRAMES, heads=1, bf16_dims=(80,), other_dims=(72,)),
        ]
    dims = (64, 72, 80, 96, 128)
    return [
        *_cases("windows", _MIXED_IMAGES, heads=4, bf16_dims=dims, other_dims=(80,)),
        *_cases("frames", _MIXED_FRAMES, heads=4, bf16_dims=dims, other_dims=(80,)),
        *((workload, ("auto",)) for workload in KERNEL_WORKLOADS.values()),
    ]


def check_kernels(
    checked: Sequence[tuple[KernelWorkload, Sequence[str]]] | None = None, twins: Twins = our_twins
) -> list[Record]:
    """Hold both kernels to the numerics rules and print the table.

    Args:
        checked: workloads and the ways of fusing for each; default cases().
        twins: the implementations, for a way of fusing.

    Returns:
        A record for each implementation and, as "pallas against triton", for each pair.
    """
    checked = cases() if checked is None else checked
    ready = iter(_ready(checked, twins))
    records: list[Record] = []
    for workload, fuses in progress(checked, "kernel agreement"):
        pairs = [(fuse, next(ready)) for fuse in fuses]
        try:
            expected = Expected.of(workload)
        except Exception as error:  # after a kernel that broke the GPU: show which one it was
            records.append(Record(workload.name, "oracle", passed=False, note=one_line(error)))
            continue
        for fuse, pair in pairs:
            records += _check(expected, fuse, pair)
    _print(records)
    return records


def _ready(
    checked: Sequence[tuple[KernelWorkload, Sequence[str]]], twins: Twins
) -> list[list[KernelImplementation]]:
    """The implementations for each workload and way of fusing, on a GPU compiled."""
    pairs = [(twins(fuse), workload) for workload, fuses in checked for fuse in fuses]
    if not has_gpu():  # an interpreter compiles nothing
        return [pair for pair, _ in pairs]
    jobs = [(implementation, workload) for pair, workload in pairs for implementation in pair]
    compiled = iter(warm_up(jobs, "compiling"))
    return [[next(compiled) for _ in pair] for pair, _ in pairs]


def _cases(
    kind: Kind, grid: Grid, heads: int, bf16_dims: Sequence[int], other_dims: Sequence[int]
) -> list[tuple[KernelWorkload, Sequence[str]]]:
    workload = KernelWorkload(f"{kind}-mixed", kind, grid, heads)
    shapes = [variant(workload, head_dim=dim) for dim in bf16_dims]
    shapes += [
        variant(workload, head_dim=dim, dtype=dtype)
        for dtype in ("float16", "float32")
        for dim in other_dims
    ]
    shapes += [variant(workload, rotary_dim=workload.head_dim // 2)]
    return [(shape, FUSE) for shape in shapes]


def _check(expected: Expected, fuse: str, twins: Sequence[KernelImplementation]) -> list[Record]:
    records, outputs = [], {}
    workload = expected.workload
    for implementation in twins:
        blank = workload.record(implementation.name, fuse=fuse, framework=implementation.framework)
        try:
            output = run(implementation, workload, expected.inputs)
            verdict = expected.judge([output])
        except Exception as error:  # a kernel that fails is a result: the others still count
            records.append(replace(blank, passed=False, note=one_line(error)))
            continue
        outputs[implementation.name] = output
        details = {
            "unfused_error": expected.unfused_error,
            "max_abs_error": max_abs_error(output, expected.exact),
        }
        records.append(blank.judged(verdict, details=details))
    if len(outputs) == 2:
        records.append(_twin_record(workload, fuse, outputs))
    return records


def run(
    implementation: KernelImplementation, workload: KernelWorkload, inputs: KernelInputs
) -> torch.Tensor:
    """One call of an implementation.

    Returns:
        [tokens, heads, head_dim] as a tensor, whatever the framework.

    Raises:
        UnavailableError: it cannot run here.
    """
    try:
        call = implementation.prepare(workload)
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    arguments = arguments_of(inputs, implementation.framework)
    poison(arguments)
    output = call(*arguments)
    return from_jax(output) if implementation.framework == "jax" else output


def _twin_record(workload: KernelWorkload, fuse: str, outputs: dict[str, torch.Tensor]) -> Record:
    (name, output), (twin_name, twin) = outputs.items()
    verdict = twin_verdict(relative_rms_error(twin, output), workload.dtype)
    details = {"bit_equal_share": equal_share(output, twin)}
    return workload.record(f"{twin_name} against {name}", fuse=fuse).judged(
        verdict, details=details
    )


def _print(records: Sequence[Record]) -> None:
    """One row for each workload and way of fusing, a column for each implementation."""
    names = list(dict.fromkeys(record.implementation for record in records))
    rows: dict[tuple[str, str | None], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((record.workload, record.fuse), {})[record.implementation] = record
    print_table(
        "Kernel agreement: relative RMS error against fp64 (and of the twins against each other), "
        "limit in brackets",
        ("workload", "fuse", "unfused", *names, "bit-equal"),
        [
            [
                workload,
                fuse or "",
                _detail(cells, "unfused_error", number),
                *(_cell(cells.get(name)) for name in names),
                _detail(cells, "bit_equal_share", _share),
            ]
            for (workload, fuse), cells in rows.items()
        ],
    )


def _cell(record: Record | None) -> str:
    if record is None:
        return "–"
    if record.note:
        return f"FAILED {record.note}"
    text = f"{number(record.relative_rms_error)} ({number(record.error_limit, 2)})"
    return text if record.passed else f"FAILED {text}"


def _share(share: float) -> str:
    """In per cent; 100% only where it is all."""
    return "100%" if share == 1 else f"{min(share, 0.999):.1%}"


def _detail(cells: dict[str, Record], key: str, show: Callable[[float], str]) -> str:
    found = [record.details[key] for record in cells.values() if key in record.details]
    return show(found[0]) if found else ""
