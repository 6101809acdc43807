"""What datasets of other libraries have and ours do not, and what to use here.  Pure.

Users of PyG, torch and Hugging Face reach for the names they know.  Where ours have no
such attribute or argument, the error names what does the same here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.errors import NoSuchAttributeError, OptionError
from loaderkit.nearest_names import similar_name, suggest_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MADE_BY_LOAD = (
    "keys() names the samples and load(key) makes one; SafeDataset calls them"
)
_ON_DISK = "the samples stay in the cache's files; batches are what moves to a device"
_ROWS = "a cache is packed once; what is chosen from it are rows"
_FIELDS = "a cache is packed once, with the fields that load() or the samples gave it"
_NO_TABLE = "samples are nests of tensors, not rows of a table"
_NO_CARD = "a cache keeps what it was made from, and no card of a published dataset"
_NO_INDEX = "a cache has no search index"
_TENSORS = "tensors are stored as tensors, arrays as arrays"

_FROM_A_LIST = "loaderkit.pack(samples, path)"
_OF_A_CACHE = "a dataset is of a cache, which pack() makes of samples once"
_ROWS_OF_TABLE = 'loaderkit.pack(table.to_dict("records"), path)'
_INSPECT = "loaderkit.inspect_cache(dataset.cache)"
_MAP = "dataset.map(function, cache=path), which packs another cache"
_LABEL = ("a label is a field as any other", "dataset.column(name)")
_INDEX = "faiss over dataset.column(name)"

ABSENT: Mapping[str, tuple[str, str]] = {
    # torch_geometric.data.Dataset, InMemoryDataset, OnDiskDataset
    **dict.fromkeys(
        ("process", "download", "has_process", "has_download"),
        (_MADE_BY_LOAD, "def keys(self) and def load(self, key)"),
    ),
    **dict.fromkeys(
        ("raw_dir", "raw_paths", "raw_file_names"),
        (_MADE_BY_LOAD, "dataset.raw, the path that was given as raw="),
    ),
    **dict.fromkeys(
        (
            *("processed_dir", "processed_paths", "processed_file_names", "root"),
            *("path", "folder", "cache_dir", "cache_path"),
        ),
        ("all that is packed lies in one folder", "dataset.cache"),
    ),
    **dict.fromkeys(
        ("pre_transform", "pre_filter"),
        (_MADE_BY_LOAD, f"do it in load(key); or {_MAP}, or dataset.filter(function)"),
    ),
    **dict.fromkeys(
        (
            *("get", "get_by_key", "index", "index_of", "find", "lookup", "get_loc"),
            *("get_indexer", "get_row", "key_to_row", "key_to_index", "find_key"),
        ),
        (
            "samples are read by their row",
            "dataset[row]; dataset[dataset.row_of(key)] by its key",
        ),
    ),
    **dict.fromkeys(
        ("items", "update", "pop", "popitem", "setdefault", "clear", "fromkeys"),
        (
            "it is no dict: a sample has a row, and a key that names it",
            "((dataset.key(row), dataset[row]) for row in range(len(dataset)))",
        ),
    ),
    "multi_get": ("samples are read by their rows", "dataset.read_together(rows)"),
    "len": ("it is Python's own", "len(dataset)"),
    "indices": ("a subset keeps its rows to itself", "dataset.key(row) names a sample"),
    "data": (
        "no object holds all samples",
        "dataset.column(name) for one field, dataset.batch(rows) for all of some rows",
    ),
    "num_graphs": ("a dataset has rows; batches have graphs", "len(dataset)"),
    "slices": ("no object holds all samples", "dataset.sizes()"),
    # Constructors of Hugging Face, pandas, TensorFlow and PyG; see CONSTRUCTORS.
    **dict.fromkeys(
        (
            *("from_list", "from_data_list", "from_datalist", "from_samples"),
            *("from_tensors", "from_numpy", "from_array", "from_arrays"),
            *("from_networkx", "from_smiles", "from_datasets", "from_hub"),
        ),
        (_OF_A_CACHE, _FROM_A_LIST),
    ),
    **dict.fromkeys(
        ("from_dict", "from_tensor_slices"),
        (
            _OF_A_CACHE,
            "loaderkit.pack(torch.utils.data.StackDataset(**columns), path)",
        ),
    ),
    **dict.fromkeys(
        ("from_generator", "from_iterable", "from_stream"),
        (_OF_A_CACHE, "loaderkit.pack(generator(), path)"),
    ),
    **dict.fromkeys(
        (
            *(
                "from_pandas",
                "from_polars",
                "from_dataframe",
                "from_df",
                "from_records",
            ),
            *("from_csv", "from_json", "from_parquet", "from_text", "from_sql"),
            *("from_spark", "from_buffer", "from_table", "from_arrow"),
        ),
        (_OF_A_CACHE, _ROWS_OF_TABLE),
    ),
    **dict.fromkeys(
        ("from_folder", "from_directory", "from_files", "from_paths"),
        (_OF_A_CACHE, "loaderkit.pack(folder, path), of a folder of .pt files"),
    ),
    **dict.fromkeys(
        ("load_from_disk", "from_disk", "from_file", "from_cache", "from_pretrained"),
        ("a cache that is there is opened", "loaderkit.open_cache(path)"),
    ),
    # People reach for these two in spite of the underscore, which PyG advises.
    **dict.fromkeys(
        ("_data", "_data_list"),
        (
            "no object holds all samples",
            "dataset.column(name) for one field, dataset.batch(rows) for some rows",
        ),
    ),
    **dict.fromkeys(
        ("to", "cpu", "cuda"),
        (_ON_DISK, "build_loader(dataset, device), or batch.to(device)"),
    ),
    "pin_memory": (_ON_DISK, "build_loader(dataset, device, pin_memory=True)"),
    "share_memory_": (_ON_DISK, "nothing: processes map the same files"),
    "save": ("a cache is written once", _FROM_A_LIST),
    "to_on_disk_dataset": ("it is on disk already", "dataset.cache is its folder"),
    **dict.fromkeys(
        (
            *("to_datapipe", "functions", "reset", "register_function"),
            *("register_datapipe_as_function", "getstate_hook", "set_getstate_hook"),
            *("reduce_ex_hook", "set_reduce_ex_hook", "repr_hook", "str_hook"),
        ),
        (
            "a cache is read by its rows",
            "build_loader(dataset); or IterableWrapper(dataset) of torch's data pipes",
        ),
    ),
    **dict.fromkeys(
        ("append", "extend", "multi_insert", "insert"),
        (
            _ROWS,
            "loaderkit.extend(dataset, more), which adds them to the cache",
        ),
    ),
    **dict.fromkeys(
        (
            *("serialize", "deserialize", "schema", "db", "BACKENDS"),
            # h5py
            *("attrs", "chunks", "compression", "maxshape", "fillvalue", "filename"),
            *("file", "visit", "visititems", "create_dataset", "create_group"),
            *("require_dataset", "flush", "dims", "iter_chunks", "read_direct"),
            *("write_direct", "swmr_mode", "asstr"),
        ),
        ("samples are columns in HDF5 files", _INSPECT),
    ),
    "close": ("files are mapped, and closed with the last reference", "del dataset"),
    # datasets.Dataset
    **dict.fromkeys(
        (
            *("add_column", "cast", "cast_column", "class_encode_column", "flatten"),
            *("rename_column", "rename_columns", "remove_columns", "select_columns"),
            *("align_labels_with_mapping",),
        ),
        (_FIELDS, _MAP),
    ),
    "add_item": (_ROWS, "loaderkit.extend(dataset, [sample]), or dataset + [sample]"),
    **dict.fromkeys(
        ("column_names", "features", "num_columns", "element_spec", "width"),
        (_FIELDS, _INSPECT),
    ),
    **dict.fromkeys(
        ("num_rows", "shape", "height", "count", "cardinality", "length", "n_samples"),
        ("a dataset has rows", "len(dataset)"),
    ),
    **dict.fromkeys(("empty", "is_empty"), ("a dataset has rows", "len(dataset) == 0")),
    **dict.fromkeys(
        ("dataset_size", "size_in_bytes", "download_size"),
        ("samples differ in size", f"dataset.sizes().bytes, or {_INSPECT}.bytes"),
    ),
    **dict.fromkeys(
        ("format", "set_format", "reset_format", "with_format", "formatted_as"),
        (_TENSORS, 'ragged="padded", "packed" or "jagged" for fields that differ'),
    ),
    **dict.fromkeys(
        ("set_transform", "with_transform"),
        (
            "a transform is called with one sample, and not with a batch",
            "dataset.transform = f; or open_cache(path, transform=f)",
        ),
    ),
    **dict.fromkeys(
        (
            *("astype", "type", "half", "float", "double", "bfloat16", "int", "long"),
            *("bool", "dtype", "numpy", "torch"),
        ),
        (
            "fields keep the dtypes that the samples have",
            "dataset.transform = f, or build_loader(dataset, batch_transform=f)",
        ),
    ),
    # Windows of series
    **dict.fromkeys(
        ("window", "windows", "rolling", "unfold", "sliding_window"),
        (
            "a sample is what load() makes of a key",
            "keys() that lists (series, start), and load() that cuts the window",
        ),
    ),
    # pandas and numpy
    **dict.fromkeys(
        ("iloc", "loc", "iat", "at"), ("samples are read by their row", "dataset[rows]")
    ),
    **dict.fromkeys(
        ("mean", "std", "min", "max", "sum", "var", "median", "quantile", "describe"),
        (_NO_TABLE, "dataset.column(name), and its mean(), std(), ..."),
    ),
    **dict.fromkeys(
        ("columns", "dtypes"),
        (_FIELDS, _INSPECT),
    ),
    **dict.fromkeys(
        ("head", "show", "glimpse", "take_all", "take_batch"), (_ROWS, "dataset[:5]")
    ),
    "tail": (_ROWS, "dataset[-5:]"),
    **dict.fromkeys(("first", "last"), (_ROWS, "dataset[0] and dataset[-1]")),
    "sample": (_ROWS, "dataset.shuffle()[:5]"),
    "sort_values": (_ROWS, "dataset[dataset.column(name).argsort()]"),
    **dict.fromkeys(
        (
            *(
                "drop",
                "rename",
                "assign",
                "apply",
                "fillna",
                "replace",
                "join",
                "merge",
            ),
            *("agg", "aggregate", "pipe", "eval", "with_columns", "bfill", "ffill"),
            *("interpolate", "convert_dtypes", "infer_objects", "rename_axis", "style"),
            *("explode", "combine", "combine_first", "set_index", "reset_index"),
            # pandas before 3
            *("applymap", "backfill", "pad"),
            *("set_axis", "set_flags", "isetitem", "add_prefix", "add_suffix"),
            # WebDataset and TensorFlow
            *("to_tuple", "map_dict", "map_tuple", "rename_keys", "extract_keys"),
            *("flat_map", "scan", "compose"),
        ),
        (_FIELDS, _MAP),
    ),
    **dict.fromkeys(
        ("dropna", "query", "where", "drop_duplicates"),
        (_ROWS, "dataset.filter(lambda sample: sample[name] is not None)"),
    ),
    **dict.fromkeys(
        (
            *("groupby", "value_counts", "pivot_table", "corr", "plot", "hist"),
            *("nunique", "n_unique", "pivot", "melt", "stack", "unstack", "resample"),
            *("corrwith", "nlargest", "nsmallest", "isnull", "isna", "notna"),
            *("notnull", "duplicated", "idxmax", "idxmin", "rank", "shift"),
            *("pct_change", "ewm", "expanding", "skew", "kurt", "kurtosis", "mode"),
            *("sem", "cov", "crosstab", "boxplot", "asfreq", "asof", "at_time"),
            *("between_time", "compare", "align", "reindex", "reindex_like"),
            *("reorder_levels", "swaplevel", "droplevel", "sort_index", "truncate"),
            *("tz_convert", "tz_localize", "xs", "axes", "attrs", "flags"),
            *("select_dtypes", "memory_usage", "first_valid_index", "equals"),
            *("last_valid_index", "isin", "reduce", "sparse", "mask", "product"),
            *("truediv", "floordiv", "mod", "radd", "rsub", "rmul", "rdiv", "rpow"),
            *("rtruediv", "rfloordiv", "rmod"),
        ),
        (_NO_TABLE, "pandas.Series(dataset.column(name)), field by field"),
    ),
    **dict.fromkeys(
        ("iterrows", "itertuples", "iter_rows", "as_numpy_iterator"),
        (_ROWS, "for sample in dataset"),
    ),
    **dict.fromkeys(
        ("row", "rows", "get_single_element", "read_row"),
        ("samples are read by their row", "dataset[row]"),
    ),
    "to_numpy": (_NO_TABLE, "dataset.column(name), which numpy.asarray takes"),
    "values": (_NO_TABLE, "dataset.column(name), one field of all samples"),
    # torchvision.datasets
    **dict.fromkeys(("targets", "labels", "train_labels", "train_data"), _LABEL),
    **dict.fromkeys(
        ("samples", "imgs"),
        ("no object holds all samples", "dataset[row]; dataset.key(row) is its name"),
    ),
    "class_to_idx": (
        "labels are stored as load() gives them",
        "keep the names of classes in an attribute of your dataset's class",
    ),
    "target_transform": (
        "a transform is called with the whole sample",
        "dataset.transform = f",
    ),
    # of one graph, not of many
    **dict.fromkeys(
        (
            *("metadata", "node_types", "edge_types", "num_node_types", "is_directed"),
            *("num_edge_types", "is_undirected", "has_isolated_nodes", "validate"),
        ),
        ("it is asked of one graph", "dataset[0], which has it"),
    ),
    **dict.fromkeys(
        ("num_nodes", "num_edges"),
        ("graphs differ in size", "dataset.sizes().nodes and .edges of each"),
    ),
    "num_relations": ("it is asked of one graph", "len(dataset[0].edge_types)"),
    **dict.fromkeys(
        ("x_dict", "edge_index_dict", "edge_attr_dict", "y_dict", "batch_dict"),
        (
            "it is asked of one graph, or of a batch",
            "dataset.batch(rows), or dataset[type]",
        ),
    ),
    **dict.fromkeys(
        ("get_idx_split", "split_idx", "train_mask", "val_mask", "test_mask"),
        (_ROWS, "dataset[rows]; the rows of a split are yours to keep"),
    ),
    "iter": (
        "batches are the loader's",
        "for batch in build_loader(dataset, batch_size=32)",
    ),
    **dict.fromkeys(
        ("concat", "concatenate", "merge", "join"),
        (_ROWS, "dataset + other; or loaderkit.concat([path, other_path], new_path)"),
    ),
    **dict.fromkeys(
        ("refresh", "reload", "reopen"),
        (
            "an open cache stays as it was opened",
            "loaderkit.open_cache(dataset.cache), which has what extend() added",
        ),
    ),
    "nbytes": ("samples lie in the cache's files", "sum(dataset.sizes().bytes)"),
    "group_by": (_NO_TABLE, "pandas.Series(dataset.column(name)), field by field"),
    "sort": (_ROWS, "dataset[dataset.column(name).argsort()]"),
    "unique": (_ROWS, "dataset.column(name).unique()"),
    "repeat": (_ROWS, "dataset[list(range(len(dataset))) * 3]"),
    "flatten_indices": (_ROWS, _MAP),
    "split": (_ROWS, "dataset.train_test_split(0.1), or torch's random_split"),
    "random_split": (
        _ROWS,
        "torch.utils.data.random_split(dataset, shares)",
    ),
    "to_html": ("its sizes are shown as a page", "dataset.sizes().to_html(path)"),
    "to_iterable_dataset": ("a cache is read by its rows", "build_loader(dataset)"),
    "to_list": (_ROWS, "list(dataset), which holds all samples in memory"),
    "to_dict": (_ROWS, "dataset.batch(range(len(dataset))), all samples in memory"),
    **dict.fromkeys(
        (
            *("to_csv", "to_json", "to_pandas", "to_parquet", "to_polars", "to_sql"),
            *(
                "to_tf_dataset",
                "to_clipboard",
                "to_excel",
                "to_feather",
                "to_gbq",
                "to_hdf",
            ),
            *("to_iceberg", "to_latex", "to_markdown", "to_orc"),
            *("to_period", "to_pickle", "to_records", "to_stata", "to_string"),
            *("to_timestamp", "to_xarray", "to_xml", "to_arrow"),
        ),
        (_NO_TABLE, "pandas.DataFrame of dataset.column(name), field by field"),
    ),
    "save_to_disk": ("it is on disk already", "copy the folder dataset.cache"),
    "push_to_hub": ("it is a folder of files", "upload the folder dataset.cache"),
    **dict.fromkeys(
        ("cache_files", "cleanup_cache_files"),
        ("all files are the cache's", "dataset.cache is their folder"),
    ),
    **dict.fromkeys(
        (
            *("builder_name", "config_name", "citation", "description", "homepage"),
            *("download_checksums", "info", "license", "supervised_keys"),
        ),
        (_NO_CARD, _INSPECT),
    ),
    **dict.fromkeys(
        (
            *("add_elasticsearch_index", "add_faiss_index", "drop_index", "get_index"),
            *("add_faiss_index_from_external_arrays", "get_nearest_examples"),
            *("get_nearest_examples_batch", "is_index_initialized", "list_indexes"),
            *("load_elasticsearch_index", "load_faiss_index", "save_faiss_index"),
            *("search", "search_batch"),
        ),
        (_NO_INDEX, _INDEX),
    ),
    # torch.utils.data: compositions have these, and loaders
    **dict.fromkeys(
        (
            *("datasets", "dataset", "tensors", "cumulative_sizes"),
            *("cummulative_sizes", "cumsum"),
        ),
        (
            "it is one dataset, and no composition",
            "dataset[rows], dataset.column(name)",
        ),
    ),
    **dict.fromkeys(
        (
            *("dataloader", "loader", "batch_size", "sampler", "num_workers"),
            *("set_batch_size", "set_num_workers", "set_drop_last", "set_shuffle"),
            *("batch_sampler", "generator", "drop_last", "collate_fn", "prefetch"),
            *("prefetch_factor", "persistent_workers", "worker_init_fn", "dls"),
            *("train_dataloader", "val_dataloader", "test_dataloader"),
            *("predict_dataloader", "dataloaders", "one_batch", "show_batch"),
            *("batched", "unbatched", "unbatch", "rebatch", "padded_batch"),
            *("ragged_batch", "sparse_batch", "iter_batches", "iter_torch_batches"),
            *("to_torch", "options", "with_options", "with_length", "get_sampler"),
            *("set_sampler", "total_batch_size", "sampler_weights"),
        ),
        ("batches are the loader's", "build_loader(dataset, batch_size=32)"),
    ),
    # Streams: IterableDataset of Hugging Face, litdata, MosaicML
    **dict.fromkeys(
        (
            *("state_dict", "load_state_dict", "reset_state_dict"),
            *("get_num_samples_yielded", "get_all_lens", "update_epoch_counters"),
        ),
        (
            "where reading stands is known to the loader",
            "loader.state_dict() and loader.load_state_dict(state)",
        ),
    ),
    **dict.fromkeys(
        ("epoch", "set_epoch", "next_epoch", "resample_streams", "with_epoch"),
        ("epochs are the loader's", "loader.set_epoch(3); each iter(loader) is one"),
    ),
    **dict.fromkeys(
        ("num_shards", "n_shards", "reshard"),
        ("a cache is packed once, into shards", f"{_INSPECT}, which tells them"),
    ),
    **dict.fromkeys(
        ("get_len", "size", "is_infinite", "is_cycling"),
        ("a dataset has rows, and an end", "len(dataset)"),
    ),
    "get_item": ("samples are read by their row", "dataset[row]"),
    "bucket_by_sequence_length": (
        "batches are the loader's",
        'build_loader(dataset, bucket_by="tokens")',
    ),
    "map_batches": (
        "batches are the loader's",
        "build_loader(dataset, batch_transform=f)",
    ),
    "enumerate": ("it is Python's own", "enumerate(dataset)"),
    "zip": ("it is torch's", "torch.utils.data.StackDataset(dataset, other)"),
    **dict.fromkeys(
        ("interleave", "sample_from_datasets", "choose_from_datasets"),
        (
            _ROWS,
            "build_loader(dataset + other, sampler=rows)",
        ),
    ),
    **dict.fromkeys(
        ("take_while", "rsample", "rejection_resample", "ignore_errors"),
        (_ROWS, "dataset.filter(lambda sample: ...)"),
    ),
    "random_shuffle": (_ROWS, "dataset.shuffle(seed=0)"),
    "snapshot": ("it is on disk already", "dataset.cache is its folder"),
    **dict.fromkeys(
        ("slice", "split_at_indices", "streaming_split"),
        (_ROWS, "dataset[:100], dataset[rows]"),
    ),
    **dict.fromkeys(
        ("lazy", "collect", "materialize", "clone"),
        ("samples are read when they are asked for", "dataset, as it is"),
    ),
    **dict.fromkeys(
        ("train", "test", "val", "valid", "validation", "train_ds", "valid_ds"),
        ("a cache has rows and no splits", 'dataset.train_test_split(0.1)["train"]'),
    ),
    **dict.fromkeys(
        ("task_type", "eval_metric", "num_tasks", "meta_info", "feature_names"),
        (_NO_CARD, "keep it in an attribute of your dataset's class"),
    ),
    **dict.fromkeys(("target", "target_names"), _LABEL),
    **dict.fromkeys(("setup", "prepare_data"), (_MADE_BY_LOAD, "def load(self, key)")),
    "decode": ("samples are decoded as they were packed", "dataset[row]"),
    **dict.fromkeys(
        ("read_window", "aread_window", "frame_counts"),
        (
            "a sample is what load() makes of a key",
            "keys() that lists (series, start), and load() that cuts the window",
        ),
    ),
    **dict.fromkeys(
        (
            *("cache_usage", "evict_shard", "evict_coldest_shard", "prepare_shard"),
            *("on_demand_bytes",),
        ),
        (
            "the mirror of a store keeps to a cap by itself",
            'open_cache(url, mirror_bytes="200 GB")',
        ),
    ),
}
"""Why there is no attribute of this name, and what to use in its place."""

_COLUMNS = (
    (torch.Tensor, "dataset.column(name)"),
    (np.ndarray, "numpy.asarray(dataset.column(name))"),
)
"""Kinds of arrays, and how one field of all samples is made one of them."""

_OF_GRAPHS = "it is asked of graphs, and these samples are none"
ABSENT_OF_ROWS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("get_summary", "print_summary"), (_OF_GRAPHS, _INSPECT)),
    "num_classes": (_OF_GRAPHS, "len(dataset[name].unique())"),
    **dict.fromkeys(
        ("num_features", "num_node_features", "num_edge_features"),
        (_OF_GRAPHS, "dataset[0][name].shape[-1]"),
    ),
    "copy": ("a choice of rows is a dataset, and copies none", "dataset[rows]"),
}
"""The same, of what datasets of graphs have and others do not."""

_ONE_SAMPLE = "the function is called with one sample after the other"
_SKLEARN = "sklearn.model_selection.train_test_split(range(len(dataset)), "
_SKLEARN += "stratify=dataset.column(name))"
_NO_FILES = "no file is written for a choice of rows"
OPTIONS: Mapping[str, tuple[str, str]] = {
    "random_state": ("it is called as in Hugging Face's datasets", "seed=0"),
    **dict.fromkeys(
        ("batched", "batch_size", "drop_last_batch", "with_rank"),
        (_ONE_SAMPLE, "a function of one sample"),
    ),
    "input_columns": (_ONE_SAMPLE, 'lambda sample: f(sample["name"])'),
    "fn_kwargs": (_ONE_SAMPLE, "functools.partial(function, **kwargs)"),
    "num_proc": ("it is named as pack() names it", "workers=4"),
    **dict.fromkeys(
        ("cache_file_name", "suffix_template"),
        ("a cache is a folder, named by its path", "cache=path"),
    ),
    "desc": ("the bar is shown where a person looks", "drop it"),
    **dict.fromkeys(
        (
            *("indices_cache_file_name", "train_indices_cache_file_name"),
            *("test_indices_cache_file_name", "keep_in_memory", "writer_batch_size"),
            *("new_fingerprint", "train_new_fingerprint", "test_new_fingerprint"),
        ),
        (_NO_FILES, "drop it"),
    ),
    "load_from_cache_file": (
        "what was packed of the same samples by the same code is used again",
        "overwrite=True",
    ),
    **dict.fromkeys(
        ("features", "disable_nullable", "try_original_type", "on_mixed_types"),
        ("fields are stored as the function returns them", "drop it"),
    ),
    **dict.fromkeys(
        ("buffer_size", "max_buffer_input_shards"),
        ("all rows are shuffled, and not those of a buffer", "drop it"),
    ),
    **dict.fromkeys(
        ("cache_file_names", "with_split", "seeds", "generators"),
        (
            "it is called of one dataset, and not of several by name",
            "a loop over the datasets",
        ),
    ),
    "indices_cache_file_names": (_NO_FILES, "drop it"),
    # Hugging Face's name, and sklearn's.
    **dict.fromkeys(
        ("stratify_by_column", "stratify"),
        (
            "rows are chosen without reading labels",
            f"train, test = {_SKLEARN}, then dataset[train], dataset[test]",
        ),
    ),
}
"""Arguments of Hugging Face's methods of the same name: why not, and what to do."""


