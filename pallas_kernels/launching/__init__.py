"""Which kernel, which tiles, and the launch."""
