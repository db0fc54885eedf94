"""A call like an earlier one launches the same; shown without a GPU by a stand-in for launchers."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from compare.stress.guards import guarded_results
from tests.triton_kernels.adapter import public_function
from tests.triton_kernels.stand_ins import Driver, hopper
from triton_kernels import attention
from triton_kernels.checks import check_arguments
from triton_kernels.launching import fast_path, launch, plan
from triton_kernels.launching.choose import launch_source, launching_by
from triton_kernels.launching.launch import Binary
from triton_kernels.launching.table import Table

HEADS, HEAD_DIM = 4, 80
# Windows in one tile; the stream kernel; its warp-specialized form, as on a Hopper GPU.
LENGTHS = {"windows": 64, "stream": 256, "hopper_stream": 1024}
# How many addresses a kernel takes, in front of its numbers.
ADDRESSES = {"window_kernel": 7, "stream_kernel": 7, "hopper_stream_kernel": 2, "rotate_kernel": 4}
# Bytes within which two addresses are in the same memory: that of any tensor but cu_seqlens is
# longer, behind which others may lie by chance.
NEAR = 2048


class Launched:
    """Stands in for a kernel's machine code, and notes what it is launched on."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, record):
        self.kernel, self.record = kernel, record

    def run(self, programs, _y, _z, stream, function, metadata, *rest):
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert rest[:3] == (None, None, None)
        described = [
            (x.base.data_ptr(), x.shape, x.strides) for x in rest[3:] if hasattr(x, "base")
        ]
        others = [x for x in rest[3:] if not hasattr(x, "base")]
        count = ADDRESSES[self.kernel]
        if count > 2:  # norms stand behind them
            assert others[count : count + 2] == [None, None]
            others = [*others[:count], *others[count + 2 :]]
        self.record.append((self.kernel, programs, described, others[:count], others[count:]))


@pytest.fixture
def record(monkeypatch):
    """Launches, of kernels that all have been compiled already."""
    record = []
    monkeypatch.setattr(
        plan, "binary_of", lambda kernel, *_: Binary(Launched(kernel.__name__, record))
    )
    monkeypatch.setattr(launch, "driver", Driver)
    monkeypatch.setattr("triton_kernels.attend.INTERPRETED", True)
    fast_path.plans.clear()
    yield record
    fast_path.plans.clear()


