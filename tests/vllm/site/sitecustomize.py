"""Lets PyTorch for CPUs and torchvision for CUDA, the only one to be had, live together.

Beside PyTorch for CUDA torchvision's library is loaded, and tells PyTorch of its operators itself.

Python imports it at the start of each process, vLLM's workers among them, by PYTHONPATH.
torchvision tells tracers of its operators, which are not there, as its library can't be loaded.
"""

import importlib.util

if importlib.util.find_spec("torchvision"):
    import torch

    if torch.version.cuda is None:
        _library = torch.library.Library("torchvision", "DEF")
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
