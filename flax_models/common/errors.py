"""The errors that bad files raise; both are ValueErrors."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what was expected."""


class ImageError(ValueError):
    """An image that cannot be used; the message names the image and what was expected."""
