"""Names that other libraries give to what we have under another, or elsewhere.  Pure.

Users of torch, PyG, Hugging Face, Lightning and sklearn reach for the names they know.
Where a function of ours has no such keyword, or the front door no such name, the error
says what to use.  ``datasets/absent.py`` is the same for attributes of datasets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


# A comment in the tables below says whose names follow, where they are one library's.
# tests/test_habits.py asks those that are installed for all their names, and fails
# where a release has a new one.
class Hint(NamedTuple):
    """What to use in place of a name that is not here."""

    fix: str
    """As code."""
    why: str = ""
    """Why it is not here; empty where it is, under another name."""


def _hints(names: str, hint: Hint) -> dict[str, Hint]:
    """Give several names the same hint."""
    return dict.fromkeys(names.split(), hint)


_BY_ROWS = "samples are chosen by their rows, and joined by what reads them"
_NO_FILES = "no file is written for a choice of rows"
_FILES_OF_CHOICES = (
    "keep_in_memory indices_cache_file_name writer_batch_size new_fingerprint"
)
_WRITTEN = "a result is printed, or written as a page"
_OF_DATASET = "a dataset knows how its own fields are joined"
_OF_SAMPLES = "what is done to each sample is the dataset's"
_OF_LOADER = "batches are the loader's"
_NO_BUFFER = "all rows are shuffled, and not those of a buffer"
_MAPPED = "a cache is mapped from disk, and the kernel keeps in memory what is used"
_MADE_BY_LOAD = "keys() names the samples and load(key) makes one, once"
_OPTIONS_FROM = "from loaderkit.datasets.pack import PackOptions"
_NO_SPLITS = "a cache has rows and no splits"
_OF_WINDOWS = "which windows there are is said by keys(), and load(start) cuts one"
_OF_RANKS = "the loader knows its rank, and trainers do not shard it again"
_OF_ONE_GRAPH = "it samples from one graph; this loader joins many"
_LENGTHS_ARE_KNOWN = (
    "a cache knows the lengths of its samples, and needs no field of them"
)
_SAMPLES_FIRST = "a padded batch is [samples, length, ...]"
_BOUNDS_OF_BUCKETS = "where a bucket begins follows from the sizes of the samples"
_JOINED_BY_PYG = "graphs are joined as PyG joins them, without padding"

_DTYPES = "fields keep the dtypes that the samples have"
_TENSORS_AS_TENSORS = "tensors are stored as tensors, arrays as arrays"

_LENGTHS = (
    "length lengths len seq_len seq_lens seqlen seq_length sequence_length "
    "sequence_lengths rows frames steps words"
)

SIZE_NAMES: Mapping[str, frozenset[str]] = {
    "tokens": frozenset(_LENGTHS.split()),
    "nodes": frozenset({"atoms", "num_atoms", "vertices", "residues"}),
    "edges": frozenset({"bonds", "num_bonds", "links"}),
    "bytes": frozenset({"nbytes", "memory", "size", "size_in_bytes"}),
}
"""What other libraries and fields call the sizes of samples, by our name."""

_BUILD_LOADER: Mapping[str, Hint] = {
    **_hints(
        "ragged pad_value padding padding_value pad_token_id",
        Hint(
            'build_loader(open_cache(path, ragged="padded", pad_value=0))', _OF_DATASET
        ),
    ),
    **_hints(
        "transform transforms pre_transform",
        Hint("open_cache(path, transform=f), or batch_transform=f", _OF_SAMPLES),
    ),
    **_hints(
        "bs batch per_device_train_batch_size per_device_eval_batch_size "
        "train_batch_size samples_per_batch max_samples max_graphs max_num_graphs",
        Hint("batch_size=32"),
    ),
    **_hints(
        "workers n_workers nworkers num_proc n_jobs num_threads "
        "dataloader_num_workers max_workers",
        Hint("num_workers=2, or leave it to the plan"),
    ),
    **_hints("random_state rng random_seed manual_seed data_seed", Hint("seed=0")),
    **_hints("collate collator data_collator collate_function", Hint("collate_fn=f")),
    **_hints("num_replicas world num_ranks num_shards", Hint("world_size=2, rank=0")),
    **_hints("local_rank global_rank shard_id shard_index", Hint("rank=0")),
    # torch's meshes, where several ranks share one model
    **_hints(
        "mesh device_mesh dp_mesh process_group group dp_group",
        Hint(
            "rank=data.get_local_rank(), world_size=data.size(), of the mesh data",
            "ranks that share one model are given the same batches",
        ),
    ),
    "pin_memory_device": Hint('build_loader(dataset, "cuda", pin_memory=True)'),
    **{
        f"max_{prefix}{name}": Hint(f"max_{size}=10_000")
        for size, names in SIZE_NAMES.items()
        for name in (size, *names)
        for prefix in ("", "num_", "n_", "total_")
        if (prefix, name) != ("", size)
    },
    # Of one sample, as in Hugging Face's tokenizers
    **_hints(
        "max_length max_len max_seq_len max_seqlen max_seq_length max_sequence_length",
        Hint(
            "build_loader(dataset[dataset.sizes().tokens <= 512]), or cut samples in "
            "transform=; max_tokens=10_000 for a batch",
            "samples are kept whole, and limits are those of batches",
        ),
    ),
    # PyG's DynamicBatchSampler, whose ``num`` are nodes unless ``mode`` says "edge"
    **_hints("max_num mode num_nodes", Hint("max_nodes=1000")),
    "num_edges": Hint("max_edges=10_000"),
    "token_budget": Hint("max_tokens=10_000"),
    **_hints("dtype dtypes precision half", Hint("batch_transform=f", _DTYPES)),
    **_hints(
        "format output_format return_tensors", Hint("drop it", _TENSORS_AS_TENSORS)
    ),
    **_hints("filter filter_fn", Hint("build_loader(dataset.filter(f))", _BY_ROWS)),
    **_hints("skip_too_big", Hint('oversized="skip"')),
    **_hints("group_by_length", Hint('bucket_by="tokens"')),
    "length_column_name": Hint('bucket_by="tokens"', _LENGTHS_ARE_KNOWN),
    # torch's and TensorFlow's
    **_hints(
        "batch_first time_major",
        Hint("padded.values.transpose(0, 1) in batch_transform=f", _SAMPLES_FIRST),
    ),
    **_hints(
        "bucket_boundaries boundaries bucket_batch_sizes bucket_sizes bucket_size",
        Hint('bucket_by="tokens", buckets=8', _BOUNDS_OF_BUCKETS),
    ),
    **_hints(
        "dataloader_drop_last drop_remainder drop_last_batch skip_last",
        Hint("drop_last=True"),
    ),
    **_hints(
        "distributed use_distributed_sampler ddp",
        Hint(
            "drop it; rank=0, world_size=2 where there is no process group",
            "ranks are found out from torch.distributed or the launcher",
        ),
    ),
    **_hints(
        "tokenizer processing_class",
        Hint("pack(dataset.map(tokenize).with_format('torch'), path)", _OF_SAMPLES),
    ),
    **_hints(
        "stride hop hop_length step_size",
        Hint("def keys(self): return range(0, length - width, stride)", _OF_WINDOWS),
    ),
    **_hints("dataloader_prefetch_factor prefetch", Hint("prefetch_factor=2")),
    **_hints(
        "epochs num_epochs num_train_epochs",
        Hint("for epoch in range(2): for batch in loader", "a loader is one epoch"),
    ),
    **_hints(
        "num_steps max_steps",
        Hint("itertools.islice(loader, 100)", "a loader is one epoch"),
    ),
    **_hints(
        "stratify weights class_weights",
        Hint("sampler=torch.utils.data.WeightedRandomSampler(weights, len(weights))"),
    ),
    **_hints(
        "window window_size seq_len sequence_length lookback context_length horizon",
        Hint("open_cache(path, transform=f), where f cuts a window", _OF_SAMPLES),
    ),
    "split": Hint('dataset.train_test_split(0.1)["train"]', _NO_SPLITS),
    # PyG's loaders of one large graph
    **_hints(
        "num_neighbors input_nodes input_time input_id is_sorted replace disjoint "
        "subgraph_type directed temporal_strategy time_attr weight_attr "
        "filter_per_worker transform_sampler_output custom_cls neighbor_sampler "
        "node_sampler edge_index node_idx sizes return_e_id",
        Hint("torch_geometric.loader.NeighborLoader(graph, ...)", _OF_ONE_GRAPH),
    ),
    **_hints(
        "link_sampler edge_label edge_label_index edge_label_time neg_sampling "
        "neg_sampling_ratio",
        Hint("torch_geometric.loader.LinkNeighborLoader(graph, ...)", _OF_ONE_GRAPH),
    ),
    **_hints(
        "cluster_data num_parts",
        Hint("torch_geometric.loader.ClusterLoader(...)", _OF_ONE_GRAPH),
    ),
    **_hints(
        "walk_length sample_coverage save_dir log",
        Hint("torch_geometric.loader.GraphSAINTSampler(graph, ...)", _OF_ONE_GRAPH),
    ),
    "depth": Hint(
        "torch_geometric.loader.ShaDowKHopSampler(graph, ...)", _OF_ONE_GRAPH
    ),
    # torch's RandomSampler
    **_hints(
        "data_source num_samples replacement",
        Hint(
            "sampler=torch.utils.data.RandomSampler(dataset, num_samples=1000)",
            "which samples are drawn is said by a sampler",
        ),
    ),
    "indices": Hint("build_loader(dataset[indices])", "rows are the dataset's"),
    # Accelerate's DataLoaderConfiguration
    **_hints(
        "split_batches dispatch_batches even_batches use_seedable_sampler "
        "use_stateful_dataloader rng_types slice_fn_for_dispatch torch_device_mesh",
        Hint("accelerator.prepare(loader), as it is", _OF_RANKS),
    ),
    "num_processes": Hint("world_size=2, rank=0"),
    "process_index": Hint("rank=0"),
    **_hints(
        "non_blocking put_on_device",
        Hint('build_loader(dataset, "cuda")', "batches are copied beside the step"),
    ),
    # Hugging Face's TrainingArguments
    **_hints("dataloader_pin_memory", Hint("pin_memory=True, or leave it to the plan")),
    "dataloader_persistent_workers": Hint("persistent_workers=True"),
    "dataloader_multiprocessing_context": Hint('multiprocessing_context="spawn"'),
    "dataloader_in_order": Hint("in_order=False"),
    "train_sampling_strategy": Hint('bucket_by="tokens"'),
    **_hints(
        "auto_find_batch_size find_batch_size",
        Hint("plan_batch(model, dataset, device), and its batch_size"),
    ),
    **_hints(
        "max_epochs min_epochs check_val_every_n_epoch accumulate_grad_batches "
        "sync_batchnorm reload_dataloaders_every_n_epochs batch_eval_metrics "
        "eval_do_concat_batches ignore_data_skip",
        Hint("drop it", "it is the trainer's, which takes a loader"),
    ),
    # Lightning's Trainer
    **_hints(
        "limit_train_batches limit_val_batches limit_test_batches "
        "limit_predict_batches overfit_batches num_test_batches num_batches",
        Hint("itertools.islice(loader, 100)", "a loader is one epoch"),
    ),
    # TensorFlow's, WebDataset's and Hugging Face's shuffling of streams
    **_hints(
        "buffer_size shuffle_buffer shuffle_buffer_size shuffle_size bufsize",
        Hint(
            'shuffle=True, or shuffle="block" for data larger than memory', _NO_BUFFER
        ),
    ),
    **_hints(
        "reshuffle reshuffle_each_iteration shuffle_each_epoch",
        Hint("shuffle=True", "each epoch has an order of its own"),
    ),
    **_hints("deterministic reproducible", Hint("seed=0")),
    **_hints(
        "cache_size cache_limit cache_bytes cache_in_memory in_memory keep_in_memory",
        Hint("drop it", _MAPPED),
    ),
    # torchdata's StatefulDataLoader
    **_hints(
        "snapshot_every_n_steps stateful resume resume_from_checkpoint",
        Hint("loader.load_state_dict(state)", "a state may be asked of it at any step"),
    ),
    # arguments of tokenizers and their collators
    "pad_to_multiple_of": Hint(
        'bucket_by="tokens", or padded.pad_to(length) in batch_transform=f',
        "batches are padded to their longest sample, or to the bound of their bucket",
    ),
    **_hints(
        "truncation truncate remove_columns select_columns rename_columns "
        "input_columns usecols",
        Hint("open_cache(path, transform=f)", _OF_SAMPLES),
    ),
    **_hints(
        "subset idx index ids rows row_ids train_idx train_indices subset_indices",
        Hint("build_loader(dataset[rows])", "rows are the dataset's"),
    ),
    **_hints(
        "train training is_train is_training test stage phase partition",
        Hint('dataset.train_test_split(0.1)["train"]', _NO_SPLITS),
    ),
    **_hints(
        "gpu gpus use_gpu use_cuda cuda accelerator devices to_device",
        Hint('build_loader(dataset, "cuda")', "the device is the second argument"),
    ),
    **_hints("jobs njobs processes num_processes_per_loader", Hint("num_workers=2")),
    **_hints(
        "thread threads use_threads backend executor multiprocessing",
        Hint("drop it, or num_workers=2", "a thread or workers are the plan's choice"),
    ),
    **_hints(
        "progress progress_bar progbar desc tqdm disable_tqdm verbose show_progress",
        Hint("for batch in tqdm.auto.tqdm(loader)", "a bar is around the loop"),
    ),
    **_hints(
        "train_dataset val_dataset test_dataset predict_dataset pred_dataset "
        "eval_dataset",
        Hint("build_loader(train_dataset)", "a loader is of one dataset"),
    ),
    # Hugging Face's Dataset.to_tf_dataset
    **_hints("columns label_cols", Hint("open_cache(path, transform=f)", _OF_SAMPLES)),
    "collate_fn_args": Hint("collate_fn=functools.partial(f, size=3)"),
    **_hints(
        "loader loaders dataloader",
        Hint("build_loader(loader.dataset)", "it takes a dataset and makes batches"),
    ),
    # LitData's StreamingDataLoader
    **_hints(
        "profile_batches profile_skip_batches profile_dir profile_cprofile",
        Hint(
            "with torch.profiler.profile(): for batch in loader",
            "a profiler sees the wait for each batch",
        ),
    ),
}

_OF_HUB = "a repository is named by its URL, and made with the Hub's own commands"
_PACK_OPTIONS = "pack takes the fields of PackOptions themselves"

_PACK: Mapping[str, Hint] = {
    **_hints(
        "num_workers n_workers num_proc n_jobs processes max_workers", Hint("workers=4")
    ),
    **_hints(
        "force force_reload reload rebuild replace exist_ok redownload mode",
        Hint("overwrite=True"),
    ),
    **_hints("compress codec compression_opts", Hint('compression="gzip"')),
    **_hints(
        "max_shard_size shard_size chunk_bytes chunk_size num_shards size_limit",
        Hint("shard_bytes=256 << 20"),
    ),
    **_hints(
        "root save_to output_dir out folder cache cache_dir dataset_path name file",
        Hint("pack(samples, path)"),
    ),
    **_hints(
        "transform pre_transform fn function",
        Hint("pack(dataset, path).map(function, cache=another_path)", _OF_SAMPLES),
    ),
    **_hints(
        "pre_filter filter", Hint("pack(dataset.filter(f), path), or leave keys out")
    ),
    **_hints("batch_size shuffle collate_fn", Hint("build_loader(...)", _OF_LOADER)),
    **_hints(
        "progress progress_bar progbar show_progress tqdm disable_tqdm verbose desc "
        "log quiet silent",
        Hint("drop it", "the bar is shown where a person looks"),
    ),
    "append": Hint("extend(path, samples)", "a cache is packed once"),
    **_hints(
        "keys ids key_fn",
        Hint(
            "def keys(self) and def load(self, key) of a SafeDataset",
            "samples of a list are named by their rows",
        ),
    ),
    **_hints(
        "client pool ray dask cluster scheduler backend",
        Hint("executor=ProcessPoolExecutor(8), or the executor of an engine"),
    ),
    **_hints(
        "packing options pack_options",
        Hint("pack(samples, path, workers=4, compression='gzip')", _PACK_OPTIONS),
    ),
    **_hints("map_size fast_dev_run", Hint("drop it", "a cache grows as it must")),
    **_hints(
        "generator gen_kwargs inputs data mapping obj source_fn",
        Hint("pack(samples, path)", "the first argument is what to pack"),
    ),
    **_hints(
        "features info columns dtype shape on_mixed_types disable_nullable "
        "try_original_type fingerprint new_fingerprint pickle_module pickle_protocol "
        "item_loader hashes",
        Hint("drop it", "fields are stored as the samples have them"),
    ),
    "compressed": Hint('compression="gzip"'),
    **_hints(
        "compression_level compression_batch_size",
        Hint('compression="gzip"', "its level is chosen"),
    ),
    "encryption": Hint("drop it, and encrypt the disk", "files are mapped as they are"),
    # WebDataset's ShardWriter
    **_hints("maxcount maxsize", Hint("shard_bytes=256 << 20")),
    **_hints(
        "keep_in_memory writer_batch_size load_from_cache_file cache_file_name "
        "use_checkpoint keep_local start_shard progress_bar verbose desc "
        "suffix_template",
        Hint("drop it", "a run that is killed goes on where it stopped, on disk"),
    ),
    **_hints(
        "batched drop_last_batch with_rank with_indices input_columns fn_kwargs "
        "remove_columns align_chunking reorder_files keep_data_ordered",
        Hint("dataset.map(function, cache=path)", "pack stores samples as they are"),
    ),
    # LitData's optimize
    "input_dir": Hint("pack(PtFolder(path), ...)"),
    "reader": Hint("def load(self, key), of a SafeDataset", _MADE_BY_LOAD),
    "key_fn": Hint("def keys(self), of a SafeDataset", _MADE_BY_LOAD),
    "weights": Hint("drop it, and spans=8 for streams", "workers take what is next"),
    **_hints(
        "num_nodes machine num_downloaders num_uploaders queue start_method "
        "optimize_dns broadcast_paths post",
        Hint("executor=ProcessPoolExecutor(8), or the executor of an engine"),
    ),
    # Hugging Face's Dataset.push_to_hub
    **_hints(
        "repo_id config_name set_default data_dir commit_message commit_description "
        "private token revision create_pr embed_external_files",
        Hint('pack(samples, "hf://datasets/user/name/cache")', _OF_HUB),
    ),
    "split": Hint("dataset.train_test_split(0.1), of what was packed", _NO_SPLITS),
    **_hints("weights_only", Hint("pack(PtFolder(path, weights_only=False), ...)")),
    **_hints("pattern glob", Hint('pack(PtFolder(path, pattern="*.pt"), ...)')),
}

_MIRRORED = "shards of a store are mirrored to a folder on local disk"
_OF_STORE = "the file system of a URL takes it, and is made with storage_options"

_DATASET: Mapping[str, Hint] = {
    **_hints(
        "root path cache_dir processed_dir save_to folder dir name",
        Hint("cache=path; raw=folder for what load() reads"),
    ),
    **_hints("raw_dir data_dir data_files", Hint("raw=folder")),
    **_hints(
        "download_config download_mode verification_mode save_infos revision",
        Hint("drop it", "a cache is opened as it was packed, and checked"),
    ),
    **_hints(
        "allow_pickle weights_only pickle_module encoding errors",
        Hint("drop it", "nothing in a cache is pickled"),
    ),
    **_hints(
        "pre_transform pre_filter",
        Hint("do it in load(key), or leave the key out of keys()", _MADE_BY_LOAD),
    ),
    **_hints(
        "force_reload force rebuild overwrite",
        Hint(f"packing=PackOptions(overwrite=True), {_OPTIONS_FROM}"),
    ),
    **_hints(
        "num_workers workers num_proc n_jobs",
        Hint(f"packing=PackOptions(workers=4), {_OPTIONS_FROM}"),
    ),
    **_hints(
        "compression shard_bytes track_files executor",
        Hint(f"packing=PackOptions(...), {_OPTIONS_FROM}"),
    ),
    **_hints(
        "batch_size shuffle drop_last collate_fn seed sampler pin_memory",
        Hint("build_loader(dataset, batch_size=32, shuffle=True)", _OF_LOADER),
    ),
    **_hints("split train", Hint("dataset.train_test_split(0.1)", _NO_SPLITS)),
    # h5py.File, lmdb.open, numpy.load and torch.load
    **_hints(
        "in_memory keep_in_memory mmap mmap_mode memory_map streaming lazy preload "
        "readonly lock mode driver swmr locking map_size subdir sync map_async create "
        "readahead writemap meminit max_readers max_dbs map_location rdcc_nbytes "
        "rdcc_nslots",
        Hint("drop it", _MAPPED),
    ),
    **_hints("target_transform", Hint("transform=f of the whole sample")),
    "log": Hint("drop it", "the bar is shown where a person looks"),
    **_hints("follow_batch exclude_keys", Hint("drop it", "the samples are no graphs")),
    **_hints("columns features", Hint("transform=lambda sample: ...", _OF_SAMPLES)),
    **_hints("dtype dtypes precision half", Hint("transform=f", _DTYPES)),
    **_hints(
        "format output_format return_tensors", Hint("drop it", _TENSORS_AS_TENSORS)
    ),
    "filter": Hint("open_cache(path).filter(f)", _BY_ROWS),
    **_hints(
        "pad padding padding_value pad_token_id fill_value",
        Hint('pad_value=0, or pad_value={"labels": -100}'),
    ),
    **_hints("transforms augment augmentation preprocess fn", Hint("transform=f")),
    **_hints(
        "samples data data_list dataset arrow_table indices_table ex_iterable",
        Hint("loaderkit.pack(samples, path)"),
    ),
    # LitData's and MosaicML's StreamingDataset, down to ``stream_config``
    **_hints(
        "input_dir remote",
        Hint('cache="s3://bucket/name"', "a cache in a store is named by its URL"),
    ),
    "local": Hint('mirror="/local/disk/mirror"', _MIRRORED),
    **_hints("max_cache_size cache_limit", Hint('mirror_bytes="200 GB"', _MIRRORED)),
    **_hints(
        "max_pre_download predownload",
        Hint("drop it", "shards come at most 4 GiB ahead of the loop"),
    ),
    **_hints(
        "download_retry download_timeout on_exception",
        Hint("drop it", "a request is tried again, and ends within 4 minutes"),
    ),
    "keep_zip": Hint("drop it", "shards are mapped as they are in the store"),
    "validate_hash": Hint('checksums="once"'),
    **_hints(
        "subsample epoch_size length",
        Hint("dataset[:0.1]", "rows are chosen from the dataset"),
    ),
    **_hints(
        "shuffle_algo shuffle_seed shuffle_block_size item_shuffle_window "
        "partition_algo num_canonical_nodes sampling_method sampling_granularity "
        "replication resume reset_rngs force_override_state_dict distributed",
        Hint('build_loader(dataset, shuffle="block", seed=0)', _OF_LOADER),
    ),
    **_hints(
        "datasets streams weights iterate_over_all batching_method stream_name "
        "stream_config",
        Hint("torch.utils.data.ConcatDataset(datasets)", "it is one cache"),
    ),
    **_hints(
        "backend schema item_loader serializers encryption index_path formatting "
        "batch_decode window_direct_io info fingerprint allow_unsafe_types",
        Hint("drop it", "samples are columns in HDF5 files, which say what they are"),
    ),
    # fsspec's file systems
    **_hints(
        "endpoint_url endpoint anon key secret token profile region client_kwargs "
        "fs filesystem session_options token_per_repo_id",
        Hint('storage_options={"profile": "training"}', _OF_STORE),
    ),
}

_OPEN_CACHE: Mapping[str, Hint] = {
    **{
        name: hint
        for name, hint in _DATASET.items()
        if name not in {"follow_batch", "exclude_keys", "path"}
    },
    **_hints(
        "root processed_dir save_to folder dir name cache input_dir remote url",
        Hint("open_cache('molecules.lk')", "the path or URL is the first argument"),
    ),
    **_hints("cache_dir local_dir", Hint('mirror="/local/disk/mirror"', _MIRRORED)),
    **_hints(
        "raw_dir data_dir data_files raw",
        Hint("open_cache(path)", "what is packed is read, and no raw files"),
    ),
    **_hints(
        "force_reload force rebuild overwrite num_workers workers num_proc n_jobs "
        "compression shard_bytes track_files executor packing",
        Hint(
            "pack(samples, path, overwrite=True, workers=4)",
            "a cache is opened as it was packed",
        ),
    ),
}

_GRAPH_DATASET: Mapping[str, Hint] = {
    **{
        name: hint
        for name, hint in _DATASET.items()
        if name not in {"follow_batch", "exclude_keys"}
    },
    **_hints(
        "ragged pad_value pad padding padding_value pad_token_id fill_value",
        Hint("drop it", _JOINED_BY_PYG),
    ),
}

_RUNS: Mapping[str, Hint] = _hints(
    "runs times iterations iters repeat repeats n steps loops num_epochs max_epochs",
    Hint("epochs=8"),
)

_GROWTH: Mapping[str, Hint] = {
    **_hints("threshold max_growth atol", Hint("tolerance=16384, or limit='1MiB'")),
    **_hints("function_args args kwargs", Hint("lambda: function(1, 2)")),
    **_RUNS,
    **_hints("fun func callable", Hint("assert_no_leak(function)")),
    # psutil's tests of leaks, which became the package psleak
    **_hints(
        "retries warmup_times", Hint("epochs=16", "the first epochs are not counted")
    ),
    **_hints(
        "checkers trim_callback",
        Hint("drop it", "all counters are looked at, after a collection"),
    ),
}

_DETECTOR: Mapping[str, Hint] = {
    "epochs": Hint(
        "LeakDetector().run(train_one_epoch, epochs=30)",
        "the loop that is watched says how many",
    ),
    **_hints("threshold max_growth atol", Hint("tolerance=16384, or limit='1MiB'")),
    **_hints("warmup_epochs skip burn_in", Hint("warmup=2")),
    **_hints("action on_failure raise_error", Hint('on_leak="warn"')),
    **_hints("interval frequency every_n_steps steps", Hint("every=100")),
}

_OF_TRAINING = "it is said of the step, and not of the model"

_STEP: Mapping[str, Hint] = {
    **_hints("criterion loss_fn loss_function objective", Hint("loss=f")),
    **_hints("optim optimiser opt", Hint('optimizer="adam"')),
    **_hints(
        "amp precision dtype mixed_precision bf16 fp16", Hint('autocast="bfloat16"')
    ),
    **_hints(
        "data dataloader loader train_dataset input_size input_data example_inputs",
        Hint("the second argument"),
    ),
    **_hints(
        "gradient_accumulation_steps accumulate_grad_batches",
        Hint("plan.savings, of plan_batch", _OF_TRAINING),
    ),
    **_hints(
        "gradient_checkpointing activation_checkpointing",
        Hint("model.gradient_checkpointing_enable(), before", "it is the model's"),
    ),
    **_hints(
        "learning_rate lr", Hint("optimizer=torch.optim.Adam(model.parameters(), lr)")
    ),
    "max_grad_norm": Hint("drop it", "clipping takes a number for each parameter"),
    # torchinfo's summary
    **_hints(
        "verbose col_names col_width row_settings depth display",
        Hint("print(result), or result.to_html(path)", _WRITTEN),
    ),
}

_ASKED_BY_MODELS = ("size()", "shape", "ndim", "dim()", "dtype", "device", "ne(0)")
"""What models of transformers ask first, of whatever they are given for a tensor."""

_OF_DETECTOR = "a callback has a detector, which has the settings"

_PIECES = _hints(
    "batch_size micro_batch_size microbatch_size microbatch chunk_size mini_batch",
    Hint("micro_batch=4"),
)
_LIMIT = _hints("memory budget memory_limit max_memory", Hint("limit='8GiB'"))
# Lightning's Tuner.scale_batch_size, and Accelerate's find_executable_batch_size
_TUNER = {
    **_hints(
        "train_dataloaders val_dataloaders dataloaders datamodule",
        Hint("the second argument", "it takes a dataset, and makes batches of it"),
    ),
    **_hints(
        "init_val starting_batch_size", Hint("batch_size=32, to look at that one")
    ),
    **_hints(
        "mode max_trials steps_per_trial max_val batch_arg_name method "
        "reduce_batch_size_fn",
        Hint("drop it", "no batch is tried: what each would take is computed"),
    ),
    "function": Hint("plan_batch(model, dataset, device)"),
}

_ADDED = "what is added is packed as the cache was, and comes behind what is there"
_EXTEND: Mapping[str, Hint] = {
    **{
        name: hint
        for name, hint in _PACK.items()
        if hint.fix.startswith(("workers", "shard_bytes"))
    },
    **_hints(
        "executor client pool ray dask cluster scheduler backend",
        Hint(
            "pack(more, other, executor=executor), then concat([cache, other], path)",
            "samples are added by processes of this machine",
        ),
    ),
    **_hints("overwrite force replace compression", Hint("drop it", _ADDED)),
    **_hints(
        "storage_options mirror mirror_bytes",
        Hint("pull(url, folder), extend(folder, more), then push", _ADDED),
    ),
}

_ALIKE = "shards are linked or copied as they are"

_TABLE = 'pandas.read_{kind}({{path}}).to_dict("records")'

FILE_READERS: Mapping[str, str] = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch.load({path})"),
    ".npy": "numpy.load({path})",
    ".npz": "torch.utils.data.StackDataset(**numpy.load({path}))",
    ".json": "json.load(open({path}))",
    **dict.fromkeys(
        (".jsonl", ".ndjson"), "[json.loads(line) for line in open({path})]"
    ),
    **dict.fromkeys((".csv", ".tsv", ".txt"), _TABLE.format(kind="csv")),
    ".parquet": _TABLE.format(kind="parquet"),
    **dict.fromkeys((".feather", ".arrow"), _TABLE.format(kind="feather")),
    **dict.fromkeys((".pkl", ".pickle"), 'pickle.load(open({path}, "rb"))'),
    ".tar": "webdataset.WebDataset({path}, shardshuffle=False)",
    ".safetensors": "torch.utils.data.StackDataset(**load_file({path}))",
}
"""Code that makes samples of a file, by the end of its name."""


def reader_of(path: str) -> str:
    """Write how the samples of a file of another format are read.

    Args:
        path: The file.

    Returns:
        Code; empty where the end of its name says nothing.

    >>> reader_of("runs/a.npy"), reader_of("runs/a.lk"), reader_of("a.PT")
    ("numpy.load('runs/a.npy')", '', "torch.load('a.PT')")
    """
    name = path.replace("\\", "/").rpartition("/")[2]
    _, dot, ending = name.rpartition(".")
    code = FILE_READERS.get(f"{dot}{ending}".lower(), "")
    return code.replace("{path}", repr(path))


KEYWORDS: Mapping[str, Mapping[str, Hint]] = {
    "build_loader": _BUILD_LOADER,
    "pack": _PACK,
    "extend": _EXTEND,
    "open_cache": _OPEN_CACHE,
    "SafeDataset": _DATASET,
    "SafeGraphDataset": _GRAPH_DATASET,
    "LeakDetector": _DETECTOR,
    "run": _RUNS,  # of LeakDetector
    "assert_no_leak": _GROWTH,
    "estimate_step": {**_STEP, "device": Hint('target="cuda"')},
    "LeakCallback": {
        name: Hint(f"LeakCallback(LeakDetector({name}=...))", _OF_DETECTOR)
        for name in ("device", "warmup", "limit", "on_leak", "every", "tolerance")
    },
    "plan_batch": {
        **_STEP,
        **_TUNER,
        **_LIMIT,
        "target": Hint("device, the third argument"),
    },
    "MicroBatcher": {
        **_PIECES,
        **_hints("criterion loss_fn loss_function compute_loss", Hint("loss=f")),
        **_hints(
            "max_grad_norm grad_clip clip_grad gradient_clip_val max_norm",
            Hint("clip_norm=1.0"),
        ),
        **_hints(
            "accumulate_grad_batches gradient_accumulation_steps accumulation_steps "
            "accumulation num_accumulation_steps",
            Hint("batcher.windows(loader, 4)", "a step takes a window of batches"),
        ),
        **_hints(
            "amp mixed_precision fp16 bf16 precision dtype",
            Hint("autocast=torch.bfloat16"),
        ),
        **_hints("grad_scaler", Hint("scaler=torch.amp.GradScaler(device)")),
        "device": Hint("model.to(device)", "batches are on the model's device"),
        **_hints("optim opt", Hint("optimizer=optimizer")),
    },
    "transactional_step": _PIECES,
    "assert_fits": {**_STEP, **_LIMIT, "target": Hint('device="cuda"')},
    "concat": {
        **_hints("dsets datasets", Hint('concat(["day1.lk", "day2.lk"], "both.lk")')),
        **_hints(
            "axis", Hint("torch.utils.data.StackDataset(a=one, b=other)", _BY_ROWS)
        ),
        **_hints(
            "probabilities seed stopping_strategy",
            Hint(
                "build_loader(both, sampler=WeightedRandomSampler(weights, count))",
                "samples are joined one after the other; what is drawn is the loader's",
            ),
        ),
        **_hints("info split", Hint("drop it", _NO_SPLITS)),
        **_hints(
            "workers num_workers executor shard_bytes compression track_files spans",
            Hint("drop it; pack(one_cache, path, ...) packs anew", _ALIKE),
        ),
    },
    "push": {
        **_hints(
            "repo_id path_in_repo repo_type config_name revision data_dir",
            Hint('push(cache, "hf://datasets/user/name/cache")', _OF_HUB),
        ),
        **_hints("folder_path", Hint("push(cache, url)")),
        **_hints("token", Hint('storage_options={"token": "..."}')),
        **_hints(
            "private set_default commit_message commit_description create_pr "
            "parent_commit",
            Hint("huggingface_hub.create_repo(...), before", _OF_HUB),
        ),
        **_hints(
            "split max_shard_size num_shards num_proc embed_external_files "
            "allow_patterns ignore_patterns delete_patterns run_as_future",
            Hint("drop it", "a cache is copied as it was packed"),
        ),
    },
    "pull": {
        **_hints(
            "repo_id repo_type revision",
            Hint('pull("hf://datasets/user/name/cache", path)', _OF_HUB),
        ),
        **_hints("local_dir cache_dir", Hint("pull(url, path)")),
        **_hints("token headers", Hint('storage_options={"token": "..."}')),
        "endpoint": Hint('storage_options={"endpoint": "..."}'),
        **_hints(
            "force_download local_files_only allow_patterns ignore_patterns "
            "max_workers tqdm_class etag_timeout library_name library_version "
            "user_agent dry_run",
            Hint("drop it", "a cache is copied whole, once"),
        ),
    },
    "batch": {
        **_hints(
            "batch_size drop_last_batch num_proc",
            Hint("build_loader(dataset, batch_size=32)", _OF_LOADER),
        ),
        "by_column": Hint("dataset.batch((dataset[name] == 3).nonzero())", _BY_ROWS),
        "new_fingerprint": Hint("drop it", _NO_FILES),
    },
    "collate": {"data_list": Hint("dataset.collate(samples)")},
    "select": _hints(_FILES_OF_CHOICES, Hint("drop it", _NO_FILES)),
    "shard": _hints(_FILES_OF_CHOICES, Hint("drop it", _NO_FILES)),
    "subset": {"indices": Hint("dataset[indices]")},
}
"""By function or class, by keyword."""

_HOMES = (
    (
        "build_loader(dataset, {}=...)",
        """
        num_workers pin_memory persistent_workers prefetch_factor in_order
        multiprocessing_context read_ahead batch_size max_nodes max_edges max_bytes
        max_tokens oversized bucket_by buckets shuffle seed generator drop_last
        sampler batch_sampler rank world_size timeout collate_fn batch_transform
        worker_init_fn lookahead probe
        """,
    ),
    (
        "open_cache(path, {}=...)",
        """
        transform classes unknown_classes checksums ragged pad_value follow_batch
        exclude_keys
        """,
    ),
    ('open_cache("s3://bucket/name", {}=...)', "storage_options mirror mirror_bytes"),
    (
        "pack(samples, path, {}=...)",
        "workers compression shard_bytes overwrite track_files executor spans",
    ),
    ("SafeDataset({}=...), of your class", "raw cache packing"),
    ("build_loader(dataset, {})", "device"),
    ("LeakDetector({}=...)", "warmup on_leak every tolerance"),
    ("assert_no_leak({})", "function"),
    (
        "plan_batch(model, dataset, device, {}=...)",
        "optimizer autocast loss epochs limit margin",
    ),
    ("estimate_step(model, batch, {}=...)", "target"),
    ("estimate_step(model, batch)", "model batch"),
    ("assert_fits(model, batch, limit, {}=...)", "snapshot rise"),
)
"""Calls of ours, each with options that it has."""

OPTIONS_ELSEWHERE: Mapping[str, Hint] = {
    name: Hint(call.format(name), f"{call.partition('(')[0]} has it")
    for call, names in _HOMES
    for name in names.split()
}
"""What is said of an option of ours where another call was given it."""

CALL_HINTS: Mapping[str, Hint] = {
    "release": Hint(
        "del model; loaderkit.release()",
        "it gives back what nobody holds: a model goes with its last reference, and "
        "loaderkit.holders_of(model) names them",
    ),
    "assert_no_leak": Hint(
        "assert_no_leak(lambda: train_one_epoch(), epochs=8)",
        "it calls one function, without arguments",
    ),
    "concat": Hint(
        'concat(["day1.lk", "day2.lk"], "both.lk")',
        "it takes a list of caches, and the path of the new one",
    ),
    "pack": Hint(
        "pack(samples, path)", "it takes what to pack, and the path of the cache"
    ),
    "extend": Hint("extend(path, samples)"),
    "build_loader": Hint(
        "build_loader(dataset, batch_size=32, shuffle=True)",
        "it takes the dataset and the device, and all options by name",
    ),
    "diagnose_oom": Hint(
        "diagnose_oom(error)", "it takes an error or its text, and plan= by name"
    ),
    "oom_guard": Hint(
        "oom_guard()",
        "it takes nothing: with oom_guard() before a block, @oom_guard() above a "
        "function",
    ),
}
"""What a function is called with, by function: for calls that it does not take."""

_IN_PYTHON = "it is a function of Python: loaderkit.{}"

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("concat", "concatenate", "merge", "join", "cat"),
        _IN_PYTHON.format('concat(["day1.lk", "day2.lk"], "both.lk")'),
    ),
    **dict.fromkeys(
        ("extend", "append", "add"), _IN_PYTHON.format('extend("a.lk", samples)')
    ),
    **dict.fromkeys(
        ("compact", "repack", "rechunk", "reshard", "optimize"),
        _IN_PYTHON.format('pack(loaderkit.open_cache("a.lk"), "a.lk", overwrite=True)'),
    ),
    **dict.fromkeys(
        ("load", "loader", "build-loader", "build_loader", "train"),
        _IN_PYTHON.format('build_loader(loaderkit.open_cache("a.lk"), batch_size=32)'),
    ),
    **dict.fromkeys(("info", "show", "ls", "list", "stat", "open"), "use 'inspect'"),
    **dict.fromkeys(("check", "validate", "fsck", "hash"), "use 'verify'"),
    **dict.fromkeys(("upload", "export"), "use 'push'"),
    **dict.fromkeys(("download", "fetch", "import", "clone"), "use 'pull'"),
    **dict.fromkeys(("create", "build", "convert", "make", "prepare"), "use 'pack'"),
    **dict.fromkeys(("run", "monitor", "leaks", "leak", "profile"), "use 'watch'"),
    **dict.fromkeys(("diagnose", "oom", "why"), "use 'explain'"),
    **dict.fromkeys(
        ("estimate", "fit", "batch", "predict", "budget", "memory", "peak", "size"),
        "use 'plan'",
    ),
    **dict.fromkeys(("env", "environment", "system", "debug"), "use 'doctor'"),
    **dict.fromkeys(("example", "tutorial", "try", "bench"), "use 'demo'"),
}
"""What to say of a command that the command line does not have."""

ON_LEAK: Mapping[str, str] = {
    **dict.fromkeys(
        ("ignore", "none", "null", "false", "silent", "pass", "off", "skip", "report"),
        "lambda report: None",
    ),
    **dict.fromkeys(
        ("log", "logging", "logger", "info"), "logging.getLogger(__name__).warning"
    ),
    **dict.fromkeys(("print", "stdout", "show"), "print"),
    **dict.fromkeys(("exit", "stop", "abort"), "lambda report: sys.exit(str(report))"),
    **dict.fromkeys(("warning", "warnings", "default", "always"), '"warn"'),
    **dict.fromkeys(
        ("error", "exception", "fail", "assert", "throw", "true", "strict"), '"raise"'
    ),
}
"""What does on a leak what other programs call so, in small letters, as code."""

DEVICES: Mapping[str, str] = {
    **dict.fromkeys(("gpu", "gpus", "nvidia", "rocm", "amd"), "cuda"),
    **dict.fromkeys(("metal", "apple", "mac", "macos"), "mps"),
    **dict.fromkeys(("intel", "sycl"), "xpu"),
    **dict.fromkeys(("host", "ram"), "cpu"),
    "hip": "cuda",  # torch takes the name, and has nothing behind it
}
"""What Lightning, Keras and makers call devices, and torch calls by another name."""

MODELS: Mapping[str, str] = {
    r"(rtx|gtx|geforce|tesla|quadro|titan|mi)[\s_-]?\w*": "cuda",
    r"g?[abhlptv]\d{1,3}[a-z]?([-_ ].*)?": "cuda",
    r"\d{4}(ti)?": "cuda",
    r"m[1-9]( ?(pro|max|ultra))?": "mps",
    r"(arc|pvc)[\s_-]?\w*": "xpu",
    r"gaudi[\s_-]?\w*": "hpu",
}
"""What makers call the models of their devices, as patterns: H100, RTX 4090, M1."""

OF_OTHER_LIBRARIES = frozenset({"hpu", "mlu", "mtia", "musa", "npu", "xla"})
"""Kinds of devices, rightly named, for which torch has code once their makers' library
is imported."""

_OF_BATCHES = "what a batch holds was decided when the loader was built"

LOADER: Mapping[str, Hint] = {
    **_hints(
        "to cuda mps cpu device",
        Hint(
            "build_loader(dataset, device)",
            "batches are moved, one by one, and not the loader",
        ),
    ),
    **_hints(
        "next get_batch sample_batch batch first peek", Hint("next(iter(loader))")
    ),
    **_hints("reset restart rewind", Hint("iter(loader)", "each iter() is an epoch")),
    **_hints(
        "num_batches steps_per_epoch n_batches length batches_per_epoch num_steps "
        "total cardinality with_length",
        Hint("len(loader)"),
    ),
    **_hints(
        "num_samples n size samples num_rows total_samples dataset_size count "
        "total_dataset_length",
        Hint("len(loader.dataset)"),
    ),
    **_hints("save checkpoint get_state", Hint("loader.state_dict()")),
    **_hints("load restore set_state resume", Hint("loader.load_state_dict(state)")),
    **_hints(
        "shuffle seed set_seed manual_seed",
        Hint(
            "build_loader(dataset, shuffle=True, seed=0)",
            "it is an option of build_loader, and the plan says what it did",
        ),
    ),
    **_hints("map transform", Hint("build_loader(dataset, batch_transform=f)")),
    **_hints(
        "take head limit islice",
        Hint("itertools.islice(loader, 10)", "a loader is one epoch"),
    ),
    **_hints("iter_batches iterate iter", Hint("for batch in loader")),
    **_hints("epoch step position current_epoch", Hint('loader.state_dict()["epoch"]')),
    **_hints("num_yielded batch_idx", Hint('loader.state_dict()["batches"]')),
    **_hints("workers n_workers", Hint("loader.num_workers")),
    "collate": Hint("loader.collate_fn"),
    **_hints("bs total_batch_size", Hint("loader.batch_size")),
    **_hints("clear shutdown stop terminate end join", Hint("loader.close()")),
    **_hints(
        "stats statistics summary report memory memory_usage settings",
        Hint("print(loader.plan)"),
    ),
    **_hints(
        "skip skip_batches skip_first_batches skip_first advance",
        Hint(
            "loader.load_state_dict(state), or itertools.islice(loader, 10, None)",
            "a state says where in the epoch to go on",
        ),
    ),
    **_hints(
        "repeat cycle with_epoch next_epoch num_epochs epochs",
        Hint("for epoch in range(2): for batch in loader", "a loader is one epoch"),
    ),
    **_hints(
        "data_loader dataloader loader base_dataloader base_loader dl",
        Hint("loader itself", "it is a DataLoader"),
    ),
    **_hints("enumerate", Hint("enumerate(loader)")),
    **_hints("zip", Hint("zip(loader, other)")),
    **_hints("concatenate chain", Hint("itertools.chain(loader, other)")),
    # TensorFlow's and WebDataset's pipelines, fastai's and Ray's loaders
    **_hints(
        "batched unbatched unbatch rebatch padded_batch ragged_batch repartition",
        Hint("build_loader(loader.dataset, batch_size=32)", _OF_BATCHES),
    ),
    "bucket_by_sequence_length": Hint(
        'build_loader(loader.dataset, bucket_by="tokens")', _OF_BATCHES
    ),
    **_hints(
        "map_batches map_dict map_tuple to_tuple decode compose apply rename "
        "rename_keys extract_keys as_numpy_iterator before_batch after_batch "
        "after_item",
        Hint("build_loader(loader.dataset, batch_transform=f)", _OF_BATCHES),
    ),
    **_hints("to_html show plot", Hint("loader.plan.to_html(path)", _WRITTEN)),
    **_hints(
        "one_batch show_batch iter_torch_batches to_torch", Hint("next(iter(loader))")
    ),
    **_hints(
        "prefetch cache options with_options",
        Hint("print(loader.plan)", "batches are read ahead as the plan says"),
    ),
    "snapshot_every_n_steps": Hint(
        "loader.state_dict()", "a state may be asked of it at any step"
    ),
    **_hints("get_sampler", Hint("loader.sampler")),
    "set_sampler": Hint("build_loader(loader.dataset, sampler=rows)", _OF_BATCHES),
    # Accelerate's loaders
    **_hints(
        "begin end_of_dataloader remainder gradient_state synchronized_generator "
        "use_stateful_dataloader adjust_state_dict_for_prefetch iteration rng_types "
        "state split_batches slice_fn torch_device_mesh submesh_tp submesh_dp "
        "submesh_fsdp",
        Hint(
            "accelerator.prepare(loader)", "it is of the loader that accelerate makes"
        ),
    ),
    **_hints(
        "train valid val test train_dl valid_dl val_dl test_dl train_dataloader "
        "val_dataloader test_dataloader predict_dataloader train_loader val_loader",
        Hint("build_loader(dataset)", "a loader is of one dataset"),
    ),
    **_hints(
        "enable_cpu_affinity enable_multithreading",
        Hint(
            "taskset -c 0-7 python train.py, or torch.set_num_threads(8)",
            "the system decides which CPUs a worker has",
        ),
    ),
    "enable_memory_log": Hint("with MemoryMeter() as meter: ..."),
    "non_blocking_transfer": Hint(
        "build_loader(dataset, device), which copies beside the step"
    ),
    **_hints(
        "sample filter_fn",
        Hint("torch_geometric.loader.NeighborLoader(graph, ...)", _OF_ONE_GRAPH),
    ),
}
"""Attributes of a loader."""

_OF_CONFIGURATION = "a plan has several configurations, each with its bounds"
_OF_GRAPHS = "the samples are no graphs"

_RESULT: Mapping[str, Hint] = {
    **_hints("save html write export show plot", Hint("to_html(path)", _WRITTEN)),
    **_hints("summary describe text message info", Hint("str(result)", _WRITTEN)),
    **_hints("to_dict asdict dict", Hint("dataclasses.asdict(result)")),
}
"""Of every result that has a page."""

_SIZES: Mapping[str, Hint] = {
    **_RESULT,
    **_hints("to_dict asdict dict", Hint("vars(sizes)")),
    **_hints("hist histogram", Hint("sizes.to_html(path)", _WRITTEN)),
    **_hints("num_samples n count", Hint("len(sizes.bytes)")),
    **_hints(
        "to_pandas to_frame df describe quantile to_csv to_json",
        Hint("pandas's DataFrame of vars(sizes)", _WRITTEN),
    ),
    **_hints("max largest", Hint("sizes.bytes.max()")),
}

REDUCTIONS = frozenset(
    {"mean", "sum", "max", "min", "std", "var", "median", "prod", "any", "all"}
    | {"amax", "amin", "nansum", "nanmean"}
)
"""Methods of tensors, and functions of torch, that make one number of all values."""

ATTRIBUTES: Mapping[str, Mapping[str, Hint]] = {
    "HasPage": _RESULT,
    "StepEstimate": {
        **_hints(
            "total total_bytes total_memory memory max max_memory used "
            "max_memory_allocated",
            Hint("estimate.peak, in bytes"),
        ),
        **_hints("by_part breakdown components", Hint("estimate.parts")),
        **_hints("layers by_module by_layer", Hint("estimate.modules")),
    },
    "BatchPlan": {
        **_hints(
            "max_batch_size best best_batch_size largest_batch recommended",
            Hint("plan.configurations[0].budget.batch_size"),
        ),
        **{
            name: Hint(f"plan.configurations[0].budget.{name}", _OF_CONFIGURATION)
            for name in ("max_nodes", "max_edges", "max_tokens")
        },
        **_hints(
            "loader_options loader_kwargs",
            Hint("plan.configurations[0].budget.loader_options()", _OF_CONFIGURATION),
        ),
        **_hints("fits is_ok", Hint("plan.ok")),
        **_hints("suggestions advice", Hint("plan.savings")),
    },
    "LoaderPlan": {
        **_hints(
            "batch_size max_nodes max_edges max_tokens shuffle",
            Hint("plan.batching, in words; loader.batch_size is torch's"),
        ),
        **_hints("memory bytes peak", Hint("plan.forecast")),
        **_hints("reasons decisions options as_dict", Hint("plan.settings()")),
    },
    "LeakReport": {
        **_hints("leak leaks_found has_leak leaked failed", Hint("report.leaking")),
        **_hints("passed success is_ok", Hint("report.ok")),
        **_hints("culprit holder holders", Hint("report.growths[0].holder")),
        **_hints("series readings history", Hint("report.counters")),
    },
    "LeakDetector": {
        **_hints("tick update on_epoch_end end", Hint("detector.end_epoch()")),
        **_hints("check verdict leaking result results", Hint("detector.report()")),
        **_hints("snapshot", Hint("detector.start(), then detector.end_epoch()")),
        **_hints("watch track", Hint("for epoch in detector.epochs(range(10))")),
        **_hints("stop close", Hint("detector.finish()")),
        **_hints(
            "on_init_end on_train_begin on_train_start setup",
            Hint(
                "LeakCallback(detector), from loaderkit.integrations.transformers or "
                "loaderkit.integrations.lightning",
                "trainers call callbacks, and a detector is called by one",
            ),
        ),
    },
    "LeakCallback": {
        **_hints(
            "on_init_end on_train_begin on_epoch_begin on_epoch_end on_step_begin "
            "on_step_end on_substep_end on_log on_save on_evaluate on_predict",
            Hint(
                "from loaderkit.integrations.transformers import LeakCallback",
                "Hugging Face's Trainer calls it, and each trainer has a callback "
                "of its own",
            ),
        ),
        **_hints(
            "setup teardown state_key state_dict load_state_dict on_fit_start "
            "on_fit_end on_train_start on_train_batch_end on_train_epoch_end "
            "on_sanity_check_start on_exception",
            Hint(
                "from loaderkit.integrations.lightning import LeakCallback",
                "Lightning's Trainer calls it, and each trainer has a callback of "
                "its own",
            ),
        ),
        **_hints("leaking result verdict", Hint("callback.report.leaking")),
    },
    "MemoryMeter": {
        **_hints("start stop", Hint("with MemoryMeter() as meter: ...")),
        **_hints("report results history log", Hint("meter.timeline")),
        **_hints("peak max_memory", Hint('meter.timeline.peak("allocated")')),
    },
    "GraphSizes": {
        **_SIZES,
        **_hints("num_atoms atoms n_nodes", Hint("sizes.nodes")),
        **_hints("n_edges bonds", Hint("sizes.edges")),
        **_hints("tokens lengths", Hint("sizes.nodes", "the samples are graphs")),
    },
    "SampleSizes": {
        **_SIZES,
        **_hints(_LENGTHS, Hint("sizes.tokens")),
        **_hints("nodes num_nodes edges num_edges", Hint("sizes.tokens", _OF_GRAPHS)),
    },
    "CacheSummary": {
        **_hints("columns column_names features schema keys", Hint("summary.fields")),
        **_hints("size nbytes num_bytes size_in_bytes", Hint("summary.bytes")),
        **_hints("length n num_rows", Hint("summary.samples")),
    },
    "MicroBatcher": {
        **_hints(
            "fit run train_epoch", Hint("for batch in loader: batcher.step(batch)")
        ),
        **_hints("backward forward", Hint("batcher.step(batch), which does both")),
        **_hints("lr", Hint('batcher.optimizer.param_groups[0]["lr"]')),
        **_hints("accumulate", Hint("batcher.windows(loader, 4)")),
    },
    "Diagnosis": {
        **_hints(
            "fix fixes suggestions suggestion hint hints", Hint("diagnosis.advice")
        ),
        **_hints("cause reason explanation", Hint("diagnosis.verdict")),
        **_hints("oom out_of_memory", Hint("diagnosis.is_oom")),
    },
    "Padded": {
        **{
            expression.partition("(")[0]: Hint(
                f"padded.values.{expression}, or where a model asks: "
                "model(input_ids=padded.values, attention_mask=padded.mask)",
                "values has it",
            )
            for expression in _ASKED_BY_MODELS
        },
        **_hints("data tensor padded x input_ids tokens", Hint("padded.values")),
        **_hints(
            "max_len max_length longest width",
            Hint("padded.values.shape[1]"),
        ),
        **_hints("attention_mask valid_mask", Hint("padded.mask")),
        # torch's attention and fairseq's
        **_hints(
            "key_padding_mask src_key_padding_mask tgt_key_padding_mask "
            "memory_key_padding_mask padding_mask pad_mask",
            Hint("~padded.mask", "mask is True where there is data"),
        ),
        **_hints(
            "batch_sizes sorted_indices unsorted_indices packed pack "
            "pack_padded_sequence packed_sequence",
            Hint(
                "pack_padded_sequence(padded.values, padded.lengths, "
                "batch_first=True, enforce_sorted=False)",
                "torch.nn.utils.rnn makes one of a padded field",
            ),
        ),
        **_hints("truncate trim crop", Hint("padded.values[:, :length]")),
        **_hints(
            "items keys get",
            Hint("values, lengths, mask = padded", "it is a named tuple"),
        ),
        **_hints("length lens seq_lens seqlens", Hint("padded.lengths")),
        **_hints("offsets cu_seqlens", Hint('ragged="packed"', "it is padded")),
        **_hints("unbind tolist unpad", Hint("padded.to_list()")),
        # With what stands behind the ends, a mean is another.
        **{
            name: Hint(f"padded.values[padded.mask].{name}()", "values has padding too")
            for name in REDUCTIONS
        },
    },
    "Packed": {
        **_hints("data tensor x", Hint("packed.values")),
        **_hints("cu_seqlens ptr row_splits", Hint("packed.offsets")),
        **_hints("lengths length lens seqlens", Hint("packed.offsets.diff()")),
        **_hints("mask attention_mask", Hint('ragged="padded"', "it is packed")),
        **_hints("unbind tolist unpad", Hint("packed.to_list()")),
    },
}
"""Attributes of results that other libraries give, by class, by attribute."""

DOOR: Mapping[str, Hint] = {
    **_hints(
        "DataLoader Loader dataloader DenseDataLoader DataListLoader load_dataloader",
        Hint("loaderkit.build_loader(dataset, batch_size=32)"),
    ),
    **_hints(
        "NeighborLoader NeighborSampler LinkNeighborLoader HGTLoader",
        Hint(
            "loaderkit.build_loader(graphs) of many graphs; of one, "
            "torch_geometric.loader.NeighborLoader(graph, ...)",
            "it samples from one graph",
        ),
    ),
    **_hints(
        "ClusterLoader GraphSAINTSampler ShaDowKHopSampler RandomNodeLoader",
        Hint(
            "loaderkit.build_loader(graphs) of many graphs; of one, "
            "torch_geometric.loader.ClusterLoader(...)",
            "it samples from one graph",
        ),
    ),
    **_hints(
        "Dataset InMemoryDataset OnDiskDataset MapDataset",
        Hint("loaderkit.SafeDataset, or SafeGraphDataset for graphs"),
    ),
    **_hints(
        "load open load_dataset load_from_disk read from_disk Cache",
        Hint("loaderkit.open_cache(path)"),
    ),
    **_hints(
        "save save_to_disk write optimize create_cache convert pack_dataset pack_data "
        "pack_samples build_cache make_cache",
        Hint("loaderkit.pack(samples, path)"),
    ),
    **_hints("version VERSION get_version", Hint("loaderkit.__version__")),
    **_hints(
        "StreamingDataset StreamingDataLoader stream",
        Hint('loaderkit.open_cache("s3://bucket/name")'),
    ),
    **_hints("upload push_to_hub", Hint("loaderkit.push(path, url)")),
    **_hints("download snapshot_download", Hint("loaderkit.pull(url, path)")),
    **_hints("find_leak detect_leaks MemoryTracker", Hint("loaderkit.LeakDetector()")),
    **_hints(
        "leak_free no_leak assert_no_leaks limit_leaks",
        Hint("loaderkit.assert_no_leak(function), or @pytest.mark.leak_free"),
    ),
    **_hints("append add add_samples", Hint("loaderkit.extend(path, samples)")),
    **_hints(
        "compact repack rechunk reshard defragment vacuum consolidate recompress",
        Hint("loaderkit.pack(loaderkit.open_cache(path), path, overwrite=True)"),
    ),
    **_hints(
        "split random_split train_test_split",
        Hint("loaderkit.open_cache(path).train_test_split(0.1)"),
    ),
    **_hints(
        "empty_cache gc clear_memory free_memory collect garbage_collect",
        Hint("loaderkit.release()"),
    ),
    **_hints(
        "concatenate merge concatenate_datasets ConcatDataset interleave_datasets",
        Hint("loaderkit.concat(caches, path), or one + other where they are"),
    ),
    **_hints(
        "doctor check_env collect_env",
        Hint("loaderkit.check_environment(), or loaderkit doctor on the command line"),
    ),
    **_hints("explain explain_oom", Hint("loaderkit.diagnose_oom(error)")),
    **_hints(
        "estimate_memory estimate_peak", Hint("loaderkit.estimate_step(model, x)")
    ),
    **_hints(
        "find_batch_size find_executable_batch_size auto_batch_size max_batch_size",
        Hint("loaderkit.plan_batch(model, dataset, device)"),
    ),
}
"""Names at the front door, ``loaderkit.NAME``."""

NUMBERS: Mapping[str, str] = {
    "StepEstimate": "estimate.peak",
    "BatchPlan": "plan.configurations[0].budget.batch_size",
    "LeakReport": "report.bytes_per_epoch",
    "CacheSummary": "summary.bytes",
    "GraphSizes": "sizes.bytes",
    "SampleSizes": "sizes.bytes",
    "BaseDataset": "len(dataset)",
    "PlannedLoader": "len(loader)",
}
"""The number of an object that is probably computed or compared with, by class."""

_ONE_AFTER_THE_OTHER = "batches are made one after the other"

OPERATORS: Mapping[str, Mapping[str, Hint]] = {
    "KeyedConcatDataset": {
        "*": Hint("torch.utils.data.ConcatDataset([dataset] * 2)", _BY_ROWS),
        **_hints("+ |", Hint("dataset + other, of two datasets", _BY_ROWS)),
    },
    "BaseDataset": {
        "*": Hint("torch.utils.data.ConcatDataset([dataset] * 2)", _BY_ROWS),
        **_hints(
            "+ |", Hint("torch.utils.data.ConcatDataset([dataset, other])", _BY_ROWS)
        ),
        **_hints("- & ^ ~", Hint("dataset.filter(function)", _BY_ROWS)),
        **_hints("/ // %", Hint("dataset.train_test_split(0.1)", _BY_ROWS)),
        "@": Hint("dataset.map(function, cache=path)", _BY_ROWS),
    },
    "PlannedLoader": {
        "*": Hint("for epoch in range(2): ...", _ONE_AFTER_THE_OTHER),
        **_hints("+ |", Hint("itertools.chain(loader, other)", _ONE_AFTER_THE_OTHER)),
    },
}
"""What is written in place of an operator, by class, by operator."""
