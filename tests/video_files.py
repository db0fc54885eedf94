"""Small video files for the tests, which are skipped without PyAV."""

import os

import numpy as np
import pytest


def write_video(path, frames, fps=10, codec="mpeg4"):
    """Write a file with PyAV; the frames that are in it, as it decodes them."""
    av = pytest.importorskip("av")
    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return decode(path)


def decode(path):
    """All frames of a file, uint8 [frames, height, width, 3]."""
    av = pytest.importorskip("av")
    with av.open(os.fspath(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
