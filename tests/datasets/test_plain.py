"""Plain Python values as bytes of a column: what was packed comes back."""

import base64
import json
import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch_geometric.data import Batch, Data

from loaderkit import open_cache, pack, verify
from loaderkit.datasets.plain import count_items, from_bytes, to_bytes
from loaderkit.errors import DamagedCacheError
from loaderkit.testing import assert_same

CHARACTERS = st.sampled_from(
    ["C", "N", "é", "\0", "\ud800", "\udc00", "🧬", "\xff", '"']
)
WORDS = st.text(CHARACTERS, max_size=3)


@st.composite
def texts(draw):
    """Lists and tuples of texts, of which some, all or none occur again."""
    known = draw(st.lists(WORDS, min_size=1, max_size=8))
    count = draw(st.sampled_from([0, 1, 2, 64, 65, 300]))
    chance = random.Random(draw(st.integers(0, 99)))
    different = draw(st.sampled_from([1, 4, 256, 257, 100_000]))
    items = [
        chance.choice(known) + str(chance.randrange(different)) * (different > 1)
        for _ in range(count)
    ]
    return draw(st.sampled_from([list, tuple]))(items)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.binary(max_size=3)
    | WORDS,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(WORDS | st.integers(), inside, max_size=2)
    ),
    max_leaves=8,
)
LISTS = texts() | st.lists(PLAIN, max_size=4) | st.lists(PLAIN, max_size=4).map(tuple)


def written(value):
    """A value as Python writes it, in which 1, True and 1.0 differ."""
    return repr(value)


@pytest.mark.slow
@given(value=LISTS)
@settings(max_examples=200)
def test_a_plain_value_comes_back_type_by_type(value):
    raw = to_bytes(value)

    assert written(from_bytes("x", raw)) == written(value)
    assert count_items("x", raw) == len(value)


@pytest.mark.parametrize("different", [256, 257, 65_536, 65_537])
def test_texts_are_numbered_in_as_many_bytes_as_that_takes(different):
    items = [f"{n % different:x}" for n in range(3 * different)]

    raw = to_bytes(items)

    assert from_bytes("x", raw) == items
    assert count_items("x", raw) == len(items)
    assert len(raw) < 0.85 * len(json.dumps(items))


@pytest.mark.slow
@given(
    value=texts().filter(len),
    damage=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3
    ),
    share_left=st.floats(0, 1),
)
@settings(max_examples=200)
def test_damaged_bytes_are_a_value_or_an_error_of_ours(value, damage, share_left):
    raw = bytearray(to_bytes(value))
    for position, byte in damage:
        raw[int(position * len(raw))] = byte
    del raw[1 + int(share_left * len(raw)) :]

    for read in (from_bytes, count_items):
        try:
            read("x", bytes(raw))
        except DamagedCacheError as error:
            assert error.fix  # noqa: PT017 -- some of these bytes are values


@pytest.mark.parametrize(
    "raw",
    [b"\xffC\xff\x01", b"\xffC\xff" + b"\0" * 99 + b"\1", b"\xff\xc3", b"\xfe\x80"],
    ids=["no such text", "among many", "no text", "no text in a tuple"],
)
def test_a_number_without_its_text_is_damage(raw):
    with pytest.raises(DamagedCacheError, match="'x' is no"):
        from_bytes("x", raw)


