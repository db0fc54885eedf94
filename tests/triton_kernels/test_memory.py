"""triton_kernels read and write their tensors in place, and nothing beside them."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from compare.stress.guards import GUARD, guarded, guarded_results, intact
from tests.hostile import TOKENS, hostile_cu_seqlens
from tests.kernel_cases import assert_accurate, make_case
from tests.kernel_contract import STREAM, WINDOW, both_kernels, cut
from tests.triton_kernels.adapter import (
    DEVICE,
    interpreted_nan,
    public_function,
    to_numpy,
    to_torch,
)


@contextmanager
def noting_addresses():
    """While it is open, addresses that kernels load and store are noted, where they are
    interpreted: also of what is read and not used, which no value in a guard would show.
    """
    noted, builder = [], InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def noting_load(self, pointers, mask, *rest):
        noted.append(pointers.data[mask.data])
        return load(self, pointers, mask, *rest)

    def noting_store(self, pointers, value, mask, *rest):
        noted.append(pointers.data[mask.data])
        return store(self, pointers, value, mask, *rest)

    watched = {"create_masked_load": noting_load, "create_masked_store": noting_store}
    with mock.patch.multiple(builder, **watched):
        yield noted


@hostile_cu_seqlens(
    usual=10, fuse=("qk", "none", "q"), max_seqlen=(WINDOW, STREAM),
    guard=(GUARD, GUARD + 1, GUARD + 8), dtype=("float32", "bfloat16"),
)  # fmt: skip
def test_nothing_outside_the_tensors_is_read_or_written(cu_seqlens, fuse, max_seqlen, guard, dtype):
    # 30 tokens, 1 head of 72 = 64 + 8 columns: no side is a multiple of a tile's. One guard leaves
    # the tensors unaligned, one has them begin within a sector. In bf16 tiles have 64 rows: Q goes
    # by way of the result.
    case = cut(cu_seqlens, tokens=TOKENS, head_dim=72, heads=1, dtype=dtype)
    attend_between_guards(case, fuse, max_seqlen, guard)


def test_nor_is_what_lies_behind_the_last_block_of_keys():
    """Whole blocks come before it, of which the next one's tail is loaded ahead."""
    attend_between_guards(make_case([130], head_dim=72, heads=1), "none", STREAM, GUARD)


def attend_between_guards(case, fuse, max_seqlen, guard):
    *tensors, cu_seqlens = (to_torch(x) for x in case.separate)
    inputs = [guarded(x, guard=guard) for x in tensors]
    seqlens, _ = surrounded = guarded(cu_seqlens, value=15)
    with guarded_results() as results, noting_addresses() as addresses:
        out = public_function(False)(
            *(inside for inside, _ in inputs), seqlens,
            max_seqlen=max_seqlen, fuse=fuse, implementation="kernel",
        )  # fmt: skip
    assert torch.isfinite(out).all()  # a read beside the tensors would have been NaN
    for before, (inside, buffer) in zip(tensors, inputs, strict=True):
        assert torch.equal(inside, before)
        assert buffer.isnan().sum() == 2 * guard
    assert len(results) == {"qk": 1, "q": 2, "none": 3}[fuse]
    assert all(map(intact, results))
    assert len(addresses) > 5 or DEVICE == "cuda"
    for inside, buffer in (*inputs, surrounded):
        first, last = inside.data_ptr(), inside.data_ptr() + inside.nbytes
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        for at in addresses:
            assert not (((begin <= at) & (at < first)) | ((last <= at) & (at < end))).any()


@both_kernels
@pytest.mark.parametrize("offset", [0, 1])
def test_groups_and_norms_in_rows_of_one_projection(offset, max_seqlen):
    """Also of weights, and heads, that begin anywhere."""
    case = make_case((9, 23), heads=4, group=2, head_dim=24, norms="qk", trailing=3)
    *qkv, cos, sin, cu_seqlens = map(to_torch, case.separate)
    rows, _ = guarded(torch.cat([x.flatten(1) for x in qkv], 1), guard=GUARD + offset)
    q, k, v = (x.unflatten(1, (-1, 24)) for x in rows.split((96, 48, 48), 1))
    norms = {name: guarded(to_torch(x), guard=GUARD + 1)[0] for name, x in case.norms.items()}
    options = norms | {"max_seqlen": max_seqlen, "implementation": "kernel"}
    assert_accurate(
        to_numpy(public_function(False)(q, k, v, cos, sin, cu_seqlens, **options)), case
    )