def inputs(length, packed, tokens=1024, dtype=torch.bfloat16):
    """As views of a packed projection, or packed."""
    qkv = torch.randn(tokens, 3, HEADS, HEAD_DIM).to(dtype)
    angles = torch.rand(2, tokens, HEAD_DIM // 2)
    cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    return *([qkv] if packed else qkv.unbind(1)), *angles, cu_seqlens


def attend(tensors, max_seqlen, **options):
    function = public_function(len(tensors) == 4)
    return function(*tensors, max_seqlen=max_seqlen, implementation="kernel", **options)


def named(launched, tensors):
    """Launches with names for addresses: those of inputs, new ones in order, and places in them."""
    names = {x.data_ptr(): f"input {i}" for i, x in enumerate(tensors)}
    if len(tensors) == 4:
        names |= {x.data_ptr(): f"part {i}" for i, x in enumerate(tensors[0].unbind(1))}

    def name(address):
        if address in names:
            return names[address]
        for near, given in names.items():  # K behind Q in a row of both
            if 0 < address - near < NEAR and near != tensors[-1].data_ptr():
                return f"{given}, byte {address - near}"
        return names.setdefault(address, f"new {len(names)}")

    return [
        (kernel, programs, [(name(x), *form) for x, *form in described], list(map(name, at)), rest)
        for kernel, programs, described, at, rest in launched
    ]


def launched_by(record, tensors, *arguments, **options):
    """What a call launches, and its result's form."""
    record.clear()
    out = attend(tensors, *arguments, **options)
    assert record[-1][0] in ("window_kernel", "stream_kernel", "hopper_stream_kernel")
    addresses = [*record[-1][3], *[x for x, *_ in record[-1][2]]]
    assert out.data_ptr() in addresses
    return named(record, tensors), (out.dtype, out.shape, out.stride(), out.device)


@pytest.mark.parametrize("fuse", ["auto", "qk", "q", "none"])
@pytest.mark.parametrize("form", ["packed", "views", "separate"])
@pytest.mark.parametrize("kernel", LENGTHS)
def test_a_later_call_launches_what_the_first_did(
    record, on_hopper, monkeypatch, kernel, form, fuse
):
    monkeypatch.setattr("triton_kernels.attend.launch_source", lambda _: hopper())
    length = LENGTHS[kernel]
    first, second = (inputs(length, form == "packed", 4096) for _ in range(2))
    if form == "separate":
        first, second = ([x.clone() for x in tensors] for tensors in (first, second))
    expected = launched_by(record, first, length, fuse=fuse)
    kernels = [each[0] for each in expected[0]]
    if kernel == "windows":
        assert kernels[-1] == "window_kernel"
    if fuse == "none":
        assert len(kernels) == (3 if form == "separate" else 2)
        assert (kernels[-1] == "hopper_stream_kernel") == (kernel == "hopper_stream")

    def unexpected(*_):
        raise AssertionError("the long way")

    monkeypatch.setattr("triton_kernels.attend.check_arguments", unexpected)
    monkeypatch.setattr(launch, "_tensor_at", unexpected)
    with guarded_results() as written:
        assert launched_by(record, second, length, fuse=fuse) == expected
    assert len(written) == len(kernels)  # all in memory that guards watch, where they do


def test_tensors_that_lie_otherwise_go_the_long_way(record):
    """K behind Q, as in a packed projection, or not; the form is the same."""
    tensors = inputs(256, packed=False)
    qkv = torch.zeros(1024, 4, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    wide = [(*qkv.unbind(1)[i : i + 2], qkv[:, 2], *tensors[3:]) for i in (0, 1)]
    apart = (qkv[:, 0], qkv[:, 2], qkv[:, 3], *tensors[3:])
    for each, rotations in ((wide[0], 1), (apart, 2), (wide[1], 1), (wide[0], 1), (apart, 2)):
        launched, _ = launched_by(record, each, 256, fuse="none")
        assert len(launched) == rotations + 1


@pytest.fixture
def long_way(monkeypatch):
    """The kernels that Triton is to look at; it does not."""
    kernels = []

    class Kernel:
        def __init__(self, name):
            self.__name__ = name

        def __getitem__(self, grid):
            return lambda *_, **__: kernels.append(self.__name__)

    for name in ("window_kernel", "stream_kernel"):
        monkeypatch.setattr(plan, name, Kernel(name))
    return kernels


@pytest.mark.parametrize(
    ("packed", "i"), [(True, i) for i in range(3)] + [(False, i) for i in range(5)]
)
def test_addresses_that_are_not_aligned_go_the_long_way(record, long_way, packed, i):
    tensors = [x.clone() for x in inputs(64, packed)]
    attend(tensors, 64)
    x = tensors[i]
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    attend((*tensors[:i], moved, *tensors[i + 1 :]), 64)
    attend(tensors, 64)
    assert long_way == ["stream_kernel"]
    assert [kernel for kernel, *_ in record] == ["window_kernel"] * 2


def test_so_do_parts_that_are_not(record, long_way):
    """Of a tensor that is aligned, and so are its tokens and heads."""
    qkv, *rest = inputs(64, packed=True)
    part = qkv.stride(1) + 4
    strided = torch.empty(2 * qkv.numel(), dtype=qkv.dtype).as_strided(
        qkv.shape, (4 * qkv.stride(1), part, HEAD_DIM, 1)
    )
    attend((strided, *rest), 64)
    assert long_way == ["stream_kernel"]


def test_where_a_profiler_hooks_into_triton_calls_go_the_long_way(record, long_way):
    tensors = inputs(64, packed=True)
    attend(tensors, 64)
    hooks = launch.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        attend(tensors, 64)
    finally:
        hooks.remove(print)
    assert long_way == ["window_kernel"]
    attend(tensors, 64)
    assert len(record) == 2


def test_another_table_is_looked_at(record, monkeypatch):
    tensors = inputs(64, packed=True)
    launches = []
    monkeypatch.setattr(
        plan,
        "binary_of",
        lambda kernel, *rest: (
            launches.append(rest[-1]) or Binary(Launched("window_kernel", record))
        ),
    )
    expected = launched_by(record, tensors, 64)
    text = launch_source(None).table.to_text().replace('"num_warps": 4', '"num_warps": 8')
    with launching_by(Table.from_text(text)):
        assert launched_by(record, tensors, 64) == expected  # by a binary of its own
    assert launched_by(record, tensors, 64) == expected
    assert [each.num_warps for each in launches] == [4, 8]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_seqlen": 64.0}, "max_seqlen must be an int"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "scale must be a number"),
        ({"fuse": ["auto"]}, "fuse must be one of"),
        ({"implementation": "tritan"}, "implementation must be one of"),
    ],
)
def test_equal_options_that_are_not_as_good_are_refused(record, options, error):
    tensors = inputs(64, packed=True, tokens=64)
    attend(tensors, 64, scale=0.5)
    options = {"max_seqlen": 64, "scale": 0.5, "implementation": "kernel"} | options
    with pytest.raises(ValueError, match=error):
        public_function(True)(*tensors, **options)


