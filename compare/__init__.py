"""Holding the kernels and towers against each other, against fp64 and against their peers.

The command line is `python -m compare`; `compare.torch_tower.load_vision_tower` is the PyTorch
twin of `flax_models.load_vision_tower`. Start with `cli`, which has the options, and `parts`, which
says what each part of the command line does. Each part has modules of its own:

- agreement: `agreement` of the kernels, `tower_agreement`;
- kernels: `kernel_bench`, and `rotation` as a pass of its own;
- fusion: `fusion`, with `fusion_table`;
- towers, integration: `tower_bench`;
- tune: `tune`, with `tuning_cases`;
- trust: `trust` and the modules named after it, with `guards` around tensors;
- report: `report`, from the tables in `check_tables`, `timing_tables`, `fusion_table` and `glance`,
  the `charts`, and `families` and `markdown`, which those share.

They share:

- what is run: `workloads`, `tower_workloads` and their `photographs`; our kernels in
  `implementations`, the others in `peers_torch` and `peers_jax`; libraries' attention in `varlen`;
  `towers`, Hugging Face's in `huggingface`; `arrays`, which carries inputs from one framework to
  another;
- what is right: the fp64 `oracle`, the `yardstick` made of it, and the rules in `metrics`;
- how time is taken: `kernel_timing` by the clocks in `timing` and `profiling`, after a `warm_up`,
  beside the `ceilings` of the GPU;
- the rest: `results`, the files that are written and read; `environment`, `console`, `errors`.

The PyTorch tower is in `torch_tower`, `torch_blocks`, `torch_attention`, `torch_gated` and
`torch_gated_product`, which mirror the Flax tower's modules, and in `torch_graphs`, `torch_inputs`
and `torch_device`.
"""
