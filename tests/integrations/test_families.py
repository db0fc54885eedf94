"""`accelerate` on the towers of other models that have the same attention."""

import pytest
import torch
import transformers

from tests.integrations import table
from tests.integrations.families import OF_EACH_FORM, REFUSED, TAKEN, make, random_call, run
from tests.integrations.hugging_face import (
    DEVICE,
    GRIDS,
    Waits,
    assert_same_bits,
    bits_of,
    kinds_of,
    relative_error,
    snapshot,
)
from triton_kernels.integrations import layers, plan
from triton_kernels.integrations.transformers import accelerate, restore

every_family = pytest.mark.parametrize("model", TAKEN)
TOLERANCE = 1e-5
# Without those whose tower says the same as another's here, and without one that goes through its
# images on the host.
_COPIES = {"cohere_compass", "glm4v_moe", "glm5_next", "muse_spark", "qwen3_5_moe", "qwen4_exp"}
PLANNED_WHOLE = sorted(TAKEN.keys() - _COPIES - {"video_llama_3"})


def assert_close(results, expected, tolerance=TOLERANCE):
    assert len(results) == len(expected)
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < tolerance


@every_family
def test_results_are_hugging_faces_and_restore_is_exact(model):
    tower = make(model)
    before, bits = snapshot(tower), bits_of(tower)
    calls = [random_call(model, tower, grid) for grid in GRIDS.values()]
    with torch.no_grad():
        expected = [run(tower, call) for call in calls]
        assert accelerate(tower) is tower
        assert "FusedAttention" in kinds_of(tower)
        assert table.replaced(tower) == table.read()[1][model][0]
        for call, exact in zip(calls, expected, strict=True):
            assert_close(run(tower, call), exact)
        restored = [run(restore(tower), call) for call in calls]
    assert snapshot(tower) == before
    assert_same_bits(bits_of(tower), bits)
    for results, exact in zip(restored, expected, strict=True):
        assert_close(results, exact, 1e-6)  # on a GPU some towers' own sums vary in their last bit
        assert all(map(torch.equal, results[:2], exact[:2]))


@pytest.mark.parametrize("model", OF_EACH_FORM)
def test_the_kernel_itself_in_a_tower(model, monkeypatch):
    # Interpreted where no GPU is.
    monkeypatch.setattr(
        "triton_kernels.attend.runs_kernel", lambda device, _: device.type == DEVICE
    )
    tower = make(model)
    call = random_call(model, tower, [(1, 4, 6), (2, 2, 2)])
    with torch.no_grad():
        assert_close(run(accelerate(tower), call), run(restore(tower), call))


@every_family
def test_gradients_are_hugging_faces(model):
    tower = make(model).train()
    call = random_call(model, tower, GRIDS["several"])

    def gradients():
        tower.zero_grad()
        run(tower, call)[-1].square().mean().backward()
        return {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}

    expected = gradients()
    accelerate(tower)
    results = gradients()
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert relative_error(result, expected[name]) < 1e-4, name


@pytest.mark.parametrize("model", OF_EACH_FORM)
def test_what_other_libraries_do_to_projections_is_kept(model):
    results = []
    for accelerated_before in (None, True, False):
        tower = make(model)
        if accelerated_before:
            accelerate(tower)
        for module in tower.modules():
            if type(module).__name__.endswith("Attention"):
                for projection in module.children():
                    projection.register_forward_hook(lambda _module, _x, y: 1.25 * y)
        if accelerated_before is False:
            accelerate(tower)
        with torch.no_grad():
            results.append(run(tower, random_call(model, tower, GRIDS["clip"])))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_norms_of_another_dtype_than_the_heads():
    tower = make("glm_ocr")
    call = random_call("glm_ocr", tower, GRIDS["clip"])
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = run(tower, call)
        assert_close(run(accelerate(tower), call), expected, 2e-2)


def test_dropout_in_training_is_theirs():
    tower = make("paddleocr_vl").train()
    for module in tower.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    call = random_call("paddleocr_vl", tower, GRIDS["clip"])

    def results():
        torch.manual_seed(1)
        with torch.no_grad():
            return run(tower, call)

    expected = results()
    accelerate(tower)
    assert_close(results(), expected)
    tower.eval()
    assert_close(results(), run(restore(tower), call))


def test_frequencies_that_are_not_hugging_faces_are_kept():
    tower = make("glm4v")
    tower.rotary_pos_emb.inv_freq *= 0.5
    held = tower.to(torch.bfloat16).rotary_pos_emb.inv_freq.clone()
    assert torch.equal(accelerate(tower).rotary_pos_emb.inv_freq, held)


