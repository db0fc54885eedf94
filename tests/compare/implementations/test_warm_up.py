"""First calls, made in threads, and in processes for the caches, before anything is timed."""

import os
import pickle
import threading
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

pytest.importorskip("jax")

from compare.bench.embeddings import all_implementations
from compare.implementations import warm_up as module
from compare.implementations.kernels import KernelImplementation
from compare.implementations.warm_up import caches_filled, draw_inputs, warm_up
from compare.workloads.arrays import blank_arguments, jax_arguments, torch_arguments
from compare.workloads.kernels import KernelWorkload

TINY = KernelWorkload("windows-tiny", "windows", ((1, 4, 6),), heads=2, rotary_dim=40)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_blank_arguments_are_like_the_true_ones(framework, gradients):
    workload = replace(TINY, gradients=gradients)
    true = (torch_arguments if framework == "torch" else jax_arguments)(workload.inputs())
    blank = blank_arguments(workload, framework)
    assert [(x.shape, x.dtype) for x in blank] == [(x.shape, x.dtype) for x in true]
    assert (blank[3] == true[3]).all()  # cu_seqlens: a kernel may not run on made-up segments


def test_each_is_prepared_and_called_once():
    prepared, called = [], []

    def implementation(index):
        def prepare(workload):
            prepared.append(index)

            def call(*arguments):
                called.append((index, threading.current_thread()))
                return arguments[0][:, 0]

            return call

        return KernelImplementation(str(index), "torch", prepare)

    jobs = [(implementation(index), TINY) for index in range(5)]
    ready = warm_up(jobs, "compiling")
    assert [i.name for i in ready] == list("01234")
    assert sorted(prepared) == sorted(index for index, _ in called) == list(range(5))
    calls = [i.prepare(TINY) for i in ready]
    assert len(prepared) == 5
    assert len(set(map(id, calls))) == 5
    main = threading.current_thread()
    assert called[0] == (0, main)  # by itself: it sets up what the others share
    assert all(thread is not main for index, thread in called if index > 0)


@pytest.mark.parametrize("place", ["prepare", "call"])
def test_what_fails_fails_when_it_is_prepared(place):
    def fail(*_):
        raise RuntimeError("out of shared memory")

    prepare = fail if place == "prepare" else lambda _: fail
    (ready,) = warm_up([(KernelImplementation("triton", "torch", prepare), TINY)], "compiling")
    with pytest.raises(RuntimeError, match="out of shared memory"):
        ready.prepare(TINY)


def test_inputs_are_those_of_each_workload():
    other = KernelWorkload("other", "windows", ((1, 2, 2),), heads=1)
    drawn = draw_inputs([TINY, other])
    assert [inputs.qkv.shape[0] for inputs in drawn] == [24, 4]
    assert (drawn[0].qkv == TINY.inputs().qkv).all()


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_processes_fill_the_caches_that_are_used(monkeypatch, tmp_path, capsys, kept, dies):
    """By each implementation's first call on each workload; here without processes."""
    import jax

    called, compiled = [], jax.config.jax_compilation_cache_dir

    def on_each(items, most, function, *arguments, variables):
        assert 1 <= most <= 16
        assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        directories.append(variables["JAX_COMPILATION_CACHE_DIR"])
        assert pickle.loads(pickle.dumps((items, function, all_implementations)))[0] == items
        for item in items:
            yield function(item, *arguments)
            if dies:
                raise BrokenProcessPool("a process died")

    def implementations(workload):
        def prepare(given):
            called.append(given)
            if len(called) == 1:
                raise RuntimeError("needs a GPU")
            return lambda qkv, *_: qkv[:, 0]

        return [KernelImplementation(name, "torch", prepare) for name in ("one", "two")]

    directories: list[str] = []
    monkeypatch.setattr(module, "on_each", on_each)
    if kept:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with caches_filled([TINY, replace(TINY, heads=1)], implementations):
            assert jax.config.jax_compilation_cache_dir == directories[0]
            assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
            assert (directories[0] == str(tmp_path)) is kept
        assert jax.config.jax_compilation_cache_dir == (str(tmp_path) if kept else compiled)
        assert os.path.exists(directories[0]) is kept
    finally:
        jax.config.update("jax_compilation_cache_dir", compiled)
    assert [workload.heads for workload in called] == ([2] if dies else [2, 2, 1, 1])
    assert ("Not all caches are filled" in capsys.readouterr().out) is dies
