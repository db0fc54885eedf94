"""The PyTorch vision tower, which mirrors `flax_models`."""

from compare.torch_tower.tower import load_vision_tower

__all__ = ["load_vision_tower"]
