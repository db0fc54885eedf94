"""What the kernels are put through: hostile segments, poison, sizes, repetition, large numbers.

A check goes through its cases and yields for each what was wrong with it, None where nothing was.
Each case is judged right after calls of its own, so that it counts for the kernels of these.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from compare.agreement.metrics import ORACLE_LIMITS, kernel_verdict, relative_rms_error
from compare.agreement.oracle import oracle, unfused
from compare.stress.guards import same_bits
from compare.stress.inputs import (
    EXTREMES,
    STREAM,
    WINDOW,
    Route,
    Sizes,
    contested,
    draw,
    draw_for,
    hostile_cu_seqlens,
    refusable,
)
from compare.stress.launched import WARP_SPECIALIZED
from compare.stress.subjects import MemoryFault, Subject
from compare.workloads.arrays import KernelArguments
from compare.workloads.kernels import DTYPES, KernelInputs

Findings = Iterator[str | None]

# Tokens of no segment behind the others. By eights, which Pallas' warp-specialized kernel minds.
_PADDING = 8
_DISTINCT = 499  # rows of many neighbours, which only have to differ from each other's


def hostile(subject: Subject, sizes: Sizes) -> Findings:
    """Any int32 in cu_seqlens: nothing outside the tensors is touched, no row holds garbage."""
    rng = np.random.default_rng(0)
    drawn = []
    for route in sizes.routes:
        inputs = draw_for(route, sizes, padding=_PADDING)
        largest = np.abs(inputs.qkv[:, 2].astype(np.float32)).max()
        limit = float(largest) * (1 + 2**-7)  # a mean, rounded to bf16
        drawn.append((route, inputs, subject.put(inputs), limit))
    ways = itertools.cycle(itertools.product(drawn, sizes.fuse))
    for (route, inputs, arrays, limit), fuse in itertools.islice(ways, sizes.hostile):
        tokens = len(inputs.qkv)
        values = hostile_cu_seqlens(rng, 5, tokens)
        told = f"cu_seqlens {values.tolist()}, {_told(route, fuse)}"
        arguments = _cut(subject, arrays, inputs, values)
        try:
            out = subject.attend_guarded(arguments, route.max_seqlen, fuse=fuse).float()
        except MemoryFault as fault:
            yield f"{fault}: {told}"
            continue
        refused = out.isnan()
        may_refuse = torch.from_numpy(refusable(values, tokens, route.max_seqlen)).to(out.device)
        if refused[~may_refuse].any():
            yield f"NaN in a row of no segment that is longer than max_seqlen: {told}"
        elif not ((out.abs() <= limit) | refused).all():
            yield f"a value that no mean of rows of v has: {told}"
        else:
            yield None


def poison(subject: Subject, sizes: Sizes) -> Findings:
    """NaN or infinity in one segment, or in padding, changes no bit of any other segment."""
    for route in sizes.routes:
        inputs = draw_for(route, sizes, padding=_PADDING)
        end, tokens = int(inputs.cu_seqlens[-1]), len(inputs.qkv)
        places = [*itertools.pairwise(inputs.cu_seqlens.tolist()), (end, tokens)]
        places = [(first, last) for first, last in places if first < last]
        for fuse in sizes.fuse:
            clean = subject.attend(subject.put(inputs), route.max_seqlen, fuse=fuse)
            for place, value in itertools.product(places, (np.nan, np.inf, -np.inf)):
                qkv = inputs.qkv.copy()
                qkv[slice(*place)] = value
                arguments = subject.put(replace(inputs, qkv=qkv))
                out = subject.attend(arguments, route.max_seqlen, fuse=fuse)
                told = f"{value} in rows {place[0]} to {place[1]}, {_told(route, fuse)}"
                others = torch.ones(len(out), dtype=torch.bool, device=out.device)
                others[slice(*place)] = False
                if not _unchanged(subject, out[others], clean[others]):
                    yield f"other rows changed: {told}"
                elif out[end:].any():
                    yield f"padding is not 0: {told}"
                else:
                    yield None


def huge(subject: Subject, sizes: Sizes) -> Findings:
    """Offsets past 2^31, one very long segment, very many short ones, hardly any tokens."""
    yield from _far_offsets(subject, sizes)

    for head_dim in (64, 80):
        long = draw([sizes.long_segment], head_dim)
        arguments = subject.put(long)
        for fuse in sizes.fuse:
            told = f"one segment of {sizes.long_segment}, {head_dim} columns, fuse {fuse}"
            out = subject.attend(arguments, long.max_seqlen, fuse=fuse)
            yield _inaccurate(long, out, (0,), 1, told)

    short = np.random.default_rng(0).integers(0, 9, sizes.segments)
    many = draw(short, sizes.head_dim, "float16", padding=1000)
    arguments = subject.put(many)
    for bound, fuse in itertools.product((8, STREAM), sizes.fuse):
        out = subject.attend(arguments, bound, fuse=fuse)
        told = f"{sizes.segments} segments, max_seqlen {bound}, fuse {fuse}"
        yield _inaccurate(many, out, (0, sizes.segments - 30), 30, told)

    yield from _next_to_nothing(subject, sizes)


def determinism(subject: Subject, sizes: Sizes) -> Findings:
    """The same call gives the same bits every time."""
    for dtype, route in itertools.product(DTYPES, sizes.routes):
        inputs = draw_for(route, sizes, dtype=dtype, padding=_PADDING)
        arguments = subject.put(inputs)
        for fuse in sizes.fuse:
            first = subject.attend(arguments, route.max_seqlen, fuse=fuse)
            for run in range(1, sizes.runs):
                again = subject.attend(arguments, route.max_seqlen, fuse=fuse)
                same = same_bits(first, again)
                yield None if same else f"run {run} differs: {dtype}, {_told(route, fuse)}"


def place(subject: Subject, sizes: Sizes) -> Findings:
    """A segment has the same bits wherever it stands and whatever stands beside it."""
    tokens = max(sizes.starts) + max(sizes.lengths)
    for dtype, route, length in itertools.product(DTYPES, sizes.routes, sizes.lengths):
        if length > route.max_seqlen:
            continue
        moved = draw_for(route, sizes, [length], dtype=dtype)
        before: dict[tuple[str, int], tuple[int, torch.Tensor]] = {}
        for start in sizes.starts:
            around = draw_for(route, sizes, [tokens], dtype=dtype, seed=1, first=start)
            arguments = subject.put(_among(around, moved, start, route))
            for fuse in sizes.fuse:
                found = subject.attend(arguments, route.max_seqlen, fuse=fuse)
                found = found[start : start + length]
                unit = subject.row_unit if WARP_SPECIALIZED in subject.launched else 1
                first, expected = before.setdefault((fuse, start % unit), (start, found))
                if first == start:
                    continue
                told = f"{dtype}, {length} tokens from {start} on, {_told(route, fuse)}"
                same = same_bits(found, expected)
                yield None if same else f"other bits than from {first} on: {told}"


def invariance(subject: Subject, sizes: Sizes) -> Findings:
    """On request its bits are also those of itself alone and in calls of other sizes and bounds."""
    tokens = max(sizes.starts) + max(sizes.lengths)
    of_shape = itertools.groupby(sorted(sizes.routes, key=_shape), key=_shape)
    groups = [list(routes) for _, routes in of_shape]
    for dtype, routes, length in itertools.product(DTYPES, groups, sizes.lengths):
        moved = draw_for(routes[0], sizes, [length], dtype=dtype)
        before: dict[str, tuple[str, torch.Tensor]] = {}
        for start, (times, route) in zip(sizes.starts, itertools.cycle(enumerate(routes, 1))):
            if length > route.max_seqlen:
                continue
            rows = times * tokens if start else max(sizes.lengths)
            shape = {"dtype": dtype, "seed": 1, "distinct": _DISTINCT, "first": start}
            around = draw_for(route, sizes, [rows], **shape)
            arguments = subject.put(_among(around, moved, start, route))
            for fuse in sizes.fuse:
                options = {"fuse": fuse, "batch_invariant": True}
                found = subject.attend(arguments, route.max_seqlen, **options)
                found = found[start : start + length]
                here = f"from {start} of {rows} on, max_seqlen {route.max_seqlen}"
                first, expected = before.setdefault(fuse, (here, found))
                if found is expected:
                    continue
                told = f"{dtype}, {length} tokens {here}, {route.heads} heads, fuse {fuse}"
                same = same_bits(found, expected)
                yield None if same else f"other bits than {first}: {told}"


def numerics(subject: Subject, sizes: Sizes) -> Findings:
    """Large, equal and one-sided logits, fp16 near its largest: as accurate as unfused, no NaN."""
    routes = itertools.product(EXTREMES.items(), DTYPES, sizes.routes)
    for (name, make), dtype, route in routes:
        inputs = make(draw_for(route, sizes, dtype=dtype, padding=_PADDING))
        arguments, exact = subject.put(inputs), oracle(inputs)
        unfused_error = relative_rms_error(unfused(inputs), exact)
        # An error below a rounding of the result counts as none: unfused may have none by chance.
        limit = 2 * max(unfused_error, torch.finfo(getattr(torch, dtype)).eps / 4)
        for fuse in sizes.fuse:
            out = subject.attend(arguments, route.max_seqlen, fuse=fuse)
            error = relative_rms_error(out, exact)
            told = f"{name}, {dtype}, {_told(route, fuse)}: error {error:.1e}, limit {limit:.1e}"
            yield None if error <= limit else told


def gradients(subject: Subject, sizes: Sizes) -> Findings:
    """Those in qkv: the same bits every time and beside NaN; of any cu_seqlens none is garbage."""
    rng = np.random.default_rng(0)
    for dtype, route in itertools.product(DTYPES, sizes.routes):
        shape = {"dtype": dtype, "padding": _PADDING}
        inputs = draw_for(route, sizes, **shape)
        # Of the result's shape, with no gradient in the segment that is spoilt.
        first, tokens, end = int(inputs.cu_seqlens[1]), len(inputs.qkv), int(inputs.cu_seqlens[-1])
        grads = draw_for(route, sizes, **shape, seed=1)
        grads.qkv[:first] = 0
        grad = subject.put(grads)[0][:, 0]
        told = f"{dtype}, {_told(route, 'auto')}"

        arrays = subject.put(inputs)
        clean = subject.attend(arrays, route.max_seqlen, grad=grad)
        again = subject.attend(arrays, route.max_seqlen, grad=grad)
        yield None if same_bits(clean, again) else f"another run differs: {told}"
        yield f"padding has a gradient: {told}" if clean[end:].any() else None

        qkv = inputs.qkv.copy()
        qkv[:first] = np.nan
        out = subject.attend(subject.put(replace(inputs, qkv=qkv)), route.max_seqlen, grad=grad)
        same = _unchanged(subject, out[first:end], clean[first:end])
        yield None if same else f"other rows changed: nan in the first {first} rows, {told}"

        for _ in range(sizes.runs):
            values = hostile_cu_seqlens(rng, 5, tokens)
            arguments = _cut(subject, arrays, inputs, values)
            try:
                out = subject.attend_guarded(arguments, route.max_seqlen, grad=grad)
            except MemoryFault as fault:
                yield f"{fault}: cu_seqlens {values.tolist()}, {told}"
                continue
            excused = refusable(values, tokens, route.max_seqlen) | contested(values, tokens)
            broken = not out[torch.from_numpy(~excused).to(out.device)].isfinite().all()
            yield f"no number: cu_seqlens {values.tolist()}, {told}" if broken else None


def _unchanged(subject: Subject, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of the same rows have the same bits.

    In the warp-specialized kernel a neighbour's infinity may meet a probability of 0. It then
    computes the row again, on its way back, where probabilities may round otherwise.
    """
    if WARP_SPECIALIZED not in subject.launched:
        return same_bits(found, expected)
    return relative_rms_error(found, expected) <= ORACLE_LIMITS["bfloat16"]


