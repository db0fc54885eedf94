"""A call goes around PyTorch's dispatcher only where nobody would have seen it there."""

import contextlib
import threading
from typing import ClassVar

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernel_cases import make_case
from tests.triton_kernels.adapter import interpreted_nan, public_function, to_torch
from triton_kernels.launching.fast_path import goes_unseen

OPERATORS = {False: "fused_rope_attention.varlen", True: "fused_rope_attention.qkvpacked"}
both_forms = pytest.mark.parametrize("packed", OPERATORS, ids=["separate", "packed"])


def arguments_of(packed):
    case = make_case((5, 9), head_dim=16, dtype="float32", trailing=2)
    return [to_torch(x) for x in (case.packed if packed else case.separate)]


def attend(packed, *arguments):
    return public_function(packed)(*arguments, max_seqlen=16)


class Witness:
    """Notes what is called, in whichever mode it is told."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, called, types, args=(), kwargs=None):
        self.seen.append(str(called))
        return called(*args, **(kwargs or {}))


class DispatchWitness(Witness, TorchDispatchMode):
    __torch_dispatch__ = Witness.note


class FunctionWitness(Witness, TorchFunctionMode):
    __torch_function__ = Witness.note


@both_forms
@pytest.mark.parametrize("mode", [DispatchWitness, FunctionWitness])
def test_a_mode_sees_the_operator(mode, packed):
    with mode() as witness:
        attend(packed, *arguments_of(packed))
    assert f"{OPERATORS[packed]}.default" in witness.seen


@both_forms
def test_gradients_within_a_mode(packed):
    *tensors, cu_seqlens = arguments_of(packed)
    tensors = [x.requires_grad_() for x in tensors]

    def gradients():
        out = attend(packed, *tensors, cu_seqlens)
        first = torch.autograd.grad(out.square().sum(), tensors)
        with_graph = torch.autograd.grad(attend(packed, *tensors, cu_seqlens).sum(), tensors[0],
                                         create_graph=True)  # fmt: skip
        return [*first, *torch.autograd.grad(with_graph[0].square().sum(), tensors)]

    expected = gradients()
    with DispatchWitness() as witness:
        found = gradients()
    assert "fused_rope_attention.backward_waiting.default" in witness.seen
    assert all(map(torch.equal, found, expected))


@both_forms
@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_what_autograd_alone_sees_goes_around_the_operators(packed, max_seqlen):
    """To the same bits; what observes operators sees them, forward and backward."""
    *tensors, cu_seqlens = arguments_of(packed)
    qkv = [x.requires_grad_() for x in tensors[:-2]]
    options = {"max_seqlen": max_seqlen, "implementation": "kernel"}

    def gradients():
        out = public_function(packed)(*tensors, cu_seqlens, **options)
        assert ("Recorded" in out.grad_fn.name()) == (not isinstance(mode, DispatchWitness))
        return torch.autograd.grad(out.square().sum(), qkv)

    mode = contextlib.nullcontext()
    with interpreted_nan():
        found = gradients()
        with DispatchWitness() as mode:
            expected = gradients()
    assert "fused_rope_attention.backward.default" in mode.seen
    assert all(map(torch.equal, found, expected))


def unchanged(*arguments):
    return arguments


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda qkv, cos, sin, cu: (qkv[:, :2], cos, sin, cu), {}),
        (lambda qkv, cos, sin, cu: (qkv.double(), cos, sin, cu), {}),
        (lambda qkv, cos, sin, cu: (qkv[..., 0], cos, sin, cu), {}),
        (lambda qkv, cos, sin, cu: (qkv, cos[1:], sin, cu), {}),
        (lambda qkv, cos, sin, cu: (qkv, cos, sin, cu.long()), {}),
        (lambda qkv, cos, sin, cu: (qkv, cos, sin, cu.tolist()), {}),
        (unchanged, {"max_seqlen": -1}),
        (unchanged, {"scale": "1"}),
        (unchanged, {"fuse": "all"}),
        (unchanged, {"implementation": "another"}),
        (unchanged, {"batch_invariant": 2}),
    ],
)
def test_what_is_refused_is_refused_alike_where_gradients_are_recorded(change, options):
    *tensors, cu_seqlens = arguments_of(packed=True)
    options = {"max_seqlen": 16, "implementation": "kernel"} | options
    told = []
    for recorded in (False, True):
        qkv, *rest = change(tensors[0].requires_grad_(recorded), *tensors[1:], cu_seqlens)
        with pytest.raises((TypeError, ValueError)) as error:
            public_function(True)(qkv, *rest, **options)
        told.append((error.type, str(error.value)))
    assert told[0] == told[1]


@both_forms
def test_a_trace_holds_the_operator(packed):
    arguments = arguments_of(packed)
    traced = make_fx(lambda *x: attend(packed, *x))(*arguments)
    assert f"{OPERATORS[packed]}.default" in [str(node.target) for node in traced.graph.nodes]
    other = [x.flip(-1) if x.is_floating_point() else x for x in arguments]
    assert torch.equal(traced(*other), attend(packed, *other))


@both_forms
def test_a_profile_names_the_operator(packed):
    # The one without Kineto, which would keep the GPU from JAX's profiler as long as the process
    # lives, whatever it is asked to leave out.
    with profiler_legacy.profile() as profile:
        attend(packed, *arguments_of(packed))
    names = [event.key for event in profile.key_averages()]
    assert OPERATORS[packed].replace(".", "::") in names


@both_forms
def test_each_input_alone_gets_its_gradient(packed):
    *tensors, cu_seqlens = arguments_of(packed)
    for x in tensors:
        x.requires_grad_()
        attend(packed, *tensors, cu_seqlens).sum().backward()
        assert x.grad is not None
        x.requires_grad_(False)


def test_without_derivatives_a_plain_call_goes_unseen():
    tensors = [torch.ones(2, requires_grad=grad) for grad in (False, True)]
    found = {}
    for name, context in {
        "nothing": contextlib.nullcontext(),
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
    }.items():
        with context:
            found[name] = [goes_unseen([x]) for x in tensors]
    assert found == {"nothing": [True, False], "no_grad": [True] * 2, "inference_mode": [True] * 2}


def test_a_lazy_negation_is_no_plain_call():
    """Memory holds the opposite of such a tensor's values."""
    *tensors, cu_seqlens = arguments_of(packed=False)
    options = {"max_seqlen": 16, "implementation": "kernel"}
    expected = public_function(False)(*tensors, cu_seqlens, **options)
    for i, x in enumerate(tensors):
        lazy = [*tensors[:i], (-x)._neg_view(), *tensors[i + 1 :]]
        assert torch.equal(public_function(False)(*lazy, cu_seqlens, **options), expected)


def test_it_goes_unseen_on_another_thread_than_a_mode_is_on():
    found = []
    with DispatchWitness():
        thread = threading.Thread(target=lambda: found.append(goes_unseen([torch.ones(2)])))
        thread.start()
        thread.join()
        assert not goes_unseen([torch.ones(2)])
    assert found == [True]


class Wrapper(torch.Tensor):
    """A subclass that holds another tensor and notes which operators meet it."""

    seen: ClassVar = []

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, called, types, args=(), kwargs=None):
        cls.seen.append(str(called))
        return called(*(x.held if isinstance(x, cls) else x for x in args), **(kwargs or {}))


@both_forms
def test_any_tensor_of_a_subclass_has_the_operator_seen(packed, monkeypatch):
    arguments = arguments_of(packed)
    expected = attend(packed, *arguments)
    for i, x in enumerate(arguments):
        monkeypatch.setattr(Wrapper, "seen", [])
        with torch.no_grad():
            out = attend(packed, *arguments[:i], Wrapper(x), *arguments[i + 1 :])
        assert Wrapper.seen == [f"{OPERATORS[packed]}.default"]
        assert torch.equal(out, expected)
