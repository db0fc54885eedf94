"""Holding the kernels and towers against each other, against fp64 and against their peers.

`python -m compare` is the command line: `cli` has the options, `commands` what each part does. The
rooms, each of which imports only those below it:

- report: tables and charts from result files;
- stress: what kernels and towers are put through;
- bench: how fast they are;
- agreement: how far they are from what is expected;
- implementations: ours and their peers, each behind one interface;
- workloads: what they are run on;
- torch_tower: the PyTorch tower, the twin of the one in `flax_models`;
- common: the console, the environment, processes, errors, result files.

`compare.torch_tower.load_vision_tower` loads the PyTorch tower.
"""
