"""The leaks we know by name, and what to do about each.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

PatternName: TypeAlias = Literal[
    "graph",
    "graph chain",
    "autograd cycle",
    "longer",
    "rebuilt",
    "view",
    "kept tensors",
    "hooks",
    "closures",
    "exceptions",
    "cache",
    "optimizer",
    "cycles",
    "objects",
    "numbers",
    "many numbers",
    "bounded",
    "large bound",
    "files",
    "sockets",
    "threads",
    "children",
    "mappings",
    "semaphores",
    "shared",
    "shm",
    "worker",
    "native",
    "unknown holder",
    "exit handlers",
    "frozen",
    "warnings",
    "outside malloc",
    "pinned",
    "reserved",
    "driver",
    "device",
]
"""What a leak is known by."""


@dataclass(frozen=True)
class Pattern:
    """One way to leak."""

    words: str
    """What happens, in a few words."""
    fix: str
    """What to change."""


# Who finds a pattern is in ``leaks/finders``; a name here says nothing by itself.
PATTERNS: Mapping[PatternName, Pattern] = {
    "graph": Pattern(
        "tensors kept with their autograd graph",
        "keep loss.item() or loss.detach() instead",
    ),
    "graph chain": Pattern(
        "one tensor carries the autograd graph of all steps so far",
        "add loss.item() or loss.detach() to it instead",
    ),
    "autograd cycle": Pattern(
        "a cycle through the autograd graph, which the collector cannot see",
        "use torch.autograd.grad instead of backward(create_graph=True), or set .grad "
        "to None; in a Function keep outputs with ctx.save_for_backward",
    ),
    "longer": Pattern(
        "one array or tensor is joined to what was there, and gets longer",
        "keep a running mean, or write parts to disk",
    ),
    "rebuilt": Pattern(
        "each step makes a longer value of the one before, which holds all of it",
        "keep what is needed of a step, such as a number, or empty it after each epoch",
    ),
    "view": Pattern(
        "small views keep the whole storage they were cut from",
        "keep loaderkit.owned_copy(x), or x.clone()",
    ),
    "kept tensors": Pattern(
        "batches or predictions are kept",
        "keep numbers, or empty it at the end of each epoch",
    ),
    "hooks": Pattern(
        "a hook is registered again and again",
        "register it once, or call .remove() on the handle you got",
    ),
    "closures": Pattern(
        "functions kept with the variables they close over",
        "remove them when done, or give them the values they need as arguments",
    ),
    "exceptions": Pattern(
        "exceptions kept with their tracebacks, so all variables of their frames stay",
        "keep str(error), or error.with_traceback(None)",
    ),
    "cache": Pattern(
        "a cache without a bound",
        "give lru_cache a maxsize, or key it by something that repeats",
    ),
    "optimizer": Pattern(
        "parameters are added to an optimizer again and again",
        "make the optimizer once, outside the loop",
    ),
    "cycles": Pattern(
        "reference cycles, and the garbage collector is off",
        "gc.enable(), or call gc.collect() once an epoch",
    ),
    "objects": Pattern(
        "objects are kept",
        "empty it at the end of each epoch, or keep only what is needed",
    ),
    "numbers": Pattern("plain numbers or short texts are kept", "nothing: it is small"),
    "many numbers": Pattern(
        "numbers or short texts are kept, faster than steps of a training come",
        "keep a running mean, or empty it at the end of each epoch",
    ),
    "bounded": Pattern("a bounded container is filling up", "nothing: it ends"),
    "large bound": Pattern(
        "a bounded container is filling up, and there is not as much memory free",
        "a smaller bound, or keep less of each item",
    ),
    "files": Pattern(
        "files are opened and never closed",
        "open them in a `with` block; a reader per process, not per item",
    ),
    "sockets": Pattern(
        "sockets are opened and never closed",
        "close them, or open one outside the loop",
    ),
    "threads": Pattern(
        "threads are started that never end",
        "join them, or use one ThreadPoolExecutor outside the loop",
    ),
    "children": Pattern(
        "processes are started that nobody waits for",
        "wait() for them; of a DataLoader, keep one iterator or finish each",
    ),
    "mappings": Pattern(
        "memory or files are mapped and never unmapped",
        "close the mmap, or keep one for all items",
    ),
    "semaphores": Pattern(
        "locks and semaphores between processes are made and never dropped",
        "make them once, outside the loop",
    ),
    "shared": Pattern(
        "shared memory is kept, as tensors from workers are until the last is gone",
        "keep loaderkit.owned_copy(x) of what you need",
    ),
    "shm": Pattern(
        "shared memory is made and never unlinked, and outlives the process",
        "SharedMemory.unlink() when the last user is done; delete what was left there",
    ),
    "worker": Pattern(
        "a worker process grows, so the dataset keeps something in each",
        "look at what __getitem__ stores on self or in a module; or use "
        "persistent_workers=False, which ends workers every epoch",
    ),
    "native": Pattern(
        "who holds it is not known: no container, tensor, autograd graph, array or "
        "text that Python's collector lists has grown by as much; probably a C or C++ "
        "extension keeps it",
        # pytorch 27971: the bound is of primitives, which are large for convolutions.
        "leave out one library call after the other; memray --native names the line. "
        "Where shapes differ from step to step on the CPU, oneDNN keeps kernels for "
        "each, up to 1,024: it is that if memory stands still inside "
        "torch.backends.mkldnn.flags(enabled=False)",
    ),
    "unknown holder": Pattern(
        "who holds them is not known: no variable, module, closure, traceback or "
        "context leads to them, they are in no reference cycle that the collector can "
        "free, and in no cycle through the autograd graph; probably a C extension, or "
        "a reference that was never given back",
        "leave out one library call after the other",
    ),
    "exit handlers": Pattern(
        "functions registered with atexit keep what they refer to until the end",
        "register one outside the loop, or call atexit.unregister",
    ),
    "frozen": Pattern(
        "who holds it is not known: gc.freeze() is called again and again, and the "
        "collector neither lists nor frees the objects that it hides",
        "call gc.freeze() once, before the loop",
    ),
    "warnings": Pattern(
        "Python remembers the text of each warning, and these are all different",
        "warn with one text and log what differs, or warnings.simplefilter('always')",
    ),
    "outside malloc": Pattern(
        "memory that did not come from malloc, or free pieces that malloc cannot use",
        "look for private mmaps; else try MALLOC_ARENA_MAX=2 or jemalloc",
    ),
    "pinned": Pattern(
        "page-locked memory is kept",
        "do not keep batches of a loader with pin_memory=True",
    ),
    "reserved": Pattern(
        "torch's allocator takes more though tensors do not: pieces that no later "
        "batch fits into",
        "PYTORCH_ALLOC_CONF=expandable_segments:True, or batches of few sizes",
    ),
    "driver": Pattern(
        "the driver holds more though tensors do not, such as kernels and graphs that "
        "are compiled for each new shape",
        "batches of few sizes; empty_cache() of the device once an epoch",
    ),
    "device": Pattern(
        "tensors are kept on the device", "delete or detach them after each step"
    ),
}
