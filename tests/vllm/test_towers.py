"""vLLM's towers with the plugin, against vLLM's own and Hugging Face's."""

import pytest
import torch

from tests.vllm.checkpoints import FAMILIES
from tests.vllm.towers import Case, error
from triton_kernels.integrations import vllm as plugin


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, process, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def calls(monkeypatch):
    """Of how many tensors each attention reads q, k and v."""
    called, own = [], plugin._attend

    def noted(qkv, *others):
        called.append(len(qkv))
        return own(qkv, *others)

    monkeypatch.setattr(plugin, "_attend", noted)
    return called


def test_a_tower_gives_what_vllm_and_hugging_face_have(case, lines, calls):
    own = case.build()
    before = case.run(own)
    assert not calls
    plugin.register()
    result = case.run(case.build())
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert error(result, before) < 1e-5
    assert error(result, case.expected(own)) < 1e-5
    assert torch.equal(case.run(own), before)  # built before, and left alone
    assert len(calls) == 3
    plugin.unregister()
    assert torch.equal(case.run(case.build()), before)
