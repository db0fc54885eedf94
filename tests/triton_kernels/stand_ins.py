"""What stands in for a GPU where tests have none: Triton's driver, and a Hopper GPU's launches."""

from triton_kernels.launching.choose import LaunchSource, launch_source
from triton_kernels.launching.table import Gpu

H200, H100, A100 = Gpu("NVIDIA H200", "9.0"), Gpu("NVIDIA H100", "9.0"), Gpu("A100", "8.0")


class Driver:
    """Stands in for Triton's driver, which wants a GPU."""

    class active:
        """The driver in use."""

        get_current_stream = staticmethod(lambda device: "stream")


def hopper(gpu=H200, warp_specialized=True):
    """Where launches come from on a GPU."""
    return LaunchSource(launch_source(None).table, gpu, warp_specialized)
