"""What holds of the plugin for vLLM without vLLM: a few files stand in for it.

tests/vllm has what runs in the real package.
"""

import importlib
import logging
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.integrations import mlp
from triton_kernels.integrations import vllm as plugin

ROOT = Path(__file__).parents[2]
MODELS = "vllm.model_executor.models"
FILES = {
    "__init__.py": "",
    "envs.py": "VLLM_BATCH_INVARIANT = False",
    "platforms.py": """
class current_platform:
    is_cpu, is_cuda = (lambda: False), (lambda: True)
    has_device_capability = is_device_capability = lambda capability: True
""",
    "model_executor/__init__.py": "",
    "model_executor/layers/__init__.py": "",
    "model_executor/layers/attention.py": """
class MMEncoderAttention:
    num_heads = num_kv_heads = 2
    head_size, scale, fp8_enabled = 8, 0.5, False

    class attn_backend:
        name = "FLASH_ATTN"
""",
    "model_executor/models/__init__.py": "",
    "model_executor/models/qwen2_vl.py": """
from torch import nn
from vllm.model_executor.layers.attention import MMEncoderAttention

class Qwen2VisionAttention(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.attn = MMEncoderAttention()
        vars(self.attn).update(settings)

    def split_qkv(self, qkv):
        return [x.unflatten(-1, (2, 8)) for x in qkv.chunk(3, -1)]

    def qkv(self, x):
        return x, None

    proj = qkv

    def forward(self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen=None):
        return "vLLM's own"
""",
}


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """What the log says, with a vLLM to import of which nothing has been imported."""
    for name, text in FILES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(plugin.VARIABLE, "attention")  # what the files have
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    plugin._logger.addHandler(handler)
    monkeypatch.setattr(plugin._logger, "level", logging.INFO)
    plugin._say.cache_clear()
    yield said
    plugin._logger.removeHandler(handler)
    plugin.unregister()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def known(lines, monkeypatch):
    """As if the attention's code were what was tested: its class, and the log."""
    cls = importlib.import_module(f"{MODELS}.qwen2_vl").Qwen2VisionAttention
    code = plugin.fingerprint(cls.forward, cls.split_qkv)
    monkeypatch.setitem(plugin.FINGERPRINTS, "Qwen2VisionAttention", {code})
    return cls, lines


def call(attention):
    torch.manual_seed(0)
    x, angles = torch.randn(6, 1, 48), torch.randn(6, 4)
    cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
    return attention(x, cu_seqlens, angles.cos(), angles.sin(), torch.tensor(4))


def test_registering_imports_nothing_of_vllm(lines):
    plugin.register()
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)


def test_registering_twice_changes_once(known):
    cls, lines = known
    own = cls.forward, cls.__init__
    plugin.register()
    changed = cls.forward
    plugin.register()
    assert cls.forward is changed
    assert sys.meta_path.count(plugin._finder) == 1
    (line,) = lines
    assert "replaces the attention of Qwen2VisionAttention" in line
    plugin.unregister()
    assert (cls.forward, cls.__init__) == own
    assert not hasattr(cls, "is_fused")


def test_a_model_is_changed_that_is_imported_later(known):
    plugin.register()
    del sys.modules[f"{MODELS}.qwen2_vl"]
    cls = importlib.import_module(f"{MODELS}.qwen2_vl").Qwen2VisionAttention
    assert call(cls()).shape == (6, 1, 16)


@pytest.mark.parametrize("asked", ["0", "norm,mlp"])
def test_attention_that_is_switched_off(known, monkeypatch, asked):
    monkeypatch.setenv(plugin.VARIABLE, asked)
    plugin.register()
    assert call(known[0]()) == "vLLM's own"


def test_all_parts_are_asked_for_if_none_is_named(monkeypatch):
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    assert plugin._parts() == ("attention", "norm", "mlp")


def test_a_part_that_there_is_not(known, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "attention,norms")
    plugin.register()
    assert any("may name attention, norm, mlp, got norms" in line for line in known[1])
    assert torch.is_tensor(call(known[0]()))


def test_an_attention_of_unknown_code(lines):
    plugin.register()
    cls = importlib.import_module(f"{MODELS}.qwen2_vl").Qwen2VisionAttention
    assert call(cls()) == "vLLM's own"
    (line,) = lines
    assert "Qwen2VisionAttention" in line
    assert "not known" in line


@pytest.mark.parametrize("setting", [{"VLLM_BATCH_INVARIANT": True}, {"is_cuda": lambda: False}])
def test_a_process_that_is_left_alone(known, monkeypatch, setting):
    ((name, value),) = setting.items()
    envs, platforms = map(importlib.import_module, ("vllm.envs", "vllm.platforms"))
    owner = envs if hasattr(envs, name) else platforms.current_platform
    monkeypatch.setattr(owner, name, value)
    plugin.register()
    assert call(known[0]()) == "vLLM's own"
    (line,) = known[1]
    assert "off" in line


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_backend": type("", (), {"name": "FLASHINFER"})},
        {"fp8_enabled": True},
        {"head_size": 12},
        {"num_kv_heads": 1},
        {"head_size": None},  # as a later version may have it
    ],
)
def test_settings_that_are_left_to_vllm(known, settings):
    plugin.register()
    cls, lines = known
    assert call(cls(**settings)) == "vLLM's own"
    assert any("left to vLLM" in line or "to vLLM:" in line for line in lines)


