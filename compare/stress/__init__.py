"""Kernels and towers under stress."""
