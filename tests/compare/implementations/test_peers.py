"""The baselines compute the same operation, and say why where they cannot run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from compare.agreement.expected import Expected
from compare.agreement.kernels import run
from compare.agreement.metrics import kernel_verdict, relative_rms_error
from compare.agreement.oracle import oracle, unfused
from compare.common import environment
from compare.common.environment import has_gpu
from compare.common.errors import UnavailableError
from compare.implementations import peers_torch
from compare.implementations.kernels import KernelImplementation, with_gradient
from compare.implementations.peers_jax import jax_peers, padding_indices
from compare.implementations.peers_torch import torch_peers
from compare.workloads.kernels import KernelWorkload, variant
from tests.compare.naive import naive_varlen

EQUAL = KernelWorkload("equal", "windows", ((1, 8, 16),), heads=2, head_dim=16)
MIXED = KernelWorkload("mixed", "windows", ((1, 8, 10), (1, 2, 6)), heads=2, head_dim=16)
WORKLOADS = [EQUAL, MIXED, variant(MIXED, rotary_dim=8)]


def assert_right(implementation, workload):
    inputs = workload.inputs()
    exact = oracle(inputs)
    error = relative_rms_error(run(implementation, workload, inputs), exact)
    limit = relative_rms_error(unfused(inputs), exact)
    assert kernel_verdict(error, limit, workload.dtype).passed


def by_name(peers, name):
    return next(peer for peer in peers if peer.name == name)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_xla_computes_the_operation(workload):
    assert_right(by_name(jax_peers(), "XLA rope + XLA attention"), workload)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_in_place_rotation_computes_the_operation(monkeypatch, workload):
    monkeypatch.setattr(peers_torch, "load_varlen", lambda name: naive_varlen)
    assert_right(by_name(torch_peers(), "in-place rope + FA2 varlen"), workload)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_the_rotation_that_is_compiled_computes_the_operation(monkeypatch, workload):
    monkeypatch.setattr(peers_torch, "load_varlen", lambda name: naive_varlen)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert_right(by_name(torch_peers(), "torch.compile rope + FA2 varlen"), workload)


@pytest.mark.parametrize("workload", WORKLOADS[:2], ids=lambda w: w.name)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_peers_have_gradients(monkeypatch, workload, framework):
    monkeypatch.setattr(peers_torch, "load_varlen", lambda name: naive_varlen)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    peers, name = {
        "torch": (torch_peers, "torch.compile rope + FA2 varlen"),
        "jax": (jax_peers, "XLA rope + XLA attention"),
    }[framework]
    workload = replace(workload, gradients=True)
    gradient = run(with_gradient(by_name(peers(), name)), workload, workload.inputs())
    assert Expected.of(workload).judge([gradient]).passed


def test_padding_indices():
    gather, scatter = padding_indices(np.array([2, 3, 1]))
    assert gather.reshape(3, 3)[:, 0].tolist() == [0, 2, 5]
    assert gather.max() == 5
    tokens = np.arange(6)
    assert (tokens[gather][scatter] == tokens).all()


def test_names_say_what_peers_are():
    names = [peer.name for peer in [*torch_peers(), *jax_peers()]]
    assert len(set(names)) == len(names)
    assert not {"triton", "pallas", "torch", "flax"} & set(names)


@pytest.mark.skipif(has_gpu(), reason="the GPU's machine may have it")
def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.delenv(environment.FA3_LIBRARY, raising=False)
    with pytest.raises(UnavailableError, match="neither flash_attn_interface nor vllm"):
        by_name(torch_peers(), "in-place rope + FA3 varlen").prepare(EQUAL)


def test_cudnn_needs_segments_of_one_length():
    with pytest.raises(UnavailableError, match="segments of one length"):
        by_name(torch_peers(), "in-place rope + cuDNN SDPA").prepare(MIXED)


def test_an_import_error_becomes_a_reason():
    def prepare(workload):
        raise ImportError("no module, pip install it")

    with pytest.raises(UnavailableError, match="pip install it"):
        run(KernelImplementation("x", "torch", prepare), EQUAL, EQUAL.inputs())