def test_an_attention_of_another_plugin(known):
    plugin.register()
    layers = importlib.import_module("vllm.model_executor.layers.attention")
    attention = known[0]()
    attention.attn.__class__ = type("Theirs", (layers.MMEncoderAttention,), {})
    plugin._judge_attention(attention)
    assert call(attention) == "vLLM's own"


def test_a_model_that_has_lost_its_attention(lines):
    plugin.register()
    source = Path(importlib.import_module("vllm").__file__).parent
    (source / "model_executor/models/qwen2_vl.py").write_text("")
    importlib.import_module(f"{MODELS}.qwen2_vl")
    (line,) = lines
    assert "failed: AttributeError" in line


def test_compiled_encoders_with_and_without_are_kept_apart(lines, tmp_path):
    folder = tmp_path / "vllm/compilation"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "caching.py").write_text("def aot_compile_hash_factors(config): return [config]")
    plugin.register()
    caching = importlib.import_module("vllm.compilation.caching")
    theirs, ours = caching.aot_compile_hash_factors("c")
    assert theirs == "c"
    assert re.fullmatch("FUSED_ROPE_VLLM=attention [0-9a-f]{12}", ours)
    plugin.unregister()
    assert caching.aot_compile_hash_factors("c") == ["c"]


@pytest.mark.parametrize("said", [None, 0, torch.tensor(0)])
def test_a_bound_of_nothing_is_none(said):
    assert plugin._bound(said) is None
    assert plugin._bound(torch.tensor(64)) == 64


class Bare(nn.Module):
    """An attention of Qwen2.5-VL's settings, for what a compiler makes of the call."""

    is_fused = True

    def forward(self, qkv, cos, sin, cu_seqlens, max_seqlen):
        return plugin._operator([qkv], cos, sin, cu_seqlens, max_seqlen, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_encoder_is_not_traced_into_the_bound(dtype):
    qkv, angles = torch.randn(6, 3, 2, 8, dtype=dtype), torch.randn(6, 4)
    cu_seqlens, bound = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor(4)
    others = angles.cos().bfloat16(), angles.sin().bfloat16(), cu_seqlens, bound
    compiled = torch.compile(Bare(), backend="eager", fullgraph=True)(qkv, *others)
    torch.testing.assert_close(compiled, plugin._attend([qkv], *others, 0.3))
    torch.library.opcheck(plugin._operator, ([qkv], *others, 0.3))
    exact = plugin._attend([qkv.float()], *others, 0.3)
    torch.testing.assert_close(compiled.float(), exact, atol=2e-2, rtol=0)


def test_operands_of_gate_and_up_that_are_one_tensor(aligned):
    torch.manual_seed(0)
    x, merged, bias, down = (torch.randn(n) for n in ((9, 16), (120, 16), (120,), (16, 60)))
    (gate, up), (gate_bias, up_bias) = merged.chunk(2), bias.chunk(2)
    hidden, weight = mlp.aligned_operands(x, gate, gate_bias, up, up_bias, down)
    expected = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    torch.testing.assert_close(hidden @ weight.T, expected @ down.T)
    assert hidden.shape[1] * hidden.itemsize % 128 == 0
    assert torch.cuda.is_available() or "kernel" in aligned


def run(code, *path, options=()):
    """The standard error of a process that finds packages on a path in front of ours."""
    environment = {"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environment, cwd=path[0], text=True, capture_output=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_the_package_of_this_name_that_vllm_brings_along_is_found(tmp_path):
    bundled = tmp_path / "vllm/third_party/triton_kernels"
    bundled.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('imported')")
    (bundled / "matmul_ogs.py").write_text("from triton_kernels import target_info")
    (bundled / "target_info.py").write_text("")
    run("import triton_kernels.matmul_ogs; triton_kernels.fused_rope_attention", tmp_path)


def test_something_that_stands_in_for_vllm_is_no_place_to_look(tmp_path):
    run("import sys; sys.modules['vllm'] = type(sys)('vllm'); import triton_kernels", tmp_path)


ENTER = "import fused_rope_attention_vllm; fused_rope_attention_vllm.register()"


def test_another_package_of_the_name_is_told_of(tmp_path):
    other = tmp_path / "triton_kernels/__init__.py"
    other.parent.mkdir()
    other.write_text("")
    # Without what is installed: an editable install finds our modules within the other package.
    (line,) = run(ENTER, tmp_path, options=["-S"]).splitlines()
    assert f"is imported, from {other}, which" in line


def test_entering_starts_no_cuda(tmp_path):  # vLLM forks processes after it
    run(f"{ENTER}; import torch; assert not torch.cuda.is_initialized()", tmp_path)


def test_vllm_starts_where_triton_is_missing(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('none for this machine')")
    (line,) = run(ENTER, tmp_path).splitlines()
    assert "off, as ImportError" in line
    assert "none for this machine" in line


def test_vllm_finds_the_plugin(lines):
    (points,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].values()
    ((name, value),) = points.items()
    EntryPoint(name, value, "vllm.general_plugins").load()()
    assert plugin._finder in sys.meta_path
