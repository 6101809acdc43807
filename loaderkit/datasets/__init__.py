"""Datasets whose samples are copies: what you do to one never reaches the others.

Read base.py (SafeDataset) and graphs.py (SafeGraphDataset) first; open.py makes one
from a cache, pack.py makes the cache.  structure.py, encode.py and decode.py are how a
sample becomes columns and a sample again; gathering.py, batches.py and dict_batches.py
make whole batches from columns.  owned_copy.py is copy-on-read itself, with its proof.
"""
