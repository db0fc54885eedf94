"""The errors that bad files raise; both are ValueErrors."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what was expected."""


class ImageError(ValueError):
    """An image or clip that cannot be used; the message names it and what was expected."""
