"""Write once, map many: samples as columns in ordinary HDF5 files.  Never torch.

Read layout.py first: it is pure, and says what a cache directory holds.  columns.py
collects samples into the columns of a shard; hdf5.py lays a shard out and writes it;
build.py makes whole caches that survive kill -9.  store.py opens one; gather.py, pure,
copies a batch of rows out of it; verify.py and inspect.py tell what is in there.
"""
