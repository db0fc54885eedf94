"""Timing: kernels, towers, fusing, rotation, tuning."""
