"""How fast are kernels and towers, on the GPU of this machine?

- What is measured: `kernels` and their peers, `rotation` as a pass of its own, every way of
  `fusion` (with `fusion_table`), `towers`, and at `scale` the encoding of folders.
- By which clocks: `timing` by CUDA graphs and by wall time, `jax_profiler`; `kernel_timing` puts
  one kernel's time beside the error of what was timed, `ceilings` says what the GPU could do.
- `tune` finds the fastest launches, among those of `tuning_cases`, for the packages' tables.
"""
