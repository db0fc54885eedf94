import math
import os

from compare.common.processes import begin_together, in_a_process, on_each, on_each_gpu


def test_each_process_sees_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert on_each_gpu(2, os.getenv, "CUDA_VISIBLE_DEVICES") == ["3", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    begin_together()  # of no such call: nobody is waited for


def test_a_process_has_an_environment_of_its_own(monkeypatch):
    monkeypatch.setenv("VARIABLE", "here")
    assert in_a_process(os.getenv, "VARIABLE", variables={"VARIABLE": "there"}) == "there"
    assert os.environ["VARIABLE"] == "here"


def test_without_a_gpu_there_is_one_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert on_each_gpu(0, os.getenv, "CUDA_VISIBLE_DEVICES") == [""]


def test_processes_share_items(monkeypatch):
    monkeypatch.setenv("VARIABLE", "here")
    assert list(on_each([3, 4, 5], 2, math.pow, 2, variables={})) == [9, 16, 25]
    names = ["VARIABLE", "missing"]
    found = on_each(names, 2, os.getenv, "default", variables={"VARIABLE": "there"})
    assert list(found) == ["there", "default"]
    assert list(on_each([], 2, math.sqrt, variables={})) == []
