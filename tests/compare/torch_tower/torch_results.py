"""What a call of the PyTorch tower returns, as its tests look at it."""

from tests.tower_contract import side_by_side


def numpy(tensor):
    return tensor.float().cpu().numpy()


def rows(tower, patches, grid):
    """A row for each merged token: the embedding, and the features beside it."""
    return side_by_side(tower(patches, grid), numpy)


def tensors(result):
    """All that a call returns."""
    embeddings, features = result if isinstance(result, tuple) else (result, ())
    return (embeddings, *features)
