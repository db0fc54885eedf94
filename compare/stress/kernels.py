"""What the kernels are put through: hostile segments, poison, sizes, repetition, large numbers.

A check goes through its cases and yields for each what was wrong with it, None where nothing was.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from compare.agreement.metrics import kernel_verdict, relative_rms_error
from compare.agreement.oracle import oracle, unfused
from compare.stress.guards import same_bits
from compare.stress.inputs import EXTREMES, Sizes, draw, hostile_cu_seqlens, refusable
from compare.stress.subjects import MemoryFault, Subject
from compare.workloads.kernels import DTYPES, KernelInputs

Findings = Iterator[str | None]

# Bounds on a segment's length that lead to the two kernels, in every dtype.
WINDOW, STREAM = 32, 4096
BOTH = {"window": WINDOW, "stream": STREAM}


def hostile(subject: Subject, sizes: Sizes) -> Findings:
    """Any int32 in cu_seqlens: nothing outside the tensors is touched, no row holds garbage."""
    rng = np.random.default_rng(0)
    inputs = draw([37], sizes)  # no multiple of a tile's rows
    tokens = len(inputs.qkv)
    largest = np.abs(inputs.qkv[:, 2].astype(np.float32)).max()
    limit = float(largest) * (1 + 2**-7)  # a mean of rows of v, rounded to bf16
    ways = itertools.cycle(itertools.product((16, WINDOW, STREAM), sizes.fuse))
    for max_seqlen, fuse in itertools.islice(ways, sizes.hostile):
        values = hostile_cu_seqlens(rng, 5, tokens)
        told = f"cu_seqlens {values.tolist()}, max_seqlen {max_seqlen}, fuse {fuse}"
        arguments = subject.put(replace(inputs, cu_seqlens=values))
        try:
            out = subject.attend_guarded(arguments, max_seqlen, fuse=fuse).float()
        except MemoryFault as fault:
            yield f"{fault}: {told}"
            continue
        refused = out.isnan()
        may_refuse = torch.from_numpy(refusable(values, tokens, max_seqlen)).to(out.device)
        if refused[~may_refuse].any():
            yield f"NaN in a row of no segment that is longer than max_seqlen: {told}"
        elif not ((out.abs() <= limit) | refused).all():
            yield f"a value that no mean of rows of v has: {told}"
        else:
            yield None


def poison(subject: Subject, sizes: Sizes) -> Findings:
    """NaN or infinity in one segment, or in padding, changes no bit of any other segment."""
    inputs = draw([32, 1, 31, 16], sizes, padding=9)
    places = [*itertools.pairwise(inputs.cu_seqlens.tolist()), (80, 89)]
    for (kernel, bound), fuse in itertools.product(BOTH.items(), sizes.fuse):
        clean = subject.attend(subject.put(inputs), bound, fuse=fuse)
        for (start, end), value in itertools.product(places, (np.nan, np.inf, -np.inf)):
            qkv = inputs.qkv.copy()
            qkv[start:end] = value
            out = subject.attend(subject.put(replace(inputs, qkv=qkv)), bound, fuse=fuse)
            told = f"{value} in rows {start} to {end}, {kernel} kernel, fuse {fuse}"
            others = torch.ones(len(out), dtype=torch.bool, device=out.device)
            others[start:end] = False
            if not same_bits(out[others], clean[others]):
                yield f"other rows changed: {told}"
            elif out[80:].any():
                yield f"padding is not 0: {told}"
            else:
                yield None


def huge(subject: Subject, sizes: Sizes) -> Findings:
    """Offsets past 2^31, one very long segment, very many short ones, hardly any tokens."""
    yield from _far_offsets(subject, sizes)

    long = draw([sizes.long_segment], replace(sizes, head_dim=64), heads=1)
    yield _inaccurate(long, subject.run(long), 0, 1, f"one segment of {sizes.long_segment}")

    short = np.random.default_rng(0).integers(0, 9, sizes.segments)
    many = draw(short, sizes, "float16", heads=1, padding=1000)
    for bound in (8, STREAM):
        out = subject.attend(subject.put(many), bound)
        for first in (0, sizes.segments - 30):
            told = f"{sizes.segments} segments, max_seqlen {bound}, from {first}"
            yield _inaccurate(many, out, first, first + 30, told)

    yield from _next_to_nothing(subject, sizes)


def determinism(subject: Subject, sizes: Sizes) -> Findings:
    """The same call gives the same bits every time."""
    for dtype, (kernel, bound) in itertools.product(DTYPES, BOTH.items()):
        inputs = draw([32, 0, 1, 31, 16, 5], sizes, dtype, padding=3)
        arguments = subject.put(inputs)
        for fuse in sizes.fuse:
            first = subject.attend(arguments, bound, fuse=fuse)
            for run in range(1, sizes.runs):
                again = subject.attend(arguments, bound, fuse=fuse)
                same = same_bits(first, again)
                yield None if same else f"{dtype}, {kernel} kernel, fuse {fuse}: run {run} differs"


def place(subject: Subject, sizes: Sizes) -> Findings:
    """A segment has the same bits wherever it stands and whatever stands beside it."""
    tokens = max(sizes.starts) + max(sizes.lengths)
    for dtype, (kernel, bound), length in itertools.product(DTYPES, BOTH.items(), sizes.lengths):
        if length > bound:
            continue
        moved = draw([length], sizes, dtype)
        results = []
        for start in sizes.starts:
            around = draw([tokens], sizes, dtype, seed=start)
            here = slice(start, start + length)
            around.qkv[here], around.cos[here], around.sin[here] = moved.qkv, moved.cos, moved.sin
            # The same number of segments for every start, none longer than the bound; at 0 it
            # stands alone.
            before = np.linspace(0, start, 14)
            behind = np.minimum(start + length + 32 * np.arange(14), tokens if start else length)
            cu_seqlens = np.concatenate([before, behind]).astype(np.int32)
            arguments = subject.put(replace(around, cu_seqlens=cu_seqlens))
            results.append(subject.attend(arguments, bound)[here])
            if start == sizes.starts[0]:  # alone
                continue
            told = f"{dtype}, {kernel} kernel, {length} tokens from {start} on"
            same = same_bits(results[-1], results[0])
            yield None if same else f"other bits than alone: {told}"


def numerics(subject: Subject, sizes: Sizes) -> Findings:
    """Large, equal and one-sided logits, fp16 near its largest: as accurate as unfused, no NaN."""
    for (name, make), dtype in itertools.product(EXTREMES.items(), DTYPES):
        inputs = make(draw([32, 20], sizes, dtype))
        exact = oracle(inputs)
        unfused_error = relative_rms_error(unfused(inputs), exact)
        # An error below a rounding of the result counts as none: unfused may have none by chance.
        limit = 2 * max(unfused_error, torch.finfo(getattr(torch, dtype)).eps / 4)
        for kernel, bound in BOTH.items():
            error = relative_rms_error(subject.attend(subject.put(inputs), bound), exact)
            told = f"{name}, {dtype}, {kernel} kernel: error {error:.1e}, limit {limit:.1e}"
            yield None if error <= limit else told


def _far_offsets(subject: Subject, sizes: Sizes) -> Findings:
    # Rows that repeat with a prime period: an offset that wraps lands on other values.
    lengths = [64] * (sizes.far_tokens // 64)
    far = replace(
        draw(
            lengths, replace(sizes, head_dim=80), heads=sizes.far_heads,
            padding=sizes.far_tokens % 64, distinct=9973,
        ),
        max_seqlen=64,
    )  # fmt: skip
    arguments = subject.put(far)
    for bound, fuse in itertools.product((64, STREAM), sizes.fuse):
        out = subject.attend(arguments, bound, fuse=fuse)
        told = f"{len(out)} tokens, max_seqlen {bound}, fuse {fuse}"
        for first in (0, len(lengths) // 2, len(lengths) - 2):
            yield _inaccurate(far, out, first, first + 2, f"{told}, from segment {first}")
        yield None if not out[far.cu_seqlens[-1] :].any() else f"padding is not 0: {told}"


def _next_to_nothing(subject: Subject, sizes: Sizes) -> Findings:
    for lengths, tokens in (([1], 1), ([0, 0], 0), ([], 5)):
        few = draw(lengths, sizes, padding=tokens - sum(lengths))
        for bound in BOTH.values():
            out = subject.attend(subject.put(few), bound)
            told = f"{tokens} tokens in {len(lengths)} segments"
            if len(out) != tokens:
                yield f"{len(out)} rows for {told}"
            elif sum(lengths):
                yield _inaccurate(few, out, 0, 1, told)
            else:
                yield f"padding is not 0: {told}" if out.any() else None


def _inaccurate(
    inputs: KernelInputs, out: torch.Tensor, first: int, last: int, told: str
) -> str | None:
    """What is wrong with segments first .. last of a result by rule 1 of the numerics."""
    start, end = int(inputs.cu_seqlens[first]), int(inputs.cu_seqlens[last])
    part = KernelInputs(
        qkv=inputs.qkv[start:end],
        cos=inputs.cos[start:end],
        sin=inputs.sin[start:end],
        cu_seqlens=inputs.cu_seqlens[first : last + 1] - start,
        max_seqlen=inputs.max_seqlen,
    )
    exact = oracle(part)
    dtype = inputs.qkv.dtype.name
    error = relative_rms_error(out[start:end], exact)
    verdict = kernel_verdict(error, relative_rms_error(unfused(part), exact), dtype)
    return None if verdict.passed else f"error {error:.1e}, limit {verdict.limit:.1e}: {told}"