def test_q_and_k_are_rotated_at_once_where_k_lies_behind_q():
    case = make_case((9, 23), trailing=3)
    *qkv, cos, sin, cu_seqlens = map(to_torch, case.separate)
    # K behind Q, in front of it, and elsewhere
    for order, made in (((0, 1, 2), 2), ((1, 0, 2), 3), ((0, 2, 1), 3)):
        lying = torch.stack([qkv[i] for i in order], dim=1).unbind(1)
        q, k, v = (lying[order.index(i)] for i in range(3))
        with guarded_results() as results:
            out = public_function(False)(
                q, k, v, cos, sin, cu_seqlens,
                max_seqlen=23, fuse="none", implementation="kernel",
            )  # fmt: skip
        assert len(results) == made
        assert_accurate(to_numpy(out), case)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory does not lie as it is told to")
def test_storages_that_lie_one_behind_the_other_by_chance_are_told_apart():
    """As those of one token may on a GPU; Triton's interpreter would read past its copy of Q."""
    memory = np.ones((2, 1, 4, 16), dtype=np.float32)
    v, angles, cu_seqlens = torch.ones(1, 4, 16), torch.ones(1, 8), torch.tensor([0, 1]).int()

    def made(q, k):
        with guarded_results() as results:
            public_function(False)(
                q, k, v, angles, angles, cu_seqlens,
                max_seqlen=STREAM, fuse="none", implementation="kernel",
            )  # fmt: skip
        return len(results)

    assert made(*torch.from_numpy(memory).unbind()) == 2  # both in one launch, and the result
    q, k = (torch.from_numpy(x) for x in memory)
    assert k.data_ptr() - q.data_ptr() == q.nbytes
    assert made(q, k) == 3


@pytest.mark.parametrize("length", [17, 40])
def test_rows_of_a_longer_segment_are_written(length):
    """Right or NaN, and NaN from the kernel: elsewhere in the tests memory holds it before."""
    case = make_case((9, length, 16), head_dim=72, trailing=3)
    empty = torch.empty_strided

    def full(*arguments, **options):
        return empty(*arguments, **options).fill_(7.0)

    with mock.patch.object(torch, "empty_strided", full), interpreted_nan():
        out = public_function(False)(
            *map(to_torch, case.separate), max_seqlen=16, implementation="kernel"
        )
    assert (out != 7).all()


LAYOUTS = {
    "heads before tokens": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second token": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "part of a wider head": lambda x: torch.nn.functional.pad(x, (8, 24))[..., 8:-24],
    "an odd offset": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
    "some of more heads": lambda x: torch.nn.functional.pad(x, (0, 0, 1, 2))[:, 1:-2],
}


@both_kernels
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_are_taken(layout, max_seqlen):
    longest = {WINDOW: 16, STREAM: 130}[max_seqlen]  # several tiles of keys
    case = make_case((9, 0, longest, 1), trailing=3)
    q, k, v, *rest = map(to_torch, case.separate)
    for fuse in ("qk", "none") if max_seqlen == WINDOW else ("qk",):
        # Strides of each tensor's own: k keeps its.
        result = public_function(False)(
            layout(q), k, layout(v), *rest,
            max_seqlen=max_seqlen, fuse=fuse, implementation="kernel",
        )  # fmt: skip
        assert result.is_contiguous()
        assert_accurate(to_numpy(result), case)


