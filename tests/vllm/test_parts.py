"""Parts of vLLM's towers as they are built and called, where a GPU may only be said to be there."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm import distributed, ir
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import activation
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm.platforms import current_platform

from tests.vllm import table
from tests.vllm.towers import Case, error
from triton_kernels.integrations import gelu
from triton_kernels.integrations import mlp as aligned
from triton_kernels.integrations import vllm as plugin


@pytest.fixture(scope="module")
def case(process, tmp_path_factory):
    return Case("Qwen2_5_VL", tmp_path_factory.mktemp("Qwen2_5_VL"))


@pytest.fixture
def hopper(lines, monkeypatch):
    """As on a GPU whose fast kernels refuse every width."""
    monkeypatch.setattr(plugin, "_unfit_process", lambda: None)
    monkeypatch.setattr(type(current_platform), "is_device_capability", lambda *_: True)
    monkeypatch.setattr(plugin, "is_misaligned", lambda *_: True)
    return lines


def test_all_code_of_this_version_is_known(hopper):
    plugin.register()
    assert not any("not known" in line or "failed" in line for line in hopper)


def test_the_table_has_this_version():
    version, folder = table.installed()
    assert table.read()[version][: len(plugin.PARTS)] == table.known(folder)


def test_an_unknown_version_is_left_alone(case, hopper, monkeypatch):
    own = [cls.forward for cls in (qwen2_vl.Qwen2VisionAttention, qwen2_5_vl.Qwen2_5_VisionMLP)]
    monkeypatch.setattr(plugin, "FINGERPRINTS", dict.fromkeys(plugin.FINGERPRINTS, ()))
    before = case.run(case.build())
    plugin.register()
    assert sum("not known" in line for line in hopper) == len(plugin.FINGERPRINTS)
    assert own == [qwen2_vl.Qwen2VisionAttention.forward, qwen2_5_vl.Qwen2_5_VisionMLP.forward]
    assert torch.equal(case.run(case.build()), before)


@pytest.mark.parametrize("change", ["backend", "fp8"])
def test_an_attention_of_other_settings_is_left_to_vllm(case, lines, monkeypatch, change):
    plugin.register()
    before = case.run(case.build())
    inner = qwen2_5_vl.MMEncoderAttention
    own = inner.__init__

    def init(self, *arguments, **options):
        own(self, *arguments, **options)
        self._forward_method = self.forward_native  # a GPU's would call what is not installed
        if change == "fp8":
            self.fp8_enabled = True
        else:
            self.attn_backend = type(self.attn_backend).FLASHINFER

    monkeypatch.setattr(inner, "__init__", init)
    monkeypatch.setattr(plugin, "fused_rope_attention_qkvpacked", None)  # not to be called
    assert error(case.run(case.build()), before) < 1e-5
    assert any("leaves a Qwen2_5_VisionAttention to vLLM" in line for line in lines)


def test_norms_are_run_by_one_kernel_each(case, hopper, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "norm")
    before, counts = case.run(case.build()), []
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        own = op.impls["vllm_c"]
        run = own if own.supported else op.impls["native"]  # on a CPU

        def kernel(*arguments, op=op, run=run):
            counts.append(op.name)
            return run.impl_fn(*arguments)

        stand_in = types.SimpleNamespace(
            supported=True, supports_args=own.supports_args, impl_fn=kernel
        )
        monkeypatch.setitem(op.impls, "vllm_c", stand_in)
    plugin.register()
    tower = case.build()
    assert error(case.run(tower), before) < 1e-5
    assert [counts.count(op.name) for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)] == [4, 3]


@pytest.fixture(scope="module")
def qwen3(process, tmp_path_factory):
    return Case("Qwen3VL", tmp_path_factory.mktemp("Qwen3VL"))


def test_layer_norms_are_run_by_one_kernel_each(qwen3, hopper, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "norm")
    before, ran = qwen3.run(qwen3.build()), []

    def noted(norm, x):
        ran.append(norm)
        return run(norm, x)

    run = plugin.run_layer_norm
    monkeypatch.setattr(plugin, "run_layer_norm", noted)
    plugin.register()
    tower = qwen3.build()
    assert error(qwen3.run(tower), before) < 1e-5
    assert ran
    assert set(ran) == {m for m in tower.modules() if isinstance(m, nn.LayerNorm)}


def test_quick_gelus_are_run_by_one_kernel_each(process, tmp_path, hopper, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "mlp")
    qwen2, cls = Case("Qwen2VL", tmp_path), activation.QuickGELU
    before, ran, own = qwen2.run(qwen2.build()), [], cls.forward_cuda

    def noted(self, x):
        ran.append(self)
        return own(self, x)

    plugin.register()
    tower = qwen2.build()
    monkeypatch.setattr(cls, "forward_cuda", noted)
    assert error(qwen2.run(tower), before) < 1e-5
    assert set(ran) == {m for m in tower.modules() if isinstance(m, cls)}


def test_a_product_applies_its_gelu(qwen3, hopper, monkeypatch):
    own, ran = torch._addmm_activation, []

    def noted(*operands, use_gelu):
        ran.append(use_gelu)
        return own(*operands, use_gelu=use_gelu)

    monkeypatch.setattr(torch, "_addmm_activation", noted)
    monkeypatch.setattr(gelu, "runs_gelu", lambda _: True)
    plugin.register()
    device = current_platform.device_type
    with set_current_vllm_config(qwen3.config), torch.device(device):
        mlp = qwen3_vl.Qwen3_VisionMLP(32, 60, bias=True, act_fn=nn.GELU(approximate="tanh"))
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.cpu_linear = F.linear  # as packing leaves it
    torch.manual_seed(0)
    for p in mlp.parameters():
        p.data.normal_(std=0.3)
        p.requires_grad_(False)
    x = torch.randn(9, 1, 32, device=device)
    up, down = mlp.linear_fc1, mlp.linear_fc2
    for count, act_fn in ((1, mlp.act_fn), (1, nn.GELU())):  # one by the product, one not
        mlp.act_fn = act_fn
        hidden = act_fn(F.linear(x, up.weight, up.bias))
        expected = F.linear(hidden, down.weight, down.bias)
        # The operator's is the tanh approximation on a GPU, and the exact one on a CPU.
        torch.testing.assert_close(mlp(x), expected, atol=5e-3, rtol=0)
        assert ran == [True] * count


class Mlp:
    """A gated MLP of 60 columns as vLLM builds it, whose weights it has not packed for a CPU."""

    def __init__(self, config):
        with set_current_vllm_config(config), torch.device(current_platform.device_type):
            silu = activation.get_act_and_mul_fn("silu")
            self.module = qwen2_5_vl.Qwen2_5_VisionMLP(32, 60, bias=True, act_fn=silu)
        for layer in (self.module.gate_up_proj, self.module.down_proj):
            layer.cpu_linear = F.linear  # as packing leaves it
        torch.manual_seed(0)
        for p in self.module.parameters():
            p.data.normal_(std=0.3)
            p.requires_grad_(False)
        self.x = torch.randn(9, 1, 32, device=current_platform.device_type)

    def expected(self, bias=True):
        up, down = self.module.gate_up_proj, self.module.down_proj
        gate, up = F.linear(self.x, up.weight, up.bias).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down.weight, down.bias if bias else None)


@pytest.fixture
def mlp(case, hopper, monkeypatch):
    """It, and the way to its result by operands that are aligned, noted in `ways`."""
    plugin.register()
    found = Mlp(case.config)
    found.ways, own = [], plugin.aligned_operands

    def noted(*operands):
        found.ways.append("aligned")
        return own(*operands)

    monkeypatch.setattr(plugin, "aligned_operands", noted)
    return found


def test_an_mlp_follows_its_weights(mlp):
    for factor in (1, 0.5):
        mlp.module.down_proj.weight.mul_(factor)
        torch.testing.assert_close(mlp.module(mlp.x), mlp.expected())
    assert mlp.ways == ["aligned"] * 2


def test_an_mlp_of_several_ranks(case, hopper, monkeypatch):
    monkeypatch.setattr(distributed, "tensor_model_parallel_all_reduce", lambda x: 2 * x)
    plugin.register()
    mlp = Mlp(case.config)
    mlp.module.down_proj.tp_rank, mlp.module.down_proj.tp_size = 1, 2
    torch.testing.assert_close(mlp.module(mlp.x), 2 * mlp.expected(bias=False))


def adapt(layer):
    layer.__class__ = type("WithLora", (type(layer),), {})


def quantise(layer):
    layer.quant_method.__class__ = type("Quantised", (type(layer.quant_method),), {})


@pytest.mark.parametrize("layer", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("change", [adapt, quantise])
def test_an_mlp_whose_layers_have_to_be_called(mlp, monkeypatch, layer, change):
    change(getattr(mlp.module, layer))
    torch.testing.assert_close(mlp.module(mlp.x), mlp.expected())
    assert not mlp.ways


def test_a_compiled_mlp_has_aligned_operands_too(mlp):
    operators = []

    def backend(graph, _):
        operators.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(mlp.module, backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(mlp.x), mlp.expected())
    assert aligned._operator._opoverload in operators
