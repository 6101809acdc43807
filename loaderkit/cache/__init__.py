"""Write once, map many: samples as columns in ordinary HDF5 files.  Never torch.

Read layout.py first: it is pure, and says what a cache directory holds; so are
shard_table.py, which holds what is known of all shards, and manifest.py.  columns.py
collects samples into the columns of a shard; hdf5.py lays a shard out and writes it;
build.py makes whole caches that survive kill -9.

store.py opens one.  shards.py hashes, maps and watches its files; column_reader.py
reads a column from all of them as one array, at the places that placement.py, pure,
finds for them in an address_space.py; gather.py, pure, copies a batch of rows.
verify.py tells what is in there.
"""
