import os

from compare.common.processes import begin_together, in_a_process, on_each_gpu


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
