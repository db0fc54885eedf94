"""vLLM's towers in the benchmark, where a few lines stand in for vLLM.

tests/vllm has the real one.
"""

import functools
import gc
import importlib.util
import os
import sys
import weakref
from dataclasses import asdict, dataclass, field, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

import transformers

from compare.bench import towers as tower_bench
from compare.bench.ceilings import Ceilings
from compare.bench.timing import Timing
from compare.common.errors import UnavailableError
from compare.implementations import vllm as in_vllm
from compare.workloads.arrays import torch_device
from compare.workloads.towers import SMALL_TOWERS, VLLM_WORKLOADS, TowerWorkload, Visual
from triton_kernels.integrations import vllm as plugin

CONFIG = replace(SMALL_TOWERS["tower"], depth=1, fullatt_block_indexes=(0,))
WORKLOAD = TowerWorkload("vllm-448", (Visual(112, 112), Visual(56, 84, frames=4)), CONFIG)


class Model(torch.nn.Module):
    """As vLLM's model is called, around Hugging Face's tower."""

    def __init__(self, folder, with_plugin):
        super().__init__()
        name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
        whole = getattr(transformers, name).from_pretrained(folder, dtype=torch.bfloat16)
        self.visual = whole.model.visual.eval().to(torch_device())
        self.is_fused = with_plugin

    def embed_multimodal(self, pixel_values, image_grid_thw):
        rows = self.visual(pixel_values, image_grid_thw.to(pixel_values.device)).pooler_output
        return rows.split((image_grid_thw.prod(1) // 4).tolist())


@pytest.fixture
def vllm(monkeypatch):
    """Modules that stand in for vLLM's; notes what engines were started with, and what was
    recorded.
    """
    noted = SimpleNamespace(engines=[], switches=[], graphs=[], missed=0, plugin_works=True)

    @dataclass
    class EngineArgs:
        model: str
        dtype: str
        skip_tokenizer_init: bool
        max_model_len: int
        compilation_config: dict = field(default_factory=dict)
        ir_op_priority: dict = field(default_factory=dict)
        mm_device_do_normalize: bool = True

        def create_engine_config(self):
            noted.engines.append(asdict(self))
            settings = {"cudagraph_mm_encoder": False} | self.compilation_config
            return SimpleNamespace(
                model=self.model,
                compilation_config=SimpleNamespace(**settings),
                kernel_config=SimpleNamespace(
                    ir_op_priority=SimpleNamespace(set_default=lambda: None)
                ),
            )

    class Manager:
        def __init__(self, config, device, dtype, model):
            self.model, self.graph_misses = model, noted.missed
            settings = vars(config.compilation_config)
            noted.graphs.append([settings[n] for n in settings if n.startswith("encoder_")])

        def capture(self, graph_pool):
            pass

        def execute(self, call):
            return self.model.embed_multimodal(**call)

    def get_model(vllm_config):
        noted.switches.append(os.environ.get(plugin.VARIABLE, ""))
        return Model(vllm_config.model, noted.plugin_works and plugin._finder in sys.meta_path)

    contents = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: torch.no_grad()},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.model_executor.model_loader": {"get_model": get_model},
        "vllm.v1.worker.encoder_cudagraph": {"EncoderCudaGraphManager": Manager},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(in_vllm, "check_installed", lambda: None)
    monkeypatch.setattr(in_vllm, "_start_distributed", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setenv(plugin.VARIABLE, "")
    yield noted
    plugin.unregister()


def bench(monkeypatch, names=None):
    """By stand-ins for the clocks: each call is made once more."""

    def clock(call, wait, *_):
        wait(call())
        return Timing(10.0, 0.5, 1)

    monkeypatch.setattr(tower_bench, "_WARM_UP", 0)
    monkeypatch.setattr(tower_bench, "time_wall", clock)
    monkeypatch.setattr(tower_bench, "time_row", clock)
    monkeypatch.setattr(tower_bench, "try_profile", lambda run, calls: None)
    towers = [t for t in in_vllm.vllm_towers() if names is None or t.name in names]
    [records] = tower_bench.bench_towers([WORKLOAD], Ceilings(4e12, 4e12, 8e14), towers)
    return {record.implementation: record for record in records}


def test_every_setting_gets_its_time_beside_hugging_faces(vllm, monkeypatch):
    records = bench(monkeypatch)
    assert len(records) == 9
    for name, record in records.items():
        assert record.passed is not False, record
        assert record.median_us == 10.0, record
        assert record.row_us == 10.0
        assert bool(record.ours) == name.startswith("vLLM with ours")
    settings = {
        name: (engine["compilation_config"], engine["ir_op_priority"], switch)
        for name, engine, switch in zip(
            [name for name in records if name.startswith("vLLM")],
            vllm.engines,
            vllm.switches,
            strict=True,
        )
    }
    kernels = {"rms_norm": ["vllm_c", "native"], "fused_add_rms_norm": ["vllm_c", "native"]}
    assert settings["vLLM"] == ({}, {}, "0")
    assert settings["vLLM, vllm_c norms"] == ({}, kernels, "0")
    assert settings["vLLM, compiled"] == ({"compile_mm_encoder": True}, {}, "0")
    assert settings["vLLM with ours"] == ({}, {}, "")
    assert not any(engine["mm_device_do_normalize"] for engine in vllm.engines)
    # Budget, images and frames: of the very call.
    assert vllm.graphs == [[[64 // 4 + 2 * 24 // 4], 2, 3]] * 4
    assert os.environ[plugin.VARIABLE] == ""


def test_settings_that_change_nothing_of_a_tower_are_not_timed():
    assert WORKLOAD.name in VLLM_WORKLOADS
    for name in VLLM_WORKLOADS:
        timed = [t for t in in_vllm.vllm_towers() if t.workloads is None or name in t.workloads]
        assert len(timed) == (8 if name.startswith("vllm-") else 4), name


def test_a_tower_that_is_given_up_is_remembered_by_nobody():
    hooks = {}

    class Visual(torch.nn.Module):  # as vLLM has it
        def __init__(self):
            super().__init__()
            hooks[0] = self.cleanup

        def cleanup(self):
            hooks.clear()

        @functools.lru_cache  # noqa: B019
        def get_rope_by_thw(self, t, h, w):
            return t, h, w

    model = torch.nn.Module()
    model.visual = Visual()
    model.visual.get_rope_by_thw(1, 2, 2)
    tower, alive = in_vllm.VllmTower(model, None), weakref.ref(model.visual)
    del model
    gc.collect()
    assert alive() is not None
    del tower
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        ("vLLM with ours", {"plugin_works": False}, "left this tower's attention to vLLM"),
        ("vLLM, CUDA graphs", {"missed": 1}, "did not replay its CUDA graph"),
    ],
)
def test_what_is_not_measured_says_why(vllm, monkeypatch, name, setting, reason):
    vars(vllm).update(setting)
    record = bench(monkeypatch, {name})[name]
    assert record.median_us is None
    assert reason in record.note
    assert record.passed is None


def test_without_vllm_it_is_refused():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(UnavailableError, match="vllm is not installed"):
        in_vllm.check_installed()