def _cut(
    subject: Subject, arrays: KernelArguments, inputs: KernelInputs, cu_seqlens: np.ndarray
) -> KernelArguments:
    """The arrays of some inputs, cut into other segments, which alone are carried there."""
    bare = replace(inputs, qkv=inputs.qkv[:0], cos=inputs.cos[:0], sin=inputs.sin[:0])
    return (*arrays[:3], subject.put(replace(bare, cu_seqlens=cu_seqlens))[3])


def _among(around: KernelInputs, moved: KernelInputs, start: int, route: Route) -> KernelInputs:
    """`around` with a segment in it from some row on, among short ones; alone from 0 on.

    None is longer than the bound of a route.
    """
    length, tokens = len(moved.qkv), len(around.qkv)
    here = slice(start, start + length)
    around.qkv[here], around.cos[here], around.sin[here] = moved.qkv, moved.cos, moved.sin
    # As many segments for every start.
    front, step = np.linspace(0, start, 17), min(32, route.max_seqlen)
    behind = np.minimum(start + length + step * np.arange(14), tokens if start else length)
    cu_seqlens = np.concatenate([front, behind]).astype(np.int32)
    return replace(around, cu_seqlens=cu_seqlens)


def _shape(route: Route) -> tuple[int, int]:
    return route.heads, route.head_dim or 0


