"""The operation in ONNX: one node of what `export` makes of a model."""

from collections.abc import Iterator
from typing import Any

import torch

from triton_kernels.checks import NORM_EPS

# Of ONNX' own operators.
_OPSET = 18
_DOMAIN = "fused_rope_attention"


def export(model: torch.nn.Module, args: tuple[Any, ...], **options: Any) -> torch.onnx.ONNXProgram:
    """`torch.onnx.export` of a model that calls the operation; needs onnxscript.

    Each call is a node `fused_rope_attention::qkvpacked` or `varlen`, of which a runtime may have a
    kernel; its attribute is `scale`. Norms of heads are ONNX' own operators in front of it, and a
    head of k and v that serves several of q is repeated there. For others the model holds it as a
    function of ONNX' own operators: these take memory for tokens x tokens logits of each head,
    attend over segments of any length, and want cu_seqlens that do not decrease.

    Args:
        model, args: as of `torch.onnx.export`.
        options: further ones of it, but for `dynamo`, `opset_version` and
            `custom_translation_table`.

    Raises:
        ImportError: onnxscript is missing.
    """
    import onnx_ir

    operators = torch.ops.fused_rope_attention
    table = {
        operators.qkvpacked.default: _qkvpacked,
        operators.varlen.default: _varlen,
    }
    program = torch.onnx.export(
        model, args, dynamo=True, opset_version=_OPSET, custom_translation_table=table, **options
    )
    if any(node.domain == _DOMAIN for node in program.model.graph):
        for function in _functions():
            made = onnx_ir.from_proto(function.to_function_proto())
            program.model.functions[made.identifier()] = made
    return program


def _check_rotates(embed: str) -> None:
    if embed != "rope":
        raise ValueError(f"only rotary embeddings can be exported to ONNX, got {embed!r}")


def _qkvpacked(*arguments: Any, embed: str = "rope") -> Any:
    """What stands for a call of the packed operator."""
    _check_rotates(embed)
    qkv, cos, sin, cu_seqlens, _, scale, *options = arguments
    norms = options[3:]  # as many as are not the defaults
    if not norms:
        return _node("qkvpacked", 4)(qkv, cos, sin, cu_seqlens, scale=scale)
    from onnxscript import opset18 as op

    q, k, v = (op.Gather(qkv, op.Constant(value_int=part), axis=1) for part in range(3))
    return _node("varlen", 6)(*_normalized(q, k, *norms), v, cos, sin, cu_seqlens, scale=scale)


def _varlen(*arguments: Any, embed: str = "rope") -> Any:
    """The same of the other."""
    _check_rotates(embed)
    q, k, v, cos, sin, cu_seqlens, _, scale, _, _, _, *norms = arguments
    heads, k_heads = q.shape[1], k.shape[1]
    q, k = _normalized(q, k, *norms)
    if heads != k_heads:
        from onnxscript import opset18 as op

        served_by = op.Constant(value_ints=[i * k_heads // heads for i in range(heads)])
        k, v = op.Gather(k, served_by, axis=1), op.Gather(v, served_by, axis=1)
    return _node("varlen", 6)(q, k, v, cos, sin, cu_seqlens, scale=scale)


def _normalized(
    q: Any, k: Any, q_norm: Any = None, k_norm: Any = None, eps: float = NORM_EPS
) -> Iterator[Any]:
    """q and k, the heads of each normalised if there is a weight."""
    from onnxscript import FLOAT
    from onnxscript import opset18 as op

    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is None:
            yield x
            continue
        wide = op.Cast(x, to=FLOAT.dtype)
        mean = op.ReduceMean(op.Mul(wide, wide), op.Constant(value_ints=[-1]), keepdims=1)
        rms = op.Sqrt(op.Add(mean, op.Constant(value_float=eps)))
        y = op.Mul(op.Div(wide, rms), op.Cast(weight, to=FLOAT.dtype))
        yield op.CastLike(y, x)


def _node(name: str, inputs: int) -> Any:
    """What makes a node of the operation, which ONNX' exporter wants to know the types of."""
    import onnxscript
    from onnx.defs import OpSchema

    types = ["q"] * (inputs - 3) + ["angles", "angles", "bounds"]
    schema = OpSchema(
        name,
        _DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter(f"input{i}", kind) for i, kind in enumerate(types)],
        outputs=[OpSchema.FormalParameter("output", "q")],
        type_constraints=[
            ("q", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], ""),
            ("angles", ["tensor(float)"], ""),
            ("bounds", ["tensor(int32)"], ""),
        ],
        attributes=[OpSchema.Attribute("scale", OpSchema.AttrType.FLOAT, required=True)],
    )
    return onnxscript.values.Op(onnxscript.values.Opset(_DOMAIN, 1), name, schema)


