"""The errors that bad files raise, apart from the modules that raise them: both are ValueErrors."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what was expected."""


class ImageError(ValueError):
    """An image that cannot be used; the message names the image and what was expected."""
