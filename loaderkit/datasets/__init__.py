"""Datasets whose samples are copies: what you do to one never reaches the others.

Read safe.py (SafeDataset and SafeGraphDataset) first, with base.py and graphs.py, which
hold what they do.  open.py makes one from a cache, pack.py makes the cache.  kinds.py
is the table of what samples can be made of: a row says how values of a kind are
written, read, joined and shown.  structure.py, encode.py and decode.py are how a sample
becomes columns and a sample again, compiled_encoding.py how the next of its kind does
so sooner; gathering.py, batches.py and dict_batches.py make whole batches from columns.
owned_copy.py is copy-on-read itself, with its proof.
fingerprint.py tells when a cache is stale.
"""
