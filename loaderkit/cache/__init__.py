"""Write once, map many: samples as columns in ordinary HDF5 files.  Never torch.

Read layout.py first: it is pure, and says what a cache directory holds; so are
shard_table.py, which holds what is known of all shards, and manifest.py.  columns.py
collects samples into the columns of a shard; hdf5.py lays a shard out and writes it;
build.py makes whole caches that survive kill -9, with what build_notes.py keeps of each
shard, in a folder that build_folder.py makes, checks and locks.

store.py opens one.  shards.py hashes, maps and watches its files; column_reader.py
reads a column from all of them, in column_parts.py whose shards are one array, at the
addresses that placement.py, pure, chooses in an address_space.py; gather.py, pure,
copies a batch of rows.  verify.py tells what is in there.

storage.py says what is asked of a place where whole shards live that is not this
machine: object_store.py is every file system of fsspec, whose errors store_answers.py
reads, folder_storage.py a slow disk, and remote.py opens them by URL, as
remote_manifest.py does their manifests.  mirror.py keeps their shards on local disk, in
folders that mirror_folder.py describes: mirror_room.py makes room, mirror_locks.py lets
one process at a time download a shard, and shard_download.py does.  leases.py says
which shards are in use, announcements.py which are on their way, mirrored_shards.py
what this process has mapped, and download_ahead.py fetches what is read next.

transfer.py copies whole caches; which process may remove files of them there is in
claims.py, and what is not whole there in unfinished.py.  lock_files.py has the locks of
folders and shards, process_identity.py says who holds them, durable.py writes files
that appear whole, and verified.py knows what this machine has hashed.
chunks.py and codecs.py read compressed arrays; parsed.py takes JSON for what it must
be; stored_arrays.py measures a cache on disk, stored_files.py goes through one in a
store, and s3_session.py makes clients of S3.
Tests of any storage are in loaderkit.testing.
"""
