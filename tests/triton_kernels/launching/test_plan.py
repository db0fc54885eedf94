"""What is launched for a form of tensors: nothing that it depends on is forgotten or left out."""

import json

import pytest
import torch

from triton_kernels.launching.choose import launch_source, launching_by, rotated_row
from triton_kernels.launching.fast_path import form_of
from triton_kernels.launching.plan import make_plan
from triton_kernels.launching.rotate_in_order import rotate_in_order_call
from triton_kernels.launching.table import Table

TOKENS, HEADS, HEAD_DIM = 6, 2, 16
STREAM = 4096


def table(*rows):
    """A table whose kernels all take these launches, each the tile's rows and its conditions."""
    launches = [
        {"kernel": kernel, "block": block, "block_k": 16, "num_warps": 4, "num_stages": 1}
        | conditions
        for kernel in ("stream", "rotating_stream", "rotate")
        for block, conditions in rows
    ]
    default = {"compute_capability": None, "launches": launches}
    return Table.from_text(json.dumps({"default": default}))


def tensors(tokens=TOKENS, heads=HEADS):
    """qkv, cos, sin and cu_seqlens."""
    angles = torch.empty(tokens, HEAD_DIM // 2)
    cu_seqlens = torch.empty(3, dtype=torch.int32)
    return torch.empty(tokens, 3, heads, HEAD_DIM), angles, angles, cu_seqlens


def planned(form, at_16=True, max_seqlen=STREAM, fuse="none", is_behind=True):
    return make_plan(form, at_16, is_behind, launch_source(None), max_seqlen, 0.25, fuse)


def attention(form, at_16=True, max_seqlen=STREAM):
    return planned(form, at_16, max_seqlen, fuse="qk").attention


def rotation(form, at_16=True):
    """That of Q alone."""
    return planned(form, at_16, is_behind=False).rotations[0].call


def test_another_table_gives_another_launch_to_the_same_form():
    form = form_of(tensors())
    blocks = []
    for block in (32, 64, 32):
        with launching_by(table((block, {}))):
            calls = attention(form), planned(form).attention, rotation(form)
            blocks.append({call.launch.block for call in calls})
    assert blocks == [{32}, {64}, {32}]


def test_another_bound_on_registers_is_another_binary():
    form, binaries = form_of(tensors()), []
    for most in (128, 168, 128):
        with launching_by(table((32, {"maxnreg": most}))):
            binaries.append(attention(form).binary)
    assert binaries[0] is binaries[2]
    assert binaries[0] is not binaries[1]


@pytest.mark.parametrize(("tokens", "heads", "block"), [(2, 3, 16), (6, 1, 16), (4, 2, 32)])
def test_rows_are_tokens_times_heads(tokens, heads, block):
    form = form_of(tensors(tokens, heads))
    with launching_by(table((16, {"max_rows": 6}), (32, {}))):
        assert attention(form).launch.block == block
        assert rotation(form).launch.block == block


def test_what_is_not_aligned_has_launches_of_its_own():
    form = form_of(tensors())
    with launching_by(table((16, {"operands": "unaligned"}), (32, {}))):
        for find in (attention, rotation):
            assert [find(form, at_16).launch.block for at_16 in (True, False)] == [32, 16]


# fuse, is_behind, and how many of Q and K each rotation writes
WAYS = [("qk", False, ()), ("q", False, (1,)), ("none", False, (1, 1)), ("none", True, (2,))]


@pytest.mark.parametrize("at_16", [True, False])
@pytest.mark.parametrize("max_seqlen", [8, STREAM])
@pytest.mark.parametrize("way", WAYS)
def test_packed_tensors_are_their_parts(at_16, max_seqlen, way):
    qkv, *others = tensors()
    packed, separate = form_of((qkv, *others)), form_of((*qkv.unbind(1), *others))
    options = {"fuse": way[0], "is_behind": way[1]}
    expected = planned(separate, at_16, max_seqlen, **options)
    part = qkv.stride(1) * qkv.itemsize
    assert planned(packed, at_16, max_seqlen, **options) == expected._replace(part=part)


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (3, 72), (16, 80), (1, 128)])
@pytest.mark.parametrize(("fuse", "is_behind", "parts"), WAYS)
def test_a_plan_is_for_the_tensors_that_rotation_makes(heads, head_dim, fuse, is_behind, parts):
    """Their shapes and strides are worked out before there are any."""
    angles, cu_seqlens = torch.empty(TOKENS, head_dim // 2), torch.empty(3, dtype=torch.int32)
    qkv = torch.empty(TOKENS, 3, heads, head_dim)
    q, k, v = qkv.unbind(1)
    form = form_of((qkv, angles, angles, cu_seqlens))
    found = planned(form, fuse=fuse, is_behind=is_behind)
    made = [torch.empty(TOKENS, n, rotated_row(heads, head_dim)) for n in parts]
    assert [rotation.shape for rotation in found.rotations] == [x.shape for x in made]
    for rotation, out in zip(found.rotations, made, strict=True):
        strides = [stride // 8 for x in (q, out) for stride in x.stride()[:2]]
        assert rotation.call.numbers[:5] == (TOKENS, *strides)
    rotated = [x for out in made for x in out.unbind(1)]
    q, k = ([q, k][: 2 - len(rotated)] + rotated)[:2]
    # Heads of a rotated row have places of their own.
    strides = [(*x.stride()[:1], x.stride(1) if x.ndim == 3 else 0) for x in (q, k, v)]
    assert found.attention.numbers[3:9] == tuple(stride // 8 for pair in strides for stride in pair)
    assert (found.shape, found.strides) == (v.shape, torch.empty(v.shape).stride())


def test_what_is_not_aligned_has_no_binary_that_is_known():
    qkv, cos, sin, cu_seqlens = tensors()
    narrow = torch.empty(TOKENS, 3, HEADS, HEAD_DIM + 4)[..., :HEAD_DIM]
    for x, at_16, known in ((qkv, True, True), (qkv, False, False), (narrow, True, False)):
        form = form_of((x, cos, sin, cu_seqlens))
        in_order = form_of((x[:, 0], qkv[:, 0], cos, sin))
        calls = (
            attention(form, at_16),
            rotation(form, at_16),
            rotate_in_order_call(in_order, at_16),
        )
        assert [call.binary is not None for call in calls] == [known] * 3


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("max_seqlen", [8, STREAM])
def test_each_of_q_k_and_v_has_to_be_aligned(max_seqlen, i):
    qkv, *others = tensors()
    parts = [*qkv.unbind(1)]
    parts[i] = torch.empty(TOKENS, HEADS, HEAD_DIM + 4)[..., :HEAD_DIM]
    assert attention(form_of((*parts, *others)), max_seqlen=max_seqlen).binary is None


@pytest.mark.parametrize(("stride", "known"), [(2**34 - 8, True), (2**34, False)])
def test_a_stride_beyond_32_bits_has_no_binary_that_is_known(stride, known):
    qkv, cos, sin, cu_seqlens = tensors(heads=1)
    q, k, v = qkv.unbind(1)
    far = q.as_strided(q.shape, (q.stride(0), stride, 1))  # of one head: no memory is that large
    form = form_of((far, k, v, cos, sin, cu_seqlens))
    calls = (
        *(attention(form, max_seqlen=n) for n in (8, STREAM)),
        rotation(form),
        rotate_in_order_call(form_of((far, k, cos, sin)), True),
    )
    assert [call.binary is not None for call in calls] == [known] * 4
