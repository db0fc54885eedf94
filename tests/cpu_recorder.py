"""What stands for a recorder of CUDA graphs on a machine without a GPU."""

import contextlib

import torch
from torch.utils._pytree import tree_leaves


class CpuRecorder:
    """What is recorded runs anew, into the same tensors, at each replay.

    Attributes:
        recorded: what the passes returned that were recorded, of all recorders.
        replayed: the same, once for each replay.
    """

    def __init__(self, device):
        assert device.type == "cpu"

    @classmethod
    def stand_in(cls, monkeypatch, module):
        """Take the place of what a module records with."""
        cls.recorded, cls.replayed = [], []
        monkeypatch.setattr(module, "Recorder", cls)
        monkeypatch.setattr(module, "can_record", lambda device: True)
        return cls

    def record(self, run):
        outputs = run()
        self.recorded.append(outputs)

        def replay():
            self.replayed.append(outputs)
            for written, computed in zip(tree_leaves(outputs), tree_leaves(run()), strict=True):
                if isinstance(written, torch.Tensor):
                    written.copy_(computed)

        return replay, outputs

    @contextlib.contextmanager
    def turn(self):
        yield

    def wait(self):
        pass
