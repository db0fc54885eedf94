"""Libraries' attention, called as each of them wants to be."""

from types import SimpleNamespace

import torch

from compare.common.environment import FA3_LIBRARY
from compare.torch_tower.varlen import load_varlen


def test_a_bare_fa3_binary_is_called_by_argument_names(monkeypatch):
    names = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
    names += ("softmax_scale", "is_causal")

    def operator(*values):
        return [dict(zip(names, values, strict=True))]

    operator._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])
    q, k, v, cu_seqlens = (torch.full((3, 1, 4), float(x)) for x in range(4))
    monkeypatch.setenv(FA3_LIBRARY, "_vllm_fa3_C.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    library = SimpleNamespace(fwd=SimpleNamespace(default=operator))
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    given = load_varlen("FA3")(q, k, v, cu_seqlens, 3)
    assert given["q"] is q
    assert given["cu_seqlens_k"] is cu_seqlens
    assert given["max_seqlen_q"] == 3
    assert given["softmax_scale"] == 0.5
    assert given["is_causal"] is False
    assert given["out"] is None
