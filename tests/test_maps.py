"""The memory maps of compiled programs are given back before a process runs out of them."""

import numpy as np
import pytest

from tests import maps

jax = pytest.importorskip("jax")


@pytest.mark.skipif(maps.count() == 0, reason="this system does not tell a process's memory maps")
def test_maps_of_compiled_programs_are_given_back():
    x = jax.device_put(np.arange(8), jax.devices("cpu")[0])  # for a GPU XLA maps nothing
    maps.give_back(most=0)  # or an earlier test's would go meanwhile
    before = maps.count()
    programs = [jax.jit(lambda x, n=n: x[::-1] * n) for n in range(8)]
    for program in programs:
        program(x)
    compiled = maps.count()
    assert compiled >= before + len(programs)
    maps.give_back(most=compiled)
    assert maps.count() == compiled
    maps.give_back(most=compiled - 1)
    assert maps.count() <= compiled - len(programs)
    assert programs[3](x)[0] == 3 * 7  # what is forgotten is compiled again
