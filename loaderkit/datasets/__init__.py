"""Datasets whose samples are copies: what you do to one never reaches the others.

Read safe.py (SafeDataset and SafeGraphDataset) first, with base.py and graphs.py, which
hold what they do.  open.py makes one from a cache, pack.py makes the cache.  kinds.py
is the table of what samples can be made of: a row says how values of a kind are
written, read, joined and shown.  structure.py, encode.py and decode.py are how a sample
becomes columns and a sample again, compiled_encoding.py how the next of its kind does
so sooner; gathering.py, batches.py and dict_batches.py make whole batches from columns.
owned_copy.py is copy-on-read itself, with its proof.
fingerprint.py tells when a cache is stale.

What else there is, by what you look for:

* What a dataset can do: opened.py is the cache behind it; cached_samples.py,
  sample_reading.py and batch_joining.py are its three parts; selecting.py, mapping.py,
  concat.py (with renaming.py) and inspect.py its calls; absent.py and missing_fields.py
  what it says of what it lacks, taken_names.py of names that a subclass may not have,
  assigned_options.py of options that are set as attributes.  page.py shows it as a
  page.
* Keys and rows: rows.py (numbers, however written), key_index.py, key_texts.py,
  compact_keys.py, compositions.py (torch's concatenations and subsets).
* Packing: sources.py, pt_folder.py and streams.py (what can be packed;
  shared_iterators.py looks at spans), pack_options.py, then packing.py, which makes a
  run: packing_run.py of a source, packing_streams.py of a stream.  shard_plan.py says
  what goes into which shard.  packing_tasks.py and packing_stream_tasks.py are what is
  done in a process, reading_turns.py which of its threads reads; packing_workers.py and
  packing_executors.py are the processes, packing_team.py what bears their loss,
  packing_failures.py their errors, own_samples.py who may not wait for a run,
  shard_filling.py and block_readers.py the work itself, progress.py the bar.
* Whether a cache is what would be packed: freshness.py, with source_files.py,
  function_source.py, state_hash.py and value_texts.py; soundness.py holds a manifest
  against itself.
* What samples consist of: column_names.py, classes.py, containers.py, composites.py,
  dtypes.py, plain.py.
* Batches: ragged.py, ragged_answers.py and ragged_fields.py, list_forms.py, padding.py
  and pad_names.py, graph_fields.py, sizes.py, collate_errors.py; lazy.py and
  many_samples.py (samples of a batch, one by one), plain_columns.py, arena.py and
  room.py (the memory that a batch is made in).
"""
