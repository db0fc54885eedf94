import os

from compare.common.processes import begin_together, on_each_gpu


def test_each_process_sees_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert on_each_gpu(2, os.getenv, "CUDA_VISIBLE_DEVICES") == ["3", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    begin_together()  # of no such call: nobody is waited for


def test_without_a_gpu_there_is_one_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert on_each_gpu(0, os.getenv, "CUDA_VISIBLE_DEVICES") == [""]
