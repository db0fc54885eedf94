"""The PyTorch side of the contract suites: NumPy in, NumPy out, on the GPU if there is one."""

import functools

import ml_dtypes
import numpy as np
import torch

import triton_kernels
from compare.stress.guards import guarded, guarded_results, intact, same_bits
from tests.kernel_cases import log_sum_exps
from triton_kernels.launching.choose import launch_source

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_torch(x):
    """A tensor on DEVICE; PyTorch takes no bfloat16 from NumPy, so it travels as integers."""
    x = np.array(x, order="C")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x).to(DEVICE)


def to_numpy(x):
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def assert_log_sum_exps(case, max_seqlen, **options):
    """Those that a forward pass keeps, and that its result has the same bits with and without."""
    scale, options = (
        case.qkv.shape[-1] ** -0.5,
        {"fuse": "auto", "batch_invariant": False} | options,
    )
    arguments = *map(to_torch, case.packed), max_seqlen, scale, options["fuse"], "kernel"
    operators = torch.ops.fused_rope_attention
    with interpreted_nan():
        out, found = operators.qkvpacked_with_lse(*arguments, options["batch_invariant"])
        without = operators.qkvpacked(*arguments, options["batch_invariant"])
    np.testing.assert_allclose(to_numpy(found), log_sum_exps(case), rtol=1e-3, atol=1e-2)
    assert same_bits(out, without)


def interpreted_nan():
    """Triton's interpreter computes in NumPy, which warns of a NaN that a GPU passes in silence."""
    return np.errstate(all="ignore")


def public_function(packed, embedding="rope"):
    form = "_qkvpacked" if packed else ""
    return getattr(triton_kernels, f"fused_{embedding}_attention{form}")


class TorchAdapter:
    implementation: str
    package = triton_kernels
    source = (launch_source(None),)
    array = staticmethod(to_torch)

    def attention(self, case, packed=False, alike=False, **options):
        """A call with NaN around every input, and in and around every result beforehand.

        On a GPU two, as what the first launched is looked up for the second. Where cu_seqlens
        decreases, programs write the same rows, and they need not come out alike.

        alike: programs of one computation are to round alike, which these always do.
        """
        *tensors, cu_seqlens = map(to_torch, case.packed if packed else case.separate)
        inputs = [guarded(x) for x in (*tensors, *map(to_torch, case.norms.values()))]
        function = public_function(packed, "sinusoidal" if case.is_sinusoidal else "rope")
        if case.positions is not None:
            positions, _ = guarded(to_torch(case.positions), value=-1)
            function = functools.partial(function, positions=positions)
        norms = dict(zip(case.norms, (x for x, _ in inputs[len(tensors) :]), strict=True))
        arguments = [x for x, _ in inputs[: len(tensors)]]
        if case.positions is not None:
            arguments[-2:] = None, None
        options = norms | {"implementation": self.implementation} | options
        held = [buffer.clone() for _, buffer in inputs]
        segments, _ = guarded(cu_seqlens, value=len(case.qkv) // 2)
        with guarded_results() as results, interpreted_nan():
            outs = [
                function(*arguments, segments, **options)
                for _ in range(2 if DEVICE == "cuda" else 1)
            ]
        out = outs[-1]
        assert same_bits(outs[0], out) or (np.diff(case.cu_seqlens) < 0).any()
        for before, (_, buffer) in zip(held, inputs, strict=True):
            assert same_bits(before, buffer)
        assert all(map(intact, results))
        assert out.is_contiguous()
        return to_numpy(out)

    def check_cu_seqlens(self, cu_seqlens, *arguments):
        triton_kernels.check_cu_seqlens(to_torch(cu_seqlens), *arguments)
