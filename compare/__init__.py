"""Holding the kernels and towers against each other, against fp64 and against their peers.

The command line is `python -m compare`; `compare.torch_tower.load_vision_tower` is the PyTorch
twin of `flax_models.load_vision_tower`.

- The command line: `cli` has the options, `parts` what each part does; `console`, `environment`,
  `errors`.
- The PyTorch tower: `torch_tower`, `torch_blocks` and `torch_attention` mirror the Flax tower's
  modules; `torch_graphs`, `torch_inputs`, `torch_device`.
- What is run: `workloads`, `tower_workloads` and their `photographs`; our kernels in
  `implementations`, the others in `peers_torch` and `peers_jax`; `towers`, with Hugging Face's in
  `huggingface`; `arrays` go from one framework to another.
- What is right: `oracle`, the `yardstick` made of it, the rules in `metrics`; `agreement` and
  `tower_agreement` apply them.
- How long it takes: `kernel_bench`, `rotation`, `fusion`, `tower_bench`, `integration` and `tune`
  (with `tuning_cases`), by `warm_up`, `kernel_timing`, `timing` and `profiling`, beside the
  `ceilings`.
- What it endures: `trust` and the modules named after it, `guards`.
- What is reported: `results` are the files; `report` makes Markdown and `charts` of them, by
  `families`, `markdown` and the modules named `*_table` and `*_tables`.
"""
