"""Holding the kernels and towers against each other, against fp64 and against their peers.

The command line is `python -m compare`; `compare.torch_tower.load_vision_tower` is the PyTorch
twin of `flax_models.load_vision_tower`.
"""
