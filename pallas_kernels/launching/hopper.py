"""When the specialised kernel takes the stream kernel's place, and what follows from that."""

from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.kernels.softmax import is_online
from pallas_kernels.launching.choose import head_split, may_specialize, window_limit
from pallas_kernels.launching.compile import HAVE_MOSAIC, local_gpus

# Tokens of a program; where its copies start, at multiples of so many rows and columns.
BLOCK = 128
ROW_UNIT, COLUMN_UNIT = 8, 16

# Heads of up to 64 columns want few registers: of the stream kernel four programs run at once.
_WIDEST_FOR_STREAM = 64
# The shortest segments' tokens: in shorter ones what a program does before and after its products
# counts for more.
_SHORTEST = 768
# The same where tokens are not by eights, and V is copied to rows that are.
_SHORTEST_COPIED = 3072
# How far programs have to fill their waves: nothing else runs meanwhile, as a multiprocessor holds
# one program. Of heads with a tail that fill whole sectors, 32 bytes of memory, further, as there
# the stream kernel is at its best. A GPU of compute capability 9.0 mostly has 132 multiprocessors.
_FULL_WITH_TAIL, _FULL_OTHERWISE = 0.75, 0.7
_MULTIPROCESSORS = 132


def is_specialized(
    dtype: DTypeLike, head_dim: int, max_seqlen: int, tokens: int, heads: int
) -> bool:
    """Whether the specialised kernel takes the stream kernel's place.

    Where Q and K are rotated beforehand.
    """
    # One program is for all GPUs here.
    capabilities = {gpu.compute_capability for gpu in local_gpus()}
    if not HAVE_MOSAIC or capabilities != {"9.0"} or not may_specialize():
        return False
    shortest = _SHORTEST if rows_of(tokens) == tokens else _SHORTEST_COPIED
    if max_seqlen < shortest or is_online(dtype, head_dim, max_seqlen):
        return False
    programs = pl.cdiv(tokens, BLOCK) * heads
    waves = pl.cdiv(programs, _MULTIPROCESSORS)
    tail_in_sectors = head_split(head_dim).tail > 0 and head_dim % 16 == 0
    fullness = _FULL_WITH_TAIL if tail_in_sectors else _FULL_OTHERWISE
    full = programs >= fullness * waves * _MULTIPROCESSORS
    return head_dim > _WIDEST_FOR_STREAM and full and fits(tokens, heads, head_dim)


def auto_fuse(
    dtype: DTypeLike, head_dim: int, rotary_dim: int, max_seqlen: int, tokens: int, heads: int
) -> str:
    """What fuse="auto" means: "qk" where one tile holds a segment, else "none" or "q".

    "q" is for heads of which only a part rotates, as a pass over Q would mostly copy. Heads of no
    multiple of 16 dims fill no whole sectors, 32 bytes of memory, before that pass: there it pays.
    The specialised kernel, which wants both rotated, makes up for it.
    """
    if max_seqlen <= window_limit(dtype, head_dim):
        return "qk"
    if rotary_dim == head_dim or head_dim % 16 > 0:
        return "none"
    return "none" if is_specialized(dtype, head_dim, max_seqlen, tokens, heads) else "q"


def fits(tokens: int, heads: int, head_dim: int) -> bool:
    """Whether the tiles fit the arrays, of 72 to 128 columns a head.

    Where a head's tile of V is wider than the head, in odd numbers it would pass the last one's.
    """
    pairs = head_dim % COLUMN_UNIT == 0 or heads % 2 == 0
    return pairs and 64 < head_dim <= 128 and tokens >= BLOCK


def rows_of(tokens: int) -> int:
    """Rows of the arrays that tiles are copied from: by eights, the last of no token."""
    return pl.cdiv(tokens, ROW_UNIT) * ROW_UNIT
