"""Shards as they could have been packed, and tables of them with numbers changed."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from loaderkit.cache.layout import Array, Column, Shard, check_shard, shard_name
from loaderkit.cache.shard_table import ShardGroup, ShardTable

NUMBERS = st.integers(0, 300) | st.integers(0, 1 << 40)
"""Rows of arrays."""


@st.composite
def sound_shards(draw, number):
    """A shard that could have been packed, of any fields."""
    samples = draw(st.integers(0, 300))
    arrays, columns, end = {}, {}, 64

    def add(name, dtype, *shape):
        nonlocal end
        array = Array(dtype, shape, offset=end + 64 * draw(st.integers(0, 3)))
        arrays[name] = array
        end = array.offset + -(-array.nbytes // 64) * 64
        return name

    def compressed(name, dtype, *shape):
        rows = draw(st.integers(1, 9))
        index = add(f"{name}/chunks", "<i8", -(-shape[0] // rows), 3)
        arrays[name] = Array(dtype, shape, None, chunk_rows=rows, chunk_index=index)
        return name

    for name in draw(st.sets(st.sampled_from("abc"))):
        rows, held = None, samples
        if draw(st.booleans()):
            held = draw(st.integers(0, samples))
            rows = add(f"{name}/rows", "<i8", held)
        put = draw(st.sampled_from([add, compressed]))
        trailing = draw(st.lists(st.integers(0, 5), max_size=2))
        kind = draw(st.sampled_from(["dense", "ragged", "shaped"]))
        if kind == "dense":
            values = put(f"{name}/values", "<f4", held, *trailing)
            columns[name] = Column(values, rows=rows)
            continue
        offsets = add(f"{name}/offsets", "<i8", held + 1)
        if kind == "ragged":
            total = draw(NUMBERS)
            values = put(f"{name}/values", "|u1", total, *trailing)
            columns[name] = Column(values, offsets, rows=rows)
        else:
            shapes = add(f"{name}/shapes", "<i8", held, draw(st.integers(0, 4)))
            values = put(f"{name}/values", "<f8", draw(NUMBERS))
            columns[name] = Column(values, offsets, shapes, rows)
    if draw(st.booleans()):
        bound = st.integers(-(1 << 63), (1 << 63) - 1)
        add("n", "<i2", samples)
        columns["n"] = Column("n", low=draw(bound), high=draw(bound))
    xxh3 = draw(st.binary(min_size=16, max_size=16)).hex()
    size = end + draw(st.integers(0, 1 << 40))
    shard = Shard(shard_name(number, xxh3), samples, size, xxh3, arrays, columns)
    check_shard(shard)
    return shard


@st.composite
def caches(draw):
    """The shards of a cache, several of a kind."""
    kinds = draw(st.lists(sound_shards(number=0), min_size=1, max_size=3))
    shards = []
    for number in range(draw(st.integers(1, 8))):
        shard = draw(st.sampled_from(kinds))
        xxh3 = draw(st.binary(min_size=16, max_size=16)).hex()
        grown = shard.bytes + draw(st.integers(0, 1 << 40))
        file = shard_name(number, xxh3)
        shards.append(replace(shard, file=file, xxh3=xxh3, bytes=grown))
    return shards


WRONG = [-1, 0, 1, 2, 3, 63, 64, 65, 4096, 1 << 20, (1 << 20) + 1, 1 << 32, 1 << 40]
WRONG += [(1 << 61) - 1, 1 << 61, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63)]


@st.composite
def changed_tables(draw):
    """A table with some numbers changed, as they can be written."""
    groups = []
    for group in ShardTable.of(draw(caches())).groups:
        numbers = [np.array(vector) for vector in group.numbers]
        for _ in range(draw(st.integers(0, 2))):
            vector = draw(st.sampled_from(numbers))
            row = draw(st.integers(0, len(vector) - 1))
            near = int(vector[row]) + draw(st.integers(-64, 64))
            near = min(max(near, -(1 << 63)), (1 << 63) - 1)
            vector[row] = draw(st.sampled_from([*WRONG, near]))
        groups.append(ShardGroup(group.schema, numbers))
    return groups


def fault_of(groups):
    """Say what is wrong with a table by looking at each shard as an object."""
    shards = [group.shard(row) for group in groups for row in range(len(group))]
    for shard in shards:
        try:
            check_shard(shard)
        except ValueError as error:
            return str(error)
    positions = [at for group in groups for at in group.positions.tolist()]
    if sorted(positions) != list(range(len(shards))):
        return "positions"
    if len({shard.file for shard in shards}) < len(shards):
        return "names"
    if sum(shard.samples for shard in shards) >= 1 << 62:
        return "samples"
    return ""
