"""A tower that takes no time to load, for tests of what is around it.

Files in the checkpoint's directory have it do other things: "slow" lets each call take half a
second, "fatal" its process be killed in the first one, once.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np

from flax_models import VisionConfig
from flax_models.ray_data.patches import Preprocessing


def load(checkpoint, dtype, token_buckets):
    config = VisionConfig.from_pretrained(checkpoint)
    if Path(checkpoint, "broken").exists():
        raise ValueError("the stand-in is broken")

    def encode(pixel_values, grid_thw, output):
        if Path(checkpoint, "slow").exists():
            time.sleep(0.5)
        if Path(checkpoint, "fatal").exists():
            Path(checkpoint, "fatal").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [means(config, pixel_values)]

    return encode


def means(config, pixel_values):
    """Of each merge unit the mean of its patches, their first `out_hidden_size` values."""
    size = config.out_hidden_size
    patches = np.asarray(pixel_values, np.float32)[:, :size]
    return patches.reshape(-1, config.merge_unit, size).mean(axis=1)


class Poisonable(Preprocessing):
    """There is content over which the process dies, as over a fault of a decoder."""

    def __call__(self, item):
        if item == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(item)