@pytest.mark.slow
@given(fields=st.lists(texts(), min_size=1, max_size=6), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_lists_of_texts_batch_as_without_a_cache(tmp_path_factory, fields, seed):
    folder = tmp_path_factory.mktemp("t")
    graphs = [Data(x=torch.ones(2, 1), atoms=value) for value in fields]
    dicts = [{"n": 1, "atoms": list(value)} for value in fields]
    rows = random.Random(seed).choices(range(len(fields)), k=5)

    cached = pack(graphs, folder / "g.lk", workers=0)
    batch = cached.batch(rows)

    assert_same(batch, Batch.from_data_list([graphs[row] for row in rows]))
    assert [written(cached[row].atoms) for row in rows] == [
        written(graphs[row].atoms) for row in rows
    ]
    # A list is new each time: changing one changes no other.
    if isinstance(batch.atoms[0], list):
        batch.atoms[0].append("changed")
        assert written(cached[rows[0]].atoms) == written(graphs[rows[0]].atoms)

    plain = pack(dicts, folder / "d.lk", workers=0)
    samples = [dicts[row] for row in rows]
    if len({len(sample["atoms"]) for sample in dicts}) == 1:
        assert plain.batch(rows)["atoms"] == default_collate(samples)["atoms"]
    else:  # torch refuses lists of several lengths; they may be in another batch
        assert plain.batch(rows)["atoms"] == [sample["atoms"] for sample in samples]


# A cache that was packed when every list was JSON


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old"
    path.mkdir()
    (path / "manifest.json").write_text(OLD_MANIFEST)
    shard = zlib.decompress(base64.b64decode(OLD_SHARD))
    (path / "00000-895908a841516763.h5").write_bytes(shard)
    return path


def test_a_cache_of_version_3_whose_lists_are_json_opens(old):
    dataset = open_cache(old)

    assert_same([dataset[0], dataset[1]], OLD_SAMPLES)
    assert dataset.batch([1, 0])["atoms"] == [[], ["C", "N", "C", "C"]]
    assert verify(old).ok


OLD_SAMPLES = [
    {
        "atoms": ["C", "N", "C", "C"],
        "pair": ("a", "\0b"),
        "mixed": [1, None, ("x", b"y")],
    },
    {"atoms": [], "pair": ("é", "\ud800"), "mixed": [2.5, {"k": 1j}]},
]
OLD_MANIFEST = (
    '{"format": "loaderkit-cache", "version": 3, "checksum": "3a8bf6deada51ed76df'
    'a59f42b977ac9", "content": {"shards":[{"schema":{"arrays":{"@key/values":{"d'
    'type":"|u1","axes":2,"chunk_index":null},"atoms/values":{"dtype":"|u1","axes'
    '":1,"chunk_index":null},"atoms/offsets":{"dtype":"<i8","axes":1,"chunk_index'
    '":null},"mixed/values":{"dtype":"|u1","axes":1,"chunk_index":null},"mixed/of'
    'fsets":{"dtype":"<i8","axes":1,"chunk_index":null},"pair/values":{"dtype":"|'
    'u1","axes":1,"chunk_index":null},"pair/offsets":{"dtype":"<i8","axes":1,"chu'
    'nk_index":null}},"columns":{"@key":{"values":"@key/values","offsets":null,"s'
    'hapes":null,"rows":null,"bounded":false},"atoms":{"values":"atoms/values","o'
    'ffsets":"atoms/offsets","shapes":null,"rows":null,"bounded":false},"mixed":{'
    '"values":"mixed/values","offsets":"mixed/offsets","shapes":null,"rows":null,'
    '"bounded":false},"pair":{"values":"pair/values","offsets":"pair/offsets","sh'
    'apes":null,"rows":null,"bounded":false}}},"shards":1,"least":[0,0,2,8600,0,0'
    ',2,1,2368,22,3904,3,4672,78,5824,3,6656,50,7808,3,8576],"widths":[0,0,0,0,8,'
    '8,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"data":"Y2dRQagIWYnxWDewCeIiUQ=="}],"struct'
    'ure":{"variants":[["nest","dict",null,["\'atoms\'","\'pair\'","\'mixed\'"],[["leaf'
    '","atoms","json","",1,0,null],["leaf","pair","json","",1,0,null],["leaf","mi'
    'xed","json","",1,0,null]],null]],"columns":{"atoms":["atoms","json","",1,0],'
    '"pair":["pair","json","",1,0],"mixed":["mixed","json","",1,0],"@variant":["@'
    'variant","variant","int64",0,null],"@key":["@key","str","",1,0]}},"fingerpri'
    'nt":{"load":"99aa06d3014798d86001c324468d497f","keys":"e9aacbfc99241e26b537b'
    '6827b3a057a","count":2,"version":""},"made_with":{"loaderkit":"0.1.0","torch'
    '":"2.13.0+cpu","torch-geometric":"2.8.1","numpy":"2.4.6","h5py":"3.16.0"},"c'
    'ompression":null,"sources":null}}\n'
)
OLD_SHARD = (
    "eNrtmM9P2zAUx+1moAIqv0RLVTFkfJg4VFVaCQmQkIKgqKduMA6TshzKGiREGRNtEQhVypXbjjvy"
    "p+RP2X/C7Npuaq+DNOsmGvxtlddnP9mp/Pw+Tu4r+wep6dw0oEomwRswD/r1yPVjTfZFv8ct5NYX"
    "HQYIJdj9AJDl/gKfP+w4x0flMh3lUVHv/iaZRUBL63dVyrsfqP3E/XVukZJ31rl7S22tdXnRJPbi"
    "7MatE/utdnbVn//mkPP/Mf/F/JN/mf9TzCb1UmuFyH9R/ZGSd9e1RtttBnleGdH8H6vv9yGhjshP"
    "z1B4ouyDHp1m5DiL+16KWbGfvEVlPO6DtMwFKyfHedz3V+K9/hBMsP8Mhc8qIEywhoTCd9U3yIpA"
    "vi6wr9JMEEv9BISQtWa7vgGtKXkk9SQxXjKLo8h/GNRnXaj/c/4P5q9aTyLzd04vq1Z4/oo8fEgN"
    "5u/l6WnTbTUD7o28/rM74GUbZHhcJnq9n5NHEPoei/Wz8R7OI1yllz12cWxn2PqfCM41C0/H9+rI"
    "rN47/+b8I+e/obyG6OV/UqyF9Vz+L8o7O175L7QEBu/yyM+/yjk9Kn+tZc1freH5i9Ivg79VHleN"
    "zF8/I48QM/4W8+hru9HIozvcwtvIxjeY/j4hv7F7uLODO07HsUuFDdpapxE2Pu+GfKGOWTDzqFgw"
    "SRD5Rn1+C/jtZ8Px20vrvTce/Aa518Dvd2BwlYjK77Dvz57jt7+q+a01PL9/rrwMfpd4XCkyv71V"
    "eYR41R9B7Rp9dv7cNolOsNMRzbTF3WJ99U3TJF1P89dC4fhrvdV7Zzz46629Bv4uK3XiFzTL28k="
)
