"""triton_kernels as PyTorch operators: opcheck, torch.compile, fake tensors, CUDA graphs."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_kernels
from tests.kernel_cases import make_case
from tests.triton_kernels.adapter import DEVICE, public_function, to_torch
from triton_kernels.launching import fast_path
from triton_kernels.launching.backward import needs_lse

both_forms = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
# PyTorch warns of the empty graph that keeps a pool alive, and of one whose capture was given up.
EMPTY_GRAPH = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")


def arguments_of(packed, lengths=(5, 9), requires_grad=False, dtype="float32"):
    case = make_case(lengths, head_dim=16, dtype=dtype, trailing=2)
    *tensors, cu_seqlens = map(to_torch, case.packed if packed else case.separate)
    return [*(x.requires_grad_(requires_grad) for x in tensors), cu_seqlens]


@both_forms
@pytest.mark.parametrize(
    ("implementation", "requires_grad"),
    [("reference", True), ("kernel", True), ("kernel", False)],
)
def test_operators_are_registered_as_pytorch_asks(packed, requires_grad, implementation):
    operator = getattr(torch.ops.fused_rope_attention, "qkvpacked" if packed else "varlen")
    arguments = arguments_of(packed, requires_grad=requires_grad)
    torch.library.opcheck(operator.default, (*arguments, 16, 0.25, "auto", implementation, False))


@both_forms
def test_operators_that_keep_log_sum_exps_are_registered_as_pytorch_asks(packed):
    name = "qkvpacked_with_lse" if packed else "varlen_with_lse"
    operator = getattr(torch.ops.fused_rope_attention, name)
    *tensors, cu_seqlens = arguments_of(packed)
    for x in tensors[:-2]:
        x.requires_grad_()
    options = 33, 0.25, "auto", "kernel", False
    torch.library.opcheck(operator.default, (*tensors, cu_seqlens, *options))


@both_forms
@pytest.mark.parametrize(
    ("implementation", "long"), [("reference", False), ("kernel", False), ("kernel", True)]
)
def test_the_backward_operator_is_registered_as_pytorch_asks(packed, implementation, long):
    *tensors, cu_seqlens = arguments_of(packed)
    *qkv, cos, sin = tensors
    qkv = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv]  # dense, but tokens inside
    grad = torch.ones_like(tensors[0][:, 0] if packed else tensors[0])
    needed = [True] * len(qkv) + [implementation == "reference"] * 2
    tokens, heads = grad.shape[:2]
    kept = [torch.ones_like(grad), torch.zeros(heads, tokens, device=grad.device)] if long else []
    options = 33 if long else 16, 0.25, implementation, needed
    arguments = (grad, [*qkv, cos, sin], cu_seqlens, kept, *options)
    name = "backward" if packed == long else "backward_waiting"
    operator = getattr(torch.ops.fused_rope_attention, name)
    torch.library.opcheck(operator.default, arguments)


def grouped_and_normed(requires_grad=False):
    """Arguments as of the operator: tensors, and norms."""
    case = make_case((5, 9), head_dim=16, dtype="float32", heads=4, group=2, norms="qk")
    *tensors, cu_seqlens = map(to_torch, case.separate)
    norms = [to_torch(x) for x in case.norms.values()]
    for x in (*tensors, *norms):
        x.requires_grad_(requires_grad)
    return [*tensors, cu_seqlens], norms


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
def test_operators_of_groups_and_norms(implementation):
    operators = torch.ops.fused_rope_attention
    tensors, norms = grouped_and_normed(requires_grad=True)
    options = 16, 0.25, "auto", implementation, False
    torch.library.opcheck(operators.varlen.default, (*tensors, *options, *norms, 1e-3))
    tensors, norms = grouped_and_normed()
    *tensors, cu_seqlens = tensors
    needed = [True] * 3 + [implementation == "reference"] * 2 + [True] * 2
    arguments = torch.ones_like(tensors[0]), [*tensors, *norms], cu_seqlens, [], 16, 0.25
    arguments = *arguments, implementation, needed, "qk", 1e-3
    torch.library.opcheck(operators.backward.default, arguments)


def sinusoidal(embed, head_dim=16, requires_grad=False):
    """Tensors as the operator takes them, by tables or positions."""
    case = make_case((5, 9), head_dim=head_dim, dtype="float32", embed=embed, trailing=2, heads=1)
    *tensors, cu_seqlens = map(to_torch, case.packed)
    tensors = [x.requires_grad_(requires_grad) for x in tensors]
    if embed == "positions":
        tensors[1:] = [to_torch(case.positions)] * 2
    return [*tensors, cu_seqlens]


@pytest.mark.parametrize("embed", ["sinusoidal", "positions"])
def test_operators_of_sinusoidal_embeddings(embed):
    operators = torch.ops.fused_rope_attention
    tensors = sinusoidal(embed, requires_grad=True)
    options = 16, 0.25, "auto", "kernel", False
    torch.library.opcheck(operators.qkvpacked.default, (*tensors, *options), {"embed": embed})


@pytest.mark.parametrize(("embed", "head_dim"), [("sinusoidal", 16), ("positions", 264)])
def test_a_compiled_call_of_sinusoidal_embeddings_and_its_gradients(embed, head_dim):
    *tensors, cu_seqlens = sinusoidal(embed, head_dim, requires_grad=True)

    def loss(qkv, cos, sin, implementation="kernel"):
        further = {"positions": cos} if embed == "positions" else {}
        tables = (None, None) if further else (cos, sin)
        options = {"max_seqlen": 16, "implementation": implementation} | further
        out = triton_kernels.fused_sinusoidal_attention_qkvpacked(
            qkv, *tables, cu_seqlens, **options
        )
        return out.square().sum()

    expected = loss(*tensors, "reference")
    wanted = [x for x in tensors if x.requires_grad]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=0)
    found, right = (torch.autograd.grad(x, wanted) for x in (compiled, expected))
    for x, y in zip(found, right, strict=True):  # of a relative RMS of at most 1e-5
        assert (x - y).norm() <= 1e-5 * y.norm()


def attend(packed, *arguments, **options):
    options = {"max_seqlen": 16, "implementation": "kernel", **options}
    return public_function(packed)(*arguments, **options)


@both_forms
def test_compiles_without_a_graph_break(packed):
    def layer(*arguments):
        return attend(packed, *arguments) * 2 + 1

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    arguments = arguments_of(packed)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("bound", [lambda tokens: 16, lambda tokens: tokens], ids=["16", "tokens"])
def test_compiles_once_for_any_number_of_tokens(bound):
    def layer(*x):
        return attend(True, *x, max_seqlen=bound(len(x[0])))

    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    # Not 2 segments first: PyTorch would take the 3 values of cu_seqlens for the 3 of qkv.
    for lengths in ((5, 9, 1), (7, 0, 8, 16), (1, 2, 3, 4, 0)):
        arguments = arguments_of(True, lengths)
        torch.testing.assert_close(compiled(*arguments), layer(*arguments), rtol=0, atol=0)
    assert backend.frame_count == 1


class OfKept(torch.nn.Module):
    """Attention within segments, of which empty ones are dropped, of the tokens that are kept."""

    def forward(self, kept, *arguments):
        *tensors, cu_seqlens = arguments
        tensors = [x[kept.nonzero()[:, 0]] for x in tensors]
        return attend(True, *tensors, torch.unique_consecutive(cu_seqlens))


def inputs_of_kept(lengths):
    kept = torch.arange(sum(lengths) + 2, device=DEVICE) < sum(lengths)
    return kept, *arguments_of(True, lengths)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiles_once_whatever_sizes_the_values_decide():
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OfKept(), fullgraph=True, backend=backend, dynamic=True)
    for lengths in ((5, 9, 1), (7, 0, 8), (0, 0, 16)):
        inputs = inputs_of_kept(lengths)
        torch.testing.assert_close(compiled(*inputs), OfKept()(*inputs), rtol=0, atol=0)
    assert backend.frame_count == 1


class BoundOfValues(torch.nn.Module):
    """Attention whose bound on a segment's length is read from cu_seqlens."""

    def forward(self, *arguments):
        return attend(True, *arguments, max_seqlen=arguments[-1].diff().max().item())


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiles_and_exports_with_a_bound_that_the_values_decide():
    torch.compiler.reset()
    compiled = torch.compile(BoundOfValues(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(BoundOfValues(), tuple(arguments_of(True))).module()
    for lengths in ((5, 9), (12, 2)):
        arguments = arguments_of(True, lengths)
        expected = attend(True, *arguments)
        for function in (compiled, exported):
            torch.testing.assert_close(function(*arguments), expected, rtol=0, atol=0)


@both_forms
def test_a_bound_beyond_pytorchs_integers(packed):
    arguments = arguments_of(packed, requires_grad=True)
    result = attend(packed, *arguments, max_seqlen=2**64)
    expected = attend(packed, *arguments_of(packed), max_seqlen=2**30)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_exports_whatever_sizes_the_values_decide():
    exported = torch.export.export(OfKept(), inputs_of_kept((5, 9, 1, 3)))
    other = inputs_of_kept((4, 0, 0, 14))
    torch.testing.assert_close(exported.module()(*other), OfKept()(*other), rtol=0, atol=0)


@both_forms
@pytest.mark.parametrize("strict", [False, True])
def test_exports_for_any_number_of_tokens(packed, strict):
    class Layer(torch.nn.Module):
        def forward(self, *x):
            return attend(packed, *x, max_seqlen=x[0].shape[0])

    first, second = (tuple(arguments_of(packed, n)) for n in ((5, 9, 1), (7, 8, 16)))
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    shapes = (*({0: tokens} for _ in first[:-1]), None)
    exported = torch.export.export(Layer(), first, dynamic_shapes={"x": shapes}, strict=strict)
    ours, expected = exported.module()(*second), Layer()(*second)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@both_forms
def test_gradients_through_a_compiled_call(packed):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: attend(packed, *x).square().sum(), fullgraph=True, backend="aot_eager"
    )
    gradients = []
    for function in (compiled, lambda *x: attend(packed, *x).square().sum()):
        arguments = arguments_of(packed, requires_grad=True)
        function(*arguments).backward()
        gradients.append([x.grad for x in arguments[:-1]])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_a_compiled_call_of_groups_and_norms():
    torch.compiler.reset()

    def loss(q_norm, k_norm, *x):
        return attend(False, *x, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-3).square().sum()

    gradients = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        tensors, norms = grouped_and_normed(requires_grad=True)
        function(*norms, *tensors).backward()
        gradients.append([x.grad for x in (*tensors[:-1], *norms)])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@both_forms
def test_fake_tensors_tell_shape_dtype_and_layout(packed):
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(x) for x in arguments_of(packed, dtype="bfloat16")]
        result = attend(packed, *arguments, max_seqlen=None)
    real = attend(packed, *arguments_of(packed, dtype="bfloat16"))
    assert (result.shape, result.dtype, result.device) == (real.shape, real.dtype, real.device)
    assert result.stride() == real.stride()