# From PyTorch's own forward_ad.py, when forward mode is first used.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_tangent_is_refused(record):
    tensors = inputs(64, packed=True)
    attend(tensors, 64)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attend((forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:]), 64)


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("kind", ["dtype", "shape", "strides"])
def test_a_tensor_of_another_form_is_refused(record, kind, i):
    tensors = inputs(64, packed=False, tokens=64)
    attend(tensors, 64)
    x = tensors[i]
    wrong = {
        "dtype": lambda: x.to(torch.float64),
        "shape": lambda: x[None],
        "strides": lambda: x.repeat_interleave(2, -1)[..., ::2],
    }
    record.clear()
    with pytest.raises((TypeError, ValueError)):
        attend((*tensors[:i], wrong[kind](), *tensors[i + 1 :]), 64)
    assert record == []


@pytest.mark.parametrize(
    "options", [{"max_seqlen": np.int64(64)}, {"max_seqlen": None}, {"scale": 1}]
)
def test_calls_that_are_not_looked_up_go_unseen_too(record, monkeypatch, options):
    """They need not pass PyTorch's dispatcher, which has functions of its own."""
    seen, attend_directly = [], attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *rest: seen.append(rest) or attend_directly(*rest)
    )
    for _ in range(2):
        public_function(True)(
            *inputs(64, packed=True), implementation="kernel", **{"max_seqlen": 64} | options
        )
    assert len(seen) == len(record) == 2


def test_calls_are_remembered_however_many_there_were(record, monkeypatch):
    checked = []
    monkeypatch.setattr(
        "triton_kernels.attend.check_arguments",
        lambda *rest, **also: checked.append(rest) or check_arguments(*rest, **also),
    )
    monkeypatch.setattr(fast_path.Plans, "MOST", 6)
    *tensors, cu_seqlens = inputs(8, packed=True, tokens=16)
    for tokens in range(1, 6):
        arguments = (*(x[:tokens] for x in tensors), cu_seqlens)
        for _ in range(2):
            attend(arguments, 8)
        assert len(checked) == tokens
        assert len(fast_path.plans) <= 6


def test_a_bound_that_is_read_is_read_in_every_call(record):
    """Calls of one form, whose segments alone differ."""
    *tensors, _ = inputs(64, packed=True)
    found = []
    for starts in ([0, 64, 128], [0, 1000, 1024], [0, 64, 128]):
        record.clear()
        attend([*tensors, torch.tensor(starts, dtype=torch.int32)], None, fuse="none")
        found.append(record[-1][0])
    assert found == ["window_kernel", "stream_kernel", "window_kernel"]
