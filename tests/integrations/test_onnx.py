"""The operation in ONNX, computed by a runtime that has no kernel of it."""

import numpy as np
import pytest
import torch

import triton_kernels
from tests.kernel_cases import assert_accurate, make_case

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from triton_kernels.integrations.onnx import export  # noqa: E402

# From Python's copyreg on a class of PyTorch's that is to go.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)


class Packed(torch.nn.Module):
    def forward(self, *arguments):
        return triton_kernels.fused_rope_attention_qkvpacked(*arguments, max_seqlen=16)


class Separate(torch.nn.Module):
    def forward(self, *arguments):
        return triton_kernels.fused_rope_attention(*arguments, max_seqlen=16)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rotary_dim", [None, 10])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_runtime_without_a_kernel_computes_it(dtype, rotary_dim, packed, tmp_path):
    case = make_case(
        (16, 0, 5, 1), head_dim=24, rotary_dim=rotary_dim, dtype=dtype, leading=2, trailing=3
    )
    arrays = case.packed if packed else case.separate
    # Memory of its own for each: exported as it lies, K is no part of a packed tensor.
    tensors = tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)
    module = (Packed() if packed else Separate()).eval()
    program = export(module, tensors, verbose=False)
    assert [node.op_type for node in program.model.graph] == ["qkvpacked" if packed else "varlen"]
    program.save(tmp_path / "call.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "call.onnx")
    names = [argument.name for argument in session.get_inputs()]
    [result] = session.run(None, dict(zip(names, map(torch.Tensor.numpy, tensors), strict=True)))
    assert_accurate(result, case)


class Normed(torch.nn.Module):
    def __init__(self, norms):
        super().__init__()
        for name, x in norms.items():
            self.register_buffer(name, torch.from_numpy(x))

    def forward(self, *arguments):
        function = "fused_rope_attention" + "_qkvpacked" * (len(arguments) == 4)
        norms = dict(self.named_buffers())
        return getattr(triton_kernels, function)(*arguments, max_seqlen=16, **norms)


@pytest.mark.parametrize("further", [{"group": 2}, {"norms": "k"}, {"group": 2, "norms": "qk"}])
def test_groups_and_norms(further, tmp_path):
    case = make_case((16, 0, 5), head_dim=24, dtype="float16", heads=4, trailing=3, **further)
    tensors = tuple(map(torch.from_numpy, case.separate if case.group > 1 else case.packed))
    program = export(Normed(case.norms).eval(), tensors, verbose=False)
    assert program.model.graph[-1].op_type == "varlen"
    program.save(tmp_path / "call.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "call.onnx")
    names = [argument.name for argument in session.get_inputs()]
    [result] = session.run(None, dict(zip(names, map(torch.Tensor.numpy, tensors), strict=True)))
    assert_accurate(result, case)


def test_a_model_without_the_operation():
    program = export(torch.nn.Linear(2, 3).eval(), (torch.zeros(1, 2),), verbose=False)
    assert not program.model.functions
