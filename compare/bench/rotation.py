"""Rotation as a pass of its own: how near does it come to the copy bandwidth?

In PyTorch Q and K of packed qkv are rotated in place. In JAX, whose arrays do not change, the pass
is the rotation kernel of a call with fuse="none", judged by that call's result. Beside them stands
a negation in place of as many bytes in one piece: a short pass does not reach that bandwidth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from compare.agreement.expected import Expected
from compare.bench.ceilings import Ceilings
from compare.bench.kernel_timing import FULL, blank_record, measure
from compare.common.console import number, print_missing, print_table, progress
from compare.common.result_files import Record
from compare.implementations import kernels
from compare.implementations.kernels import KernelCall, KernelImplementation
from compare.workloads.kernels import KERNEL_WORKLOADS, SIDES, KernelWorkload

ROTATION_WORKLOADS = {
    name: replace(KERNEL_WORKLOADS[f"windows-{side}"], name=name)
    for side in SIDES
    for name in [f"rotate-{side}"]
}


def in_place() -> KernelImplementation:
    """The Triton rotation of packed qkv; its result is qkv's Q and K, [tokens, 2, heads, dim]."""
    return KernelImplementation("triton", "torch", _prepare, ours=True)


def negation() -> KernelImplementation:
    """PyTorch's negation in place of as many bytes as a rotation reads and writes."""
    return KernelImplementation("negation in place", "torch", _prepare_negation)


def bench_rotation(
    workloads: Sequence[KernelWorkload], ceilings: Ceilings
) -> Iterator[list[Record]]:
    """Time both rotations and the negation on ROTATION_WORKLOADS, and print the table.

    The ceilings are of the same run; the share of the floor is that of the copy bandwidth. Yields
    for each workload a record for each of them.
    """
    records: list[Record] = []
    for workload in progress(workloads, "rotation"):
        # Q and K read and written are as many bytes as attention's Q, K, V and result.
        moved = workload.bytes_moved
        of_workload = []
        for record in _measure(workload):
            record = record.beside_floor(ceilings.kernel_floor_us(moved, 0))
            if record.median_us:
                rate = {"bytes_per_s": moved / record.median_us * 1e6}
                record = replace(record, details=record.details | rate)
            of_workload.append(record)
        records += of_workload
        yield of_workload
    _print(records)


def _measure(workload: KernelWorkload) -> list[Record]:
    triton, pallas, plain = in_place(), kernels.pallas("none"), negation()
    try:
        of_attention = Expected.of(workload)
        negated = -_moved(workload, of_attention.torch_arguments[0]).double()
        return [
            measure(triton, Expected.of_rotation(workload, of_attention.inputs)),
            measure(pallas, of_attention, FULL, kernel="rotate_kernel"),
            measure(plain, replace(of_attention, exact=negated, unfused_error=0.0)),
        ]
    except Exception as error:  # after a kernel that broke the GPU: keep what is measured
        return [blank_record(each, workload).failed(error) for each in (triton, pallas, plain)]


def _prepare(workload: KernelWorkload) -> KernelCall:
    from compare.implementations.peers_torch import in_place_rotation

    rotate = in_place_rotation()

    def call(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        rotate(qkv, cos, sin)
        return qkv[:, :2]

    return call


def _prepare_negation(workload: KernelWorkload) -> KernelCall:
    return lambda qkv, *_: _moved(workload, qkv).neg_()


def _moved(workload: KernelWorkload, qkv: torch.Tensor) -> torch.Tensor:
    """A piece of qkv of half the bytes that a rotation moves."""
    return qkv.view(-1)[: workload.bytes_moved // 2 // qkv.itemsize]


def _print(records: Sequence[Record]) -> None:
    timed = [record for record in records if record.median_us is not None]
    print_table(
        "Rotation as a pass of its own",
        ("workload", "implementation", "us", "TB/s", "of copy bandwidth", "kernels", "rel. RMS"),
        [
            [
                record.workload,
                record.implementation,
                number(record.median_us),
                number(record.details["bytes_per_s"] / 1e12),
                f"{record.share_of_floor:.0%}",
                number(record.kernels_per_call),
                number(record.relative_rms_error),
            ]
            for record in timed
        ],
    )
    print_missing(records)