# By mode="reduce-overhead" for instance: in a capture nothing may wait for the GPU.
@both_forms
@pytest.mark.parametrize(
    ("options", "angles", "waits"),
    [
        ({"max_seqlen": 16}, False, (False, False)),
        ({"max_seqlen": 16}, True, (False, True)),
        ({"max_seqlen": 4096}, False, (False, False)),
        ({"max_seqlen": 4096}, True, (False, True)),
        ({"max_seqlen": None}, False, (True, True)),
        ({"max_seqlen": 16, "implementation": "reference"}, False, (True, True)),
    ],
)
def test_a_compiler_is_told_what_no_cuda_graph_can_hold(packed, options, angles, waits):
    torch.compiler.reset()
    found = []

    def collect(graph, _):
        operators = [n.target for n in graph.graph.nodes if "fused_rope" in str(n.target)]
        found.extend(operators)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    *arguments, cos, sin, cu_seqlens = arguments_of(packed, requires_grad=True)
    angles = [x.requires_grad_(angles) for x in (cos, sin)]
    compiled = torch.compile(lambda *x: attend(packed, *x, **options), backend=backend)
    compiled(*arguments, *angles, cu_seqlens).sum().backward()
    assert tuple(torch.Tag.cudagraph_unsafe in operator.tags for operator in found) == waits