CONSTRUCTORS = tuple(
    name for name in ABSENT if name.startswith("from_") or name == "load_from_disk"
)
"""Those of them that are asked of a class, ``SafeDataset.from_dict(...)``."""


def no_such_attribute(
    kind: str,
    name: str,
    known: Iterable[str],
    fields: Iterable[str] = (),
    stores: Mapping[Any, Iterable[str]] | None = None,
) -> NoSuchAttributeError:
    """Make the error for an attribute that a dataset does not have.

    Args:
        kind: The dataset's class.
        name: What was asked for.
        known: Its public attributes.
        fields: The fields of its samples, where they are known.
        stores: The fields of each node and edge type, where the samples have types.

    Returns:
        The error, to be raised by the caller.

    >>> print(no_such_attribute("SafeDataset", "num_rows", []))
    SafeDataset has no attribute 'num_rows'.
      why: a dataset has rows
      fix: len(dataset)
    """
    message = f"{kind} has no attribute {name!r}."
    names = sorted(fields)
    # First what the samples have: a field may be called "values" or "mean".
    if name in names:
        why = "the fields of samples are attributes only where the samples are graphs"
        return NoSuchAttributeError(message, why=why, fix=f"dataset[{name!r}]")
    for store, own_fields in (stores or {}).items():
        if name in own_fields:
            why = f"it is a field of {store!r}, and not of the graphs"
            index = (
                ", ".join(map(repr, store)) if isinstance(store, tuple) else repr(store)
            )
            return NoSuchAttributeError(
                message, why=why, fix=f"dataset[{index}].{name}"
            )
    if name in (stores or {}):
        why = "it is a type of the graphs, and not one of their fields"
        return NoSuchAttributeError(message, why=why, fix=f"dataset[{name!r}]")
    if name in ABSENT or (name in ABSENT_OF_ROWS and name not in known):
        why, fix = ABSENT[name] if name in ABSENT else ABSENT_OF_ROWS[name]
        return NoSuchAttributeError(message, why=why, fix=fix)
    for kind_of_array, column in _COLUMNS:
        if hasattr(kind_of_array, name):
            call = "()" if callable(getattr(kind_of_array, name)) else ""
            fix = f"{column}.{name}{call}"
            return NoSuchAttributeError(message, why=_NO_TABLE, fix=fix)
    why = "neither it nor its samples have it"
    if names:
        why = f"the fields of its samples are {', '.join(names)}"
    nearest = _closest_match(name, (*names, *known))
    fix = "help(dataset) lists what there is"
    if nearest is not None:
        fix = f"did you mean {nearest!r}?"
    return NoSuchAttributeError(message, why=why, fix=fix)


@functools.lru_cache(maxsize=256)
def _closest_match(name: str, names: tuple[str, ...]) -> str | None:
    """Find the name that is spelt most alike; the last ones are kept.

    ``hasattr`` asks as well: each iteration of a loader asks a dataset whether it has a
    state, which took 0.35 ms of its 0.5.
    """
    return similar_name(name, names)


def refuse_options(method: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that only another library's method has.

    Args:
        method: The method's name.
        given: Arguments that ours does not take, by name.
        known: Those that it takes.

    Raises:
        OptionError: There is one; the message says what does the same here, or which
            arguments there are.
    """
    taken = list(known)
    for name in given:
        message = f"{method} has no option {name!r}."
        if name in OPTIONS:
            why, fix = OPTIONS[name]
            if name == "load_from_cache_file" and given[name]:
                fix = "drop it"
            advised, equals, _ = fix.partition("=")
            if equals and advised.isidentifier() and advised not in taken:
                # The advice is that of another method: filter has no workers.
                why, fix = f"{method} has nothing that it would set", "drop it"
            raise OptionError(message, why=why, fix=fix)
        why = "none of its options has that name"
        raise OptionError(message, why=why, fix=suggest_name(name, taken))
