"""What `accelerate` refuses: one sentence that says why, and the model as it was."""

import functools
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations.families import REFUSED, make
from tests.integrations.hugging_face import CLASSES, bits_of, make_tower, snapshot
from triton_kernels.integrations import transformers
from triton_kernels.integrations.transformers import accelerate, accelerated, restore

ROOT = Path(__file__).parents[2]


def assert_refused(model, error, message):
    """accelerate raises, and has changed nothing in any tower of the model."""
    before = snapshot(model)
    with pytest.raises(error, match=message):
        accelerate(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("function", [accelerate, restore, lambda m: accelerated(m).__enter__()])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), None, "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_another_model(function, model):
    with pytest.raises(TypeError, match=rf"Qwen-VL, .*got {type(model).__name__}, which holds no"):
        function(model)


def test_another_family_of_transformers():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
    model = CLIPVisionModel(CLIPVisionConfig(**sizes, num_attention_heads=2, patch_size=14))
    assert_refused(model, TypeError, "Qwen-VL, .*got CLIPVisionModel")


@pytest.mark.parametrize(
    ("layer", "change", "undo"),
    [
        (
            "norm1",
            lambda norm: nn.utils.parametrize.register_parametrization(norm, "weight", nn.ReLU()),
            lambda norm: nn.utils.parametrize.remove_parametrizations(norm, "weight"),
        ),
        (  # as offloading and dispatching to devices do
            "attn",
            lambda attention: setattr(attention, "forward", attention.forward),
            lambda attention: delattr(attention, "forward"),
        ),
    ],
)
def test_restore_refuses_what_another_library_has_changed(layer, change, undo):
    tower = make_tower("qwen2_5")
    before = snapshot(tower)
    both = nn.ModuleList([make_tower("qwen2_5"), accelerate(tower)])
    changed = tower.blocks[1].get_submodule(layer)
    change(changed)
    accelerated_and_changed = snapshot(both)
    with pytest.raises(ValueError, match=rf"blocks\.1\.{layer} must be as accelerate left it, got"):
        restore(both)
    assert snapshot(both) == accelerated_and_changed
    undo(changed)
    assert snapshot(restore(tower)) == before


