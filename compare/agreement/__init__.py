"""Whether kernels and towers agree: oracle, metrics and checks."""
