"""Names of files in a mirror: what is read from a name is what it was made of."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loaderkit.cache.layout import ShardFile, shard_name
from loaderkit.cache.mirror_folder import GenerationFolder


def shard_of(number, xxh3, nbytes):
    return ShardFile(shard_name(number, xxh3), 1, nbytes, xxh3)


SHARDS = st.builds(
    shard_of,
    st.integers(0, 10**6),
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.integers(0, 2**63 - 1),
)
TURNS = st.integers(0, 9)


@given(st.sets(st.tuples(SHARDS, TURNS), max_size=4))
def test_partial_files_are_known_by_their_names_and_no_others_are(downloads):
    """Others: notes, stamps, small files that are being written."""
    with tempfile.TemporaryDirectory() as name:
        folder = GenerationFolder(Path(name))
        folder.make()
        partials = {folder.partial(shard, turn) for shard, turn in downloads}
        small_files = ["manifest.json", "sources-0123456789abcdef.json"]
        for partial in partials:
            partial.path.touch()
            folder.stamp(partial.shard).touch()
            note = folder.failure_note(partial.shard)
            note.touch()
            small_files.append(note.name)
        unfinished = {folder.unfinished(small_file) for small_file in small_files}
        for file in unfinished:
            file.touch()

        assert {*folder.list_partials()} == partials
        assert {*folder.list_unfinished()} == unfinished | {p.path for p in partials}
