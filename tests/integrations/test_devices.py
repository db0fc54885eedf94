"""An accelerated tower on a GPU that is not PyTorch's current one."""

import copy

import pytest
import torch

from tests.integrations.hugging_face import CLASSES, GRIDS, make_tower, random_inputs, tensors_of
from triton_kernels.integrations.transformers import accelerate


@pytest.mark.gpu(2)
@pytest.mark.parametrize("family", CLASSES)
def test_it_computes_what_it_does_on_the_current_one(family):
    first = accelerate(make_tower(family).bfloat16())
    second = copy.deepcopy(first).to("cuda:1")
    for grid in GRIDS.values():
        patches, grid_thw = random_inputs(first, grid)
        patches = patches.bfloat16()
        with torch.no_grad():
            expected = tensors_of(first(patches, grid_thw=grid_thw))
            found = tensors_of(second(patches.to("cuda:1"), grid_thw=grid_thw.to("cuda:1")))
        for ours, wanted in zip(found, expected, strict=True):
            assert ours.device == torch.device("cuda:1")
            assert torch.equal(ours.cpu(), wanted.cpu())
    assert torch.cuda.current_device() == 0