def test_restore_refuses_a_tower_sharded_since(mesh):
    from torch.distributed.fsdp import fully_shard

    tower = accelerate(make_tower("qwen2_5").cpu())
    fully_shard(tower.blocks[1].attn, mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn must be .* got a FSDPFusedAttention"):
        restore(tower)


def test_an_attention_with_a_forward_of_its_own():
    tower = make_tower("qwen2_5")
    tower.blocks[1].attn.forward = tower.blocks[1].attn.forward
    assert_refused(tower, ValueError, r"blocks\.1\.attn has a forward of its own")


def by_instance(module, monkeypatch):
    monkeypatch.setitem(vars(module), "forward", wrapped(module.forward))


def by_class(module, monkeypatch):
    monkeypatch.setattr(type(module), "forward", wrapped(type(module).forward))


def by_subclass(module, monkeypatch):
    own = type(module)
    names = {"__module__": own.__module__, "forward": wrapped(own.forward)}
    module.__class__ = type(own.__name__, (own,), names)


def wrapped(forward):
    """What another library puts in a forward's place, under its name."""

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("replace", [by_instance, by_class, by_subclass])
@pytest.mark.parametrize("part", ["", "blocks.0", "blocks.0.attn"])
@pytest.mark.parametrize("family", CLASSES)
def test_a_part_that_runs_another_librarys_code(monkeypatch, family, part, replace):
    tower = make_tower(family)
    replace(tower.get_submodule(part), monkeypatch)
    name = part.replace(".", r"\.") or "the tower"
    message = rf"{name} must run transformers' own code, got a \w+ with code of [\w.]*test_"
    assert_refused(tower, ValueError, message)


class Around(nn.Module):
    """As adapter libraries put one around a module: all that is asked of it is the module's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        module = super().__getattr__("module")
        return module if name == "module" else getattr(module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("part", ["blocks.0", "blocks.0.attn"])
def test_a_part_within_another_librarys_module(part):
    tower = make_tower("qwen2_5")
    tower.set_submodule(part, Around(tower.get_submodule(part)))
    assert_refused(tower, ValueError, r"must run transformers' own code, got a Around with code of")


def test_a_head_that_the_kernel_does_not_take():
    tower = make_tower("qwen3")
    tower.blocks[0].attn.head_dim = 12
    assert_refused(tower, ValueError, r"head_dim .*multiple of 8 up to 256, got 12 in blocks\.0")


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, hidden_states, segments, position_embeddings, **kwargs: None,
        lambda self, hidden_states, cu_seqlens, position_embeddings, **kwargs: None,
    ],
    ids=["renamed", "same signature"],
)
@pytest.mark.parametrize("family", CLASSES)
def test_a_version_whose_attention_has_other_code(monkeypatch, family, forward):
    tower = make_tower(family)
    attention = type(tower.blocks[0].attn)
    theirs = types.FunctionType(forward.__code__, attention.forward.__globals__)
    monkeypatch.setattr(attention, "forward", theirs)
    message = r"blocks\.0.* must be an attention whose code .*, got a \w+ of transformers [\d.]+"
    assert_refused(tower, RuntimeError, message)


def test_a_function_of_the_attention_that_is_another_librarys(monkeypatch):
    tower = make_tower("qwen3")
    own = sys.modules[type(tower).__module__]
    monkeypatch.setattr(own, "rotate_half", wrapped(own.rotate_half))
    message = r"blocks\.0\.attn must run transformers' own code, got a \w+ with code of [\w.]*test_"
    assert_refused(tower, ValueError, message)
    monkeypatch.setattr(own, "rotate_half", functools.partial(own.rotate_half))
    assert_refused(tower, RuntimeError, r"blocks\.0\.attn must be an attention whose code")


def test_an_attention_function_that_is_another_librarys(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def theirs(module, query, key, value, attention_mask, **_):
        return value.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "theirs", theirs)
    tower = make_tower("qwen2_5")
    tower.config._attn_implementation = "theirs"
    message = r"blocks\.0\.attn must use .*, got 'theirs' with code of [\w.]*test_"
    assert_refused(tower, ValueError, message)


def test_a_norm_of_queries():
    tower = make_tower("qwen3")
    tower.blocks[1].attn.q_norm = nn.RMSNorm(72)
    message = r"blocks\.1\.attn must hold nothing but projections, got q_norm in a Qwen3VL"
    assert_refused(tower, ValueError, message)


def test_fewer_key_heads():
    tower = make_tower("qwen3")
    tower.blocks[1].attn.num_key_value_groups = 2
    message = r"blocks\.1\.attn must have a key head for each query head, got a \w+ with one for 2"
    assert_refused(tower, ValueError, message)


def test_code_that_is_known_and_gives_something_else(monkeypatch):
    tower = make_tower("qwen2_5")
    own = sys.modules[type(tower).__module__]
    monkeypatch.setattr(own.nn.functional, "softmax", lambda x, **_: torch.sigmoid(x))
    message = r"blocks\.0\.attn must give what ours gives, got a \w+ whose results differ by"
    assert_refused(tower, ValueError, message)


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_whose_attention_is_another(model):
    _, error, message = REFUSED[model]
    tower = make(model)
    if not any(transformers.takes_segments(type(module).forward) for module in tower.modules()):
        pytest.skip("this transformers has another attention there, which takes no segments")
    assert_refused(tower, error, message)


def test_an_error_leaves_every_tower():
    sound, tower = make_tower("qwen2_5"), make_tower("qwen2_5")
    tower.blocks[2].attn.forward = tower.blocks[2].attn.forward
    assert_refused(nn.ModuleList([sound, tower]), ValueError, r"blocks\.2\.attn")


def test_a_failure_midway_is_undone(monkeypatch):
    tower = make_tower("qwen2_5")
    before, bits = snapshot(tower), bits_of(tower)
    remaining = iter([transformers.stand_in] * 7)

    def stand_in_until_interrupted(*arguments):
        if (step := next(remaining, None)) is None:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(transformers, "stand_in", stand_in_until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        accelerate(tower)
    assert snapshot(tower) == before
    assert all(torch.equal(tensor, bits[name]) for name, tensor in bits_of(tower).items())


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_kernels_do_without_transformers():
    result = run_python(
        "import sys; sys.modules['transformers'] = None\n"
        "import triton_kernels, triton_kernels.integrations\n"
        "import triton_kernels.integrations.transformers"
    )
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: triton_kernels.integrations.transformers needs")
    assert "pip install '.[transformers]' in the clone" in last_line
    assert "line 3, in <module>" in result.stderr, "the import of the line before works"