def _told(route: Route, fuse: str) -> str:
    return f"{route.name} kernel, max_seqlen {route.max_seqlen}, {route.heads} heads, fuse {fuse}"


def _far_offsets(subject: Subject, sizes: Sizes) -> Findings:
    lengths, padding = [64] * (sizes.far_tokens // 64), sizes.far_tokens % 64
    for heads, head_dim in (sizes.far_heads, 80), (max(sizes.far_heads // 8, 1), 640):
        # Rows that repeat with a prime period: an offset that wraps lands on other values.
        far = draw(lengths, head_dim, heads=heads, padding=padding, distinct=9973)
        arguments = subject.put(far)
        for bound, fuse in itertools.product((64, STREAM), sizes.fuse):
            out = subject.attend(arguments, bound, fuse=fuse)
            told = f"{len(out)} tokens x {head_dim}, max_seqlen {bound}, fuse {fuse}"
            if out[far.cu_seqlens[-1] :].any():
                yield f"padding is not 0: {told}"
            else:
                yield _inaccurate(far, out, (0, len(lengths) // 2, len(lengths) - 2), 2, told)


def _next_to_nothing(subject: Subject, sizes: Sizes) -> Findings:
    for lengths, tokens in (([1], 1), ([0, 0], 0), ([], 5)):
        few = draw(lengths, sizes.head_dim, padding=tokens - sum(lengths))
        arguments = subject.put(few)
        for bound, fuse in itertools.product((WINDOW, STREAM), sizes.fuse):
            out = subject.attend(arguments, bound, fuse=fuse)
            told = f"{tokens} tokens in {len(lengths)} segments, max_seqlen {bound}, fuse {fuse}"
            if len(out) != tokens:
                yield f"{len(out)} rows for {told}"
            elif sum(lengths):
                yield _inaccurate(few, out, (0,), 1, told)
            else:
                yield f"padding is not 0: {told}" if out.any() else None


def _inaccurate(
    inputs: KernelInputs, out: torch.Tensor, firsts: Sequence[int], count: int, told: str
) -> str | None:
    """What is wrong by rule 1 of the numerics with `count` segments from one of some on."""
    for first in firsts:
        cu_seqlens = inputs.cu_seqlens[first : first + count + 1]
        rows = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
        part = KernelInputs(
            qkv=inputs.qkv[rows],
            cos=inputs.cos[rows],
            sin=inputs.sin[rows],
            cu_seqlens=cu_seqlens - cu_seqlens[0],
            max_seqlen=inputs.max_seqlen,
        )
        exact = oracle(part)
        error = relative_rms_error(out[rows], exact)
        unfused_error = relative_rms_error(unfused(part), exact)
        verdict = kernel_verdict(error, unfused_error, inputs.qkv.dtype.name)
        if not verdict.passed:
            return f"error {error:.1e}, limit {verdict.limit:.1e}: {told}, from segment {first}"
    return None
