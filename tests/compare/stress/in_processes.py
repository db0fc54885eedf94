"""Kernels for checks in processes of their own, which import little to find them."""

import os
import signal

import torch

from compare.stress.launched import kernels_here
from compare.stress.subjects import Subject
from compare.workloads.arrays import torch_arguments


class Still(Subject):
    """Returns zeros, whatever it is given."""

    name = "still"
    launched = frozenset(kernels_here())

    def put(self, inputs):
        return torch_arguments(inputs)

    def attend(self, arguments, max_seqlen, grad=None, **options):
        return torch.zeros_like(arguments[0][:, 0])


class Dies(Still):
    name = "dies"

    def attend(self, arguments, max_seqlen, grad=None, **options):
        os.kill(os.getpid(), signal.SIGSEGV)
