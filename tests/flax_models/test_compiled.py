"""What a call hands to the tower's program, and when it is asked whether that is right."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from flax_models import encode, load_vision_tower  # noqa: E402
from flax_models.compiled import COMPILER_OPTIONS, Jitted  # noqa: E402
from flax_models.packed import pack, unpack  # noqa: E402
from tests.tower_checkpoints import GRIDS, SMALL_TOWERS, random_patches, write_checkpoint  # noqa: E402

CONFIG = SMALL_TOWERS["head_dim_16"]
GRID = GRIDS["smaller_than_a_window"]
PATCHES = random_patches(CONFIG, GRID)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tower"), CONFIG)
    return load_vision_tower(directory, jnp.bfloat16)


@pytest.fixture
def tower(loaded):
    return nnx.clone(loaded)


@pytest.fixture(scope="module")
def expected():
    """What the program makes of a tower that is handed to it parameter by parameter."""
    program = jax.jit(encode, compiler_options=COMPILER_OPTIONS)

    def result(tower):
        rows = len(PATCHES) // CONFIG.merge_unit
        return np.asarray(program(tower, *tower.prepare(PATCHES, GRID))[:rows])

    return result


@pytest.fixture
def handed(monkeypatch):
    """The number of arrays of each launch."""
    numbers = []
    launch = Jitted.__call__

    def counted(self, *arguments):
        if isinstance(arguments[0], list):
            numbers.append(len(jax.tree.leaves(arguments)))
        return launch(self, *arguments)

    monkeypatch.setattr(Jitted, "__call__", counted)
    return numbers


def test_small_parameters_go_as_one_array_whose_values_are_the_latest(tower, expected, handed):
    values = jax.tree.leaves(tower)
    small = sum(value.ndim == 1 for value in values)
    assert small > len(values) / 2
    np.testing.assert_array_equal(tower(PATCHES, GRID), expected(tower))
    tower.blocks[1].norm1.weight[...] *= 2
    changed = np.asarray(tower(PATCHES, GRID))
    np.testing.assert_array_equal(changed, expected(tower))
    nnx.update(tower, jax.tree.map(lambda value: value * 0.5, nnx.state(tower)))
    halved = np.asarray(tower(PATCHES, GRID))
    np.testing.assert_array_equal(halved, expected(tower))
    assert (halved != changed).any()
    of_layout = len(jax.tree.leaves(tower.prepare(PATCHES, GRID)))
    assert handed == [len(values) - small + 1 + of_layout] * 3


def test_a_changed_tower_is_launched_again(tower, expected, handed):
    tower(PATCHES, GRID)
    old = tower.merger.fc2.weight
    tower.merger.fc2.weight = nnx.Param(old[...] * 2)
    np.testing.assert_array_equal(tower(PATCHES, GRID), expected(tower))
    assert len(handed) == 3
    replaced = tower.merger.fc1.weight
    tower.merger.fc1.weight = nnx.Param(replaced[...] * 2)
    replaced.get_raw_value().delete()  # as where an optimizer's step is given it as its own
    np.testing.assert_array_equal(tower(PATCHES, GRID), expected(tower))
    tower.merger.fc1.weight.get_raw_value().delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        tower(PATCHES, GRID)


def test_what_is_packed_keeps_its_bits():
    bits = np.arange(2**16, dtype=np.uint16)
    values = [
        jnp.asarray(bits[1000:].view(jnp.bfloat16)),
        jnp.ones((2, 3), jnp.bfloat16),
        jnp.ones(4, jnp.float32),
        jnp.asarray(bits.view(np.float16)),
    ]
    packed = pack(values)
    assert packed.left == (1, 2)
    assert packed.holds(values)
    assert not packed.holds([value + 0 for value in values])
    unpacked = jax.jit(unpack, static_argnums=0)(packed.places, packed.array, packed.others(values))
    for before, after in zip(values, unpacked, strict=True):
        assert after.dtype == before.dtype
        finite = ~jnp.isnan(before)
        np.testing.assert_array_equal(jnp.isnan(after), ~finite)
        bits_after, bits_before = (np.asarray(x)[finite].view(np.uint8) for x in (after, before))
        np.testing.assert_array_equal(bits_after, bits_before)


def test_what_does_not_lie_on_one_device_is_left_as_it_is():
    mesh = jax.make_mesh((1,), ("x",))
    values = [jnp.ones(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)]
    divided = jax.device_put(values[0], NamedSharding(mesh, PartitionSpec("x")))
    assert pack([*values, divided]).array is None

    @jax.jit
    def traced(value):
        assert pack([*values, value]).array is None
        return value

    traced(values[0])
    committed = jax.device_put(values[0], jax.devices()[0])
    assert pack([*values, committed]).others([*values, committed]) == [*values, committed]
