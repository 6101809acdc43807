"""What objects refer to, as searches for holders ask it."""

import asyncio
import gc
import sys
import types

import numpy as np

from loaderkit.memory.tensors import objects_in_array, referents_of


class OwnAttributes(types.ModuleType):
    """A module as lazy loaders make them: to ask for an attribute imports."""

    def __getattribute__(self, name):
        raise ImportError(name)


def test_a_module_refers_to_its_variables_and_to_nothing_that_its_c_code_shows():
    module, lazy = types.ModuleType("module"), OwnAttributes("lazy")
    module.items, items = [], [1, []]

    referents = referents_of([module, items, lazy])

    expected = [*items, vars(module), object.__getattribute__(lazy, "__dict__")]
    assert sorted(map(id, referents)) == sorted(map(id, expected))


def test_other_objects_refer_to_what_the_collector_says():
    objects = [{"a": []}, (1, "b"), test_other_objects_refer_to_what_the_collector_says]

    assert list(map(id, referents_of(objects))) == list(
        map(id, gc.get_referents(*objects))
    )


async def wait_for_several():
    """Leave freed iterators of futures behind, as every program with asyncio does."""

    async def wait_for(future):
        return await future

    futures = [asyncio.get_running_loop().create_future() for _ in range(5)]
    tasks = [asyncio.ensure_future(wait_for(future)) for future in futures]
    await asyncio.sleep(0)
    for future in futures:
        future.set_result(1)
    await asyncio.gather(*tasks)


def test_what_asyncio_has_freed_is_not_referred_to():
    asyncio.run(wait_for_several())
    module = sys.modules["_asyncio"]

    # Asked of the collector itself, Python 3.12 lists the same freed objects for ever.
    assert [id(item) for item in referents_of([module])] == [id(vars(module))]


def test_an_array_that_is_broadcast_holds_its_objects_once():
    text = "x" * 20
    item = np.array([text, "y", 3, None], dtype=object)

    assert objects_in_array(np.broadcast_to(item[:1], (10**12,))) == [text]
    assert objects_in_array(np.broadcast_to(item, (10**9, 4))) == [text, "y"]
    assert objects_in_array(np.broadcast_to(item[:0], (10**9, 0))) == []
    assert objects_in_array(item.reshape(2, 2).T) == [text, "y"]
    assert objects_in_array(np.array(text, dtype=object)) == [text]