@both_forms
def test_a_compiled_call_keeps_what_its_backward_pass_needs(packed):
    """Of long segments, whatever bound was compiled before; else they are attended to twice."""
    torch.compiler.reset()
    found = []

    def collect(graph, _):
        found.extend(n.name for n in graph.graph.nodes if "fused_rope" in str(n.target))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=collect, bw_compiler=lambda graph, _: make_boxed_func(graph))
    layer = lambda bound, *x: attend(packed, *x, max_seqlen=bound)  # noqa: E731
    compiled = torch.compile(layer, backend=backend)
    *qkv, cos, sin, cu_seqlens = arguments_of(packed)
    for bound in (16, 4096, 8192):
        qkv = [x.detach().requires_grad_() for x in qkv]
        compiled(bound, *qkv, cos, sin, cu_seqlens).sum().backward()
    name = "qkvpacked" if packed else "varlen"
    assert found == [name, f"{name}_with_lse"]


def test_what_a_compiler_traces_is_not_cached():
    """Dynamo warns of cached functions, once in a process, and warnings are errors here."""
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    choose = lambda x: x if needs_lse(torch.bfloat16, 80, 4096) else -x  # noqa: E731
    assert torch.compile(choose, backend="eager", fullgraph=True)(torch.ones(1)) == 1