def _functions() -> tuple[Any, Any]:
    """The nodes as the reference computes them, the second by the first."""
    from onnxscript import FLOAT, INT64, script
    from onnxscript import opset18 as op
    from onnxscript.values import Opset

    domain = Opset(_DOMAIN, 1)  # the types of arguments are the schema's

    @script(domain, default_opset=op)
    def qkvpacked(qkv, cos, sin, cu_seqlens, scale: float):  # noqa: ANN001, ANN202
        half = op.Shape(cos, start=1)
        zero = op.Constant(value_ints=[0])
        one = op.Constant(value_ints=[1])
        last = op.Constant(value_ints=[3])
        # Rotated: q and k, in fp32.
        wide = op.Cast(qkv, to=FLOAT.dtype)
        c = op.Unsqueeze(cos, op.Constant(value_ints=[1, 2]))
        s = op.Unsqueeze(sin, op.Constant(value_ints=[1, 2]))
        x1 = op.Slice(wide, zero, half, last)
        x2 = op.Slice(wide, half, half + half, last)
        rest = op.Slice(wide, half + half, op.Shape(qkv, start=3), last)
        rotated = op.Concat(x1 * c - x2 * s, x2 * c + x1 * s, rest, axis=3)
        rounded = op.Cast(op.CastLike(rotated, qkv), to=FLOAT.dtype)
        # Now the heads before the tokens.
        rounded = op.Transpose(rounded, perm=[1, 2, 0, 3])
        q = op.Squeeze(op.Slice(rounded, zero, one, zero), zero)
        k = op.Squeeze(op.Slice(rounded, one, one + one, zero), zero)
        v = op.Gather(op.Transpose(wide, perm=[1, 2, 0, 3]), op.Constant(value_int=2), axis=0)
        # Which segment a token is in, from 1; 0 or past the last: in none.
        tokens = op.Squeeze(op.Shape(qkv, end=1))
        row = op.Range(op.Constant(value_int=0), tokens, op.Constant(value_int=1))
        begun = op.LessOrEqual(
            op.Unsqueeze(op.Cast(cu_seqlens, to=INT64.dtype), zero), op.Unsqueeze(row, one)
        )
        segment = op.ReduceSum(op.Cast(begun, to=INT64.dtype), one, keepdims=0)
        same = op.Equal(op.Unsqueeze(segment, one), op.Unsqueeze(segment, zero))
        none = op.Or(
            op.Equal(segment, op.Constant(value_int=0)), op.Equal(segment, op.Shape(cu_seqlens))
        )
        logits = op.MatMul(q, op.Transpose(k, perm=[0, 2, 1])) * scale
        masked = op.Where(same, logits, op.Constant(value_float=-3.0e38))
        p = op.Cast(op.CastLike(op.Softmax(masked, axis=-1), qkv), to=FLOAT.dtype)
        attended = op.Where(op.Unsqueeze(none, one), op.Constant(value_float=0.0), op.MatMul(p, v))
        return op.CastLike(op.Transpose(attended, perm=[1, 0, 2]), qkv)

    @script(domain, default_opset=op)
    def varlen(q, k, v, cos, sin, cu_seqlens, scale: float):  # noqa: ANN001, ANN202
        one = op.Constant(value_ints=[1])
        qkv = op.Concat(op.Unsqueeze(q, one), op.Unsqueeze(k, one), op.Unsqueeze(v, one), axis=1)
        return qkvpacked(qkv, cos, sin, cu_seqlens, scale)

    return qkvpacked, varlen
