"""What a call may not change: the state of a process, and objects of its caller's.

A snapshot is a nest of dicts, taken before and after; ``changes`` names what differs.
"""

import collections
import faulthandler
import gc
import io
import itertools
import locale
import logging
import multiprocessing
import operator
import os
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import tracemalloc
import types
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.nn.modules import module as torch_modules

_VALUES = (int, float, complex, str, bytes, bool, type(None), range, slice)
_LEFT_ALONE = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)


def process_state():
    """Read what all code of a process shares."""
    return {
        **_random_states(),
        **_torch_settings(),
        **_python_settings(),
        **_outside(),
    }


def _random_states():
    return {
        "random: torch": torch.get_rng_state().numpy().tobytes(),
        "random: numpy": _flat(np.random.get_state(legacy=False)),
        "random: python": random.getstate(),
    }


def _torch_settings():
    cpu_hooks = {
        name: len(value)
        for name, value in vars(torch_modules).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    backends = torch.backends
    return {
        "torch: default dtype": torch.get_default_dtype(),
        "torch: default device": str(torch.get_default_device()),
        "torch: grad": torch.is_grad_enabled(),
        "torch: inference": torch.is_inference_mode_enabled(),
        "torch: autocast": [
            (
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
            )
            for kind in ("cpu", "cuda")
        ]
        + [torch.is_autocast_cache_enabled()],
        "torch: deterministic": (
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch: anomaly": (
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        ),
        "torch: threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch: matmul": torch.get_float32_matmul_precision(),
        "torch: cudnn": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
        ),
        "torch: cuda": (
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "torch: mkldnn": backends.mkldnn.enabled,
        "torch: mha fastpath": backends.mha.get_fastpath_enabled(),
        "torch: modes": (
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "torch: module hooks": cpu_hooks,
        "torch: profiler": torch.autograd._profiler_enabled(),
        "torch: sharing": torch.multiprocessing.get_sharing_strategy(),
        "torch: printing": dict(vars(torch._tensor_str.PRINT_OPTS)),
        "torch: warnings": torch.is_warn_always_enabled(),
        "torch: denormal": float(torch.tensor(1e-40) * 1) != 0,
        "torch: swaps parameters": (
            torch.__future__.get_swap_module_params_on_conversion(),
            torch.__future__.get_overwrite_module_params_on_conversion(),
        ),
    }


def _python_settings():
    loggers = {
        name: logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    return {
        "python: warnings": (
            [tuple(map(str, entry)) for entry in warnings.filters],
            id(warnings.showwarning),
            id(warnings.formatwarning),
        ),
        "python: logging": {
            name: (
                logger.level,
                logger.disabled,
                logger.propagate,
                list(map(id, logger.handlers)),
                list(map(id, logger.filters)),
            )
            for name, logger in {"": logging.root, **loggers}.items()
        },
        "python: logging off": logging.root.manager.disable,
        "python: sys.path": list(sys.path),
        "python: sys.argv": list(sys.argv),
        "python: hooks": (
            id(sys.excepthook),
            id(sys.unraisablehook),
            id(threading.excepthook),
            id(sys.displayhook),
            id(sys.gettrace()),
            id(sys.getprofile()),
            id(sys.breakpointhook),
        ),
        "python: streams": (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        "python: limits": (
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            sys.flags.int_max_str_digits,
            faulthandler.is_enabled(),
        ),
        "python: importing": (
            list(map(id, sys.meta_path)),
            list(map(id, sys.path_hooks)),
        ),
        "python: signals": {
            number: _handler(number) for number in signal.valid_signals()
        },
        "python: signal fd": _wakeup_fd(),
        "python: collector": (
            gc.isenabled(),
            gc.get_threshold(),
            list(map(id, gc.callbacks)),
            gc.get_debug(),
        ),
        "python: frozen objects": _count_frozen_witnesses(),
        "python: tracemalloc": (
            tracemalloc.is_tracing(),
            tracemalloc.get_traceback_limit(),
        ),
        "python: start method": multiprocessing.get_start_method(allow_none=True),
        "python: locale": locale.setlocale(locale.LC_ALL),
        "numpy: errors": np.geterr(),
        "numpy: printing": _flat(np.get_printoptions()),
        "python: temporary folder": tempfile.tempdir,
    }


_frozen_witnesses = 0
_witness: list = []


def _count_frozen_witnesses():
    """Count after which looks ``gc.freeze`` was called: what a look has left is gone.

    ``gc.get_freeze_count`` walks all that is frozen: 43 ms of CPU among the 300,000
    objects of one test file, which was half of what these tests took.
    """
    global _frozen_witnesses, _witness
    in_use = itertools.chain.from_iterable(map(gc.get_objects, range(3)))
    is_in_use = any(map(operator.is_, in_use, itertools.repeat(_witness)))
    _frozen_witnesses += 0 if is_in_use else 1
    _witness = []
    return _frozen_witnesses


def _handler(number):
    handler = signal.getsignal(number)
    return handler if isinstance(handler, (int, type(None))) else id(handler)


def _wakeup_fd():
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def _outside():
    process = psutil.Process()
    mask = os.umask(0o22)
    os.umask(mask)
    return {
        "process: environment": dict(os.environ),
        "process: folder": str(Path.cwd()),
        "process: umask": mask,
        "process: priority": process.nice(),
        "process: cpus": process.cpu_affinity(),
        "process: limits": [
            resource.getrlimit(kind)
            for kind in (
                resource.RLIMIT_NOFILE,
                resource.RLIMIT_AS,
                resource.RLIMIT_CORE,
            )
        ],
        "process: signals blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "process: files": _open_files(),
        "process: children": sorted(child.pid for child in process.children()),
        "process: threads": sorted(thread.name for thread in threading.enumerate()),
        "process: shared memory": _names_in(Path("/dev/shm")),
        "process: temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


def _open_files():
    seen = collections.Counter()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            seen[str(entry.readlink())] += 1
        except OSError:
            continue
    return {
        name: count
        for name, count in seen.items()
        if not name.startswith("/proc/") and name not in {"/dev/urandom"}
    }


def _names_in(folder):
    """List files of this process: others of the machine may come and go."""
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    names = {entry.name for entry in folder.iterdir()}
    return sorted(name for name in names if own.search(name))


def state_of(value):
    """Describe an object of the caller's with all that can be reached from it."""
    return _describe(value, {})


def _describe(value, seen):
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, _LEFT_ALONE):
        return id(value)
    if id(value) in seen:
        return ("again", id(value))
    seen[id(value)] = value
    state = {"identity": id(value), "class": id(type(value))}
    for name, part in _parts_of(value).items():
        state[name] = _describe(part, seen)
    return state


def _parts_of(value):
    if isinstance(value, torch.Tensor):
        return _parts_of_tensor(value)
    if isinstance(value, np.ndarray):
        return {
            "values": value.tobytes(),
            "flags": str(value.flags),
            "form": f"{value.dtype} {value.shape} {value.strides}",
        }
    if isinstance(value, torch.Generator):
        return {"state": value.get_state().numpy().tobytes()}
    if isinstance(value, np.random.Generator):
        return {"state": repr(value.bit_generator.state)}
    if isinstance(value, random.Random):
        return {"state": repr(value.getstate())}
    if isinstance(value, io.IOBase):
        return {"closed": value.closed, "at": None if value.closed else value.tell()}
    if isinstance(value, dict):
        return {
            _name_of_key(place, key): part
            for place, (key, part) in enumerate(value.items())
        }
    if isinstance(value, (list, tuple, collections.deque)):
        return {f"[{place}]": part for place, part in enumerate(value)}
    if isinstance(value, (set, frozenset)):
        return {"elements": repr(sorted(map(repr, value)))}
    if isinstance(value, types.FunctionType):
        return {
            **_closure_of(value),
            "defaults": value.__defaults__,
            "code": id(value.__code__),
            **vars(value),
        }
    if isinstance(value, types.MethodType):
        return {"self": value.__self__}
    return _attributes(value)


def _name_of_key(place, key):
    # A parameter, of an optimizer's state, tells its values, which change.
    return f"[{key!r}]" if isinstance(key, _VALUES) else f"[{place}]"


def _parts_of_tensor(tensor):
    is_fake = type(tensor).__name__ == "FakeTensor"
    is_plain = tensor.layout is torch.strided and not is_fake
    plain = tensor.detach() if is_plain else tensor
    return {
        "values": plain.cpu()
        .resolve_conj()
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
        if is_plain and tensor.numel() and tensor.ndim
        else str(plain),
        "form": f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.layout}",
        "version": None if tensor.is_inference() else tensor._version,
        "requires grad": tensor.requires_grad,
        "gradient": tensor.grad if tensor.is_leaf else None,
        "hooks": len(tensor._backward_hooks or ()),
        "shared": is_plain and tensor.is_shared(),
        "memory": tensor.untyped_storage().data_ptr() if is_plain else 0,
        **vars(tensor),
    }


def _closure_of(function):
    contents = {}
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            contents[name] = cell.cell_contents
        except ValueError:
            contents[name] = None  # nothing was assigned yet
    return contents


def _attributes(value):
    names = [
        name
        for kind in type(value).__mro__
        for name in (
            [kind.__slots__]
            if isinstance(getattr(kind, "__slots__", ()), str)
            else getattr(kind, "__slots__", ())
        )
        if name not in {"__dict__", "__weakref__"} and hasattr(value, name)
    ]
    attributes = {name: getattr(value, name) for name in names}
    return {**attributes, **getattr(value, "__dict__", {})}


def _flat(value):
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {name: _flat(part) for name, part in value.items()}
    return value


def changes(before, after):
    """Name what differs between two snapshots.

    Loggers of libraries that were imported meanwhile are new, and change nothing.
    """
    return list(_changes(before, after, ""))


def _changes(before, after, path):
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before:
            if name in after:
                yield from _changes(before[name], after[name], f"{path}/{name}")
            elif not path.startswith("/process: files"):
                yield f"{path}/{name} is gone"
        if not path.startswith("/python: logging"):
            yield from (f"{path}/{name} is new" for name in after if name not in before)
    elif path.startswith(("/process: files", "/python: frozen")):
        # What is freed meanwhile closes its own, and is frozen no more.
        if after > before:
            yield f"{path}: {before} -> {after}"
    elif before != after:
        yield f"{path}: {str(before)[:60]} -> {str(after)[:60]}"