def test_queries_and_keys_that_lie_as_if_packed():
    """Rotated in one launch only where K's heads continue Q's, of one memory and with its steps."""
    case = make_case((9, 16), head_dim=16, dtype="float32")
    q, k, v, *rest = map(to_torch, case.separate)
    heads = q.shape[1]
    halves = [torch.zeros(len(q), 2 * heads, 16, device=DEVICE) for _ in range(2)]
    halves[0][:, :heads], halves[1][:, heads:] = q, k
    of_two_memories = halves[0][:, :heads], halves[1][:, heads:]

    def behind(q_steps, k_steps):
        """Views of one memory, K's first head one past Q's last."""
        memory = torch.zeros(16 * (q.numel() + k.numel()), device=DEVICE)
        offset = heads * q_steps[1]
        views = [memory.as_strided(q.shape, q_steps), memory.as_strided(k.shape, k_steps, offset)]
        for view, values in zip(views, (q, k), strict=True):
            view.copy_(values)
        return views

    packed = behind((64 * heads, 16, 1), (64 * heads, 16, 1))
    other_tokens = behind((128 * heads, 16, 1), (64 * heads, 16, 1))
    other_heads = behind((128 * heads, 16, 1), (128 * heads, 32, 1))
    for views in (packed, other_tokens, other_heads, of_two_memories):
        assert torch.equal(views[0], q)
        assert torch.equal(views[1], k)
        out = public_function(False)(
            *views, v, *rest, max_seqlen=16, fuse="none", implementation="kernel"
        )
        assert_accurate(to_numpy(out), case)


def test_heads_and_angles_may_share_memory():
    case = make_case((9, 16), heads=1)
    q, k, v, cos, sin, cu_seqlens = map(to_torch, case.separate)
    options = {"max_seqlen": WINDOW, "implementation": "kernel"}
    one = public_function(False)(q, k, v, cos, sin, cu_seqlens, **options)
    both = torch.cat([cos, sin], dim=1)
    three = public_function(False)(
        *(x.expand(-1, 3, -1) for x in (q, k, v)), *both.chunk(2, dim=1), cu_seqlens, **options
    )
    assert torch.equal(three, one.expand(-1, 3, -1))


@both_kernels
def test_qkv_of_any_strides_is_read_in_place(max_seqlen):
    qkv, *rest = map(to_torch, make_case((9, 16), trailing=3).packed)
    options = {"max_seqlen": max_seqlen, "implementation": "kernel"}
    contiguous = public_function(True)(qkv, *rest, **options)
    # [tokens, heads, 3, head_dim] in memory, and a bias behind each head.
    wide = torch.nn.functional.pad(qkv.transpose(1, 2).contiguous(), (0, 16))
    strided = public_function(True)(wide[..., :-16].transpose(1, 2), *rest, **options)
    assert torch.equal(strided, contiguous)


@both_kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fuse", ["qk", "q", "none"])
def test_inputs_are_left_as_they_are(packed, fuse, max_seqlen):
    case = make_case((9, 16), head_dim=16)
    arguments = list(map(to_torch, case.packed if packed else case.separate))
    before = [x.clone() for x in arguments]
    public_function(packed)(*arguments, max_seqlen=max_seqlen, fuse=fuse, implementation="kernel")
    for x, y in zip(arguments, before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("max_seqlen", [64, STREAM])
def test_memory_is_taken_for_the_result_alone(max_seqlen):
    tokens, heads, head_dim = 64 * 256, 16, 80
    qkv = torch.randn(tokens, heads, 3, head_dim, device=DEVICE, dtype=torch.bfloat16)
    qkv = qkv.transpose(1, 2)
    angles = torch.ones(tokens, head_dim // 2, device=DEVICE)
    cu_seqlens = torch.arange(0, tokens + 1, 64, device=DEVICE, dtype=torch.int32)
    attend = public_function(True)
    for _ in range(2):  # the first call compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(qkv, angles, angles, cu_seqlens, max_seqlen=max_seqlen, fuse="qk")
        peak = torch.cuda.max_memory_allocated() - before
        size = out.numel() * out.element_size()
        del out
    assert peak <= size + 2**20


def test_any_cu_seqlens_with_nan_everywhere_is_safe():
    case = cut((5, 2**31 - 1, -7, 3), tokens=30, head_dim=16)
    arguments = [to_torch(np.full_like(x, np.nan)) for x in case.separate[:5]]
    with interpreted_nan():
        result = public_function(False)(
            *arguments, to_torch(case.cu_seqlens), max_seqlen=WINDOW, implementation="kernel"
        )
    assert ((result == 0) | result.isnan()).all()
