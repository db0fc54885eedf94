"""The operation on a GPU that is not PyTorch's current one."""

import pytest
import torch

from tests.kernel_cases import make_case
from tests.kernel_contract import LENGTHS, STREAM, WINDOW
from tests.triton_kernels.adapter import public_function, to_torch

pytestmark = pytest.mark.gpu(2)

both_forms = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
every_kernel = pytest.mark.parametrize(
    "options",
    [
        {"max_seqlen": WINDOW},
        {"max_seqlen": STREAM, "fuse": "qk"},
        {"max_seqlen": STREAM, "fuse": "none"},
        {"max_seqlen": None},
        {"implementation": "reference"},
    ],
    ids=["window", "rotating stream", "stream", "bound not given", "reference"],
)


def arguments_on_each(packed, dtype="bfloat16"):
    case = make_case(LENGTHS, dtype=dtype, trailing=3)
    tensors = list(map(to_torch, case.packed if packed else case.separate))
    return [[x.to(f"cuda:{index}") for x in tensors] for index in (0, 1)]


@both_forms
@every_kernel
def test_a_call_runs_where_its_tensors_are(packed, options):
    attend = public_function(packed)
    expected, *results = [
        attend(*arguments, **options)
        for arguments in arguments_on_each(packed)
        for _ in range(2)  # the second call launches what the first one compiled
    ]
    for result, index in zip(results, (0, 1, 1), strict=True):
        assert result.device == torch.device("cuda", index)
        assert torch.equal(result.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


@both_forms
def test_a_call_is_queued_on_the_current_stream_of_its_device(packed):
    attend = public_function(packed)
    expected, result = (
        attend(*arguments, max_seqlen=WINDOW) for arguments in arguments_on_each(packed)
    )
    _, arguments = arguments_on_each(packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph):
        recorded = attend(*arguments, max_seqlen=WINDOW)
    graph.replay()
    for found in (result, recorded):
        assert torch.equal(found.cpu(), expected.cpu())


@both_forms
def test_compiled_calls_and_gradients(packed):
    attend = torch.compile(public_function(packed), fullgraph=True, backend="aot_eager")
    found = []
    for *tensors, cu_seqlens in arguments_on_each(packed, "float32"):
        tensors = [x.requires_grad_() for x in tensors]
        out = attend(*tensors, cu_seqlens, max_seqlen=WINDOW)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in tensors)])
        assert {x.device for x in found[-1]} == {cu_seqlens.device}
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)


@both_forms
def test_tensors_of_two_gpus_are_refused(packed):
    first, second = arguments_on_each(packed)
    for index in range(1, len(first)):
        mixed = [*first[:index], second[index], *first[index + 1 :]]
        with pytest.raises(ValueError, match=r"must be on cuda:0.*got cuda:1"):
            public_function(packed)(*mixed, max_seqlen=WINDOW)