def test_accelerating_draws_no_random_numbers():
    tower = make("qwen2_5_omni")
    state = torch.get_rng_state()
    accelerate(tower)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not plan.BOUNDED, reason="this transformers takes no bound")
@pytest.mark.parametrize("model", PLANNED_WHOLE)
def test_a_planned_call_waits_for_nothing(model):
    tower = accelerate(make(model))
    if model.startswith("muse") and not plan.Geometry.of(tower).own:
        pytest.skip("in this transformers the tower itself waits")
    patches, further = random_call(model, tower, GRIDS["clip"])
    with torch.no_grad():
        tower(patches, **further)
        with Waits() as waits:
            tower(patches, **further)
    assert waits.count == 0


@pytest.mark.skipif(not plan.PRECOMPUTED, reason="this transformers takes no precomputed values")
def test_images_that_are_gone_through_one_by_one_are_counted_on_the_host():
    tower, seen = make("video_llama_3"), []
    patches, further = random_call("video_llama_3", tower, [(1, 4, 10), (2, 2, 4)])
    accelerate(tower)
    tower.register_forward_pre_hook(lambda _, *call: seen.append(call[1]), with_kwargs=True)
    results = []
    with torch.no_grad():
        for further["merge_sizes"] in torch.tensor([[1, 2], [2, 1]], device=DEVICE):
            results.append(run(tower, (patches, further)))
            for name, given in further.items():
                assert seen[-1][name].device.type == "cpu"
                assert seen[-1][name] is not given
                assert torch.equal(seen[-1][name], given.cpu())
        assert "position_ids" in seen[-1]
        assert_close(results[-1], run(restore(tower), (patches, further)))
    assert results[0][-1].shape != results[1][-1].shape


@pytest.mark.skipif(not plan.PRECOMPUTED, reason="this transformers takes no precomputed values")
def test_a_callers_own_windows_where_blocks_are_told_of_nothing(monkeypatch):
    tower, bounds, own = accelerate(make("muse_glimmer")), [], layers.fused_rope_attention

    def noted(*tensors, max_seqlen, **options):
        bounds.append(max_seqlen)
        return own(*tensors, max_seqlen=max_seqlen, **options)

    monkeypatch.setattr(layers, "fused_rope_attention", noted)
    patches, further = random_call("muse_glimmer", tower, [(1, 8, 8)])
    with torch.no_grad():
        tower(patches, **further)
    assert set(bounds) <= {36, 64, None}  # a window's and a frame's tokens, where they are planned
    whole = {"window_index": torch.arange(64), "cu_window_seqlens": torch.tensor([0, 64]).int()}
    further |= {name: tensor.to(DEVICE) for name, tensor in whole.items()}
    with torch.no_grad():
        tower(patches, **further)
    assert len(bounds) == 4
    assert 36 not in bounds[2:]


class TakesNoMore(torch.nn.Module):
    __module__ = "transformers.models.glm4v.modeling_glm4v"

    def forward(self, hidden_states, grid_thw):
        """As some towers of transformers 4.57."""


def test_a_tower_that_takes_nothing_precomputed_is_given_nothing():
    call = (torch.zeros(4, 8),), {"grid_thw": torch.tensor([[1, 2, 2]])}
    assert plan.plan_call(TakesNoMore(), *call) is None


def test_whole_models_with_towers_of_another_file():
    try:
        from transformers import Glm46VConfig, Glm46VForConditionalGeneration
    except ImportError:
        pytest.skip("this transformers has no GLM-4.6V")
    text = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    config = Glm46VConfig(text_config=text, vision_config=TAKEN["glm4v"].sizes)
    model = Glm46VForConditionalGeneration(config)
    before = snapshot(model)
    assert accelerate(model) is model
    assert "FusedAttention" in kinds_of(model.model.visual)
    assert "FusedAttention" not in kinds_of(model.model.language_model)
    assert snapshot(restore(model)) == before


def test_the_table_is_of_this_transformers():
    columns, rows = table.read()
    if transformers.__version__ not in columns:
        pytest.skip(f"{table.FILE.name} has no column of transformers {transformers.__version__}")
    assert table.column() == columns[transformers.__version__]
    named = {model for model, cell in table.column().items() if cell == "no"}
    assert named <= REFUSED.keys() == table.NEEDS.keys()
    taken = {m for column in columns.values() for m, cell in column.items() if cell == "yes"}
    assert rows.keys() == taken
    for model, (_, tower, within) in rows.items():
        assert tower == table.tower_of_ours(model)
        for other in within.replace("`", "").split(", ") if within else ():
            assert table.home_of_tower(other) in (model, None)  # None: an older transformers