@EMPTY_GRAPH
@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("max_seqlen", [None, 16, 4096])
def test_reduced_overhead(packed, max_seqlen):
    torch.compiler.reset()

    def loss(*x):
        return attend(packed, *x, max_seqlen=max_seqlen).square().sum()

    compiled = torch.compile(loss, mode="reduce-overhead")
    for _ in range(4):  # warmed up, captured, replayed
        gradients = []
        for function in (compiled, loss):
            arguments = arguments_of(packed, requires_grad=True)
            function(*arguments).backward()
            gradients.append([x.grad for x in arguments[:-1]])
        for ours, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), loss(*arguments))


@EMPTY_GRAPH
@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize(
    "options", [{"max_seqlen": None}, {"max_seqlen": 16, "implementation": "reference"}]
)
def test_a_capture_of_what_waits_ends_in_one_sentence(packed, options):
    arguments = arguments_of(packed)
    graph = torch.cuda.CUDAGraph()
    message = "waits for the GPU: no CUDA graph can be captured of it"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        attend(packed, *arguments, **options)


@both_forms
@pytest.mark.parametrize("requires_grad", [False, True])
def test_meta_tensors_tell_shape_and_dtype(packed, requires_grad):
    arguments = [
        x.detach().to("meta").requires_grad_(requires_grad and x.is_floating_point())
        for x in arguments_of(packed, dtype="bfloat16")
    ]
    result = attend(packed, *arguments, implementation="auto")
    assert (result.shape, result.dtype) == ((16, *arguments[0].shape[-2:]), torch.bfloat16)
    assert result.is_meta


def test_the_kernel_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr("triton_kernels.attend.INTERPRETED", False)
    fast_path.plans.clear()  # what an interpreted call was planned to launch
    arguments = [x.cpu() for x in arguments_of(True)]
    with pytest.raises(ValueError, match=r"needs tensors on a CUDA GPU .*TRITON_INTERPRET.* cpu"):
        attend(True, *arguments)


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_compiles_with_inductor(packed, max_seqlen):
    def layer(*arguments):
        return attend(packed, *arguments, max_seqlen=max_seqlen).float().square().mean()

    torch.compiler.reset()
    arguments = arguments_of(packed, dtype="bfloat16")
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("fuse", ["qk", "none"])
@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_cuda_graph_capture(packed, fuse, max_seqlen):
    options = {"max_seqlen": max_seqlen, "fuse": fuse}
    first, second = arguments_of(packed, (5, 9, 3)), arguments_of(packed, (9, 5, 3))
    held = [x.clone() for x in first]
    stream = torch.cuda.Stream()  # warm up where the graph is captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(packed, *held, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(packed, *held, **options)
    for arguments in (second, first):
        for x, y in zip(held, arguments, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(result, attend(packed, *arguments, **options))


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    arguments = arguments_of(True, dtype="bfloat16")
    expected = attend(True, *arguments)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # longer than any launch: a kernel elsewhere would not wait
        late = [torch.zeros_like(x).copy_(x) for x in arguments]
        result = attend(True, *late)
    stream.synchronize()
    assert torch.equal(result, expected)


def test_auto_is_the_kernel_on_a_gpu_and_else_the_reference():
    arguments = arguments_of(True, dtype="bfloat16")
    expected = attend(
        True, *arguments, implementation="kernel" if DEVICE == "cuda" else "reference"
    )
    assert torch.equal(attend(True, *arguments, implementation="auto"), expected)
