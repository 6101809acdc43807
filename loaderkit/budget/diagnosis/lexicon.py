"""The words in which systems say that memory ran out: in which way, of which.  Pure.

``oom_patterns.txt`` has the sharp cases, each with its own numbers.  These are the
general ones: a phrase of exhaustion, a resource and a backend make a message, whoever
wrote it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import TYPE_CHECKING

from loaderkit.budget.diagnosis.folding import (
    FoldedAlternatives,
    FoldedPattern,
    FoldedText,
    fold_pattern,
)
from loaderkit.budget.diagnosis.literals import (
    alternatives_of,
    required_groups,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Phrase(Enum):
    """In which way a text says that memory did not suffice."""

    RAN_OUT = "ran out"
    """It names memory and that there was none left."""
    FAILED = "failed"
    """An allocation failed; whether of memory, other words have to say."""
    EXCEEDED = "exceeded"
    """A limit on memory was exceeded."""
    KILLED = "killed"
    """A process was ended because of its memory."""


def spaced(pattern: str) -> str:
    r"""Let every blank of a pattern match any white space, line breaks among it.

    >>> spaced("out of ?memory[ ,]")
    'out\\s+of\\s*memory[\\s,]'
    """
    return _UNIT.sub(_any_white_space, pattern)


_UNIT = re.compile(r"\\.|\[(?:\\.|[^\]])*\]| ([?*+]?)(?!\{)| (?=\{)", re.DOTALL)
"""What a pattern is made of, as far as blanks go: escapes, classes, blanks."""


def _any_white_space(match: re.Match[str]) -> str:
    unit = match.group()
    if unit.startswith("["):
        return unit.replace(" ", r"\s")
    if not unit.startswith(" "):
        return unit
    if match[1] is None:  # " {2,5}" keeps its count
        return r"\s"
    return r"\s*" if match[1] in {"?", "*"} else r"\s+"


def compile_words(pattern: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    """Compile a pattern whose blanks are any white space."""
    return re.compile(spaced(pattern), flags | re.MULTILINE)


def compile_folded(pattern: str) -> FoldedPattern:
    """Compile a pattern whose blanks are any white space, to search it in two steps."""
    return fold_pattern(spaced(pattern), required_groups(pattern))


def read_table(name: str) -> list[tuple[tuple[str, ...], str]]:
    """Read a table of patterns: columns of words, a bar, and a pattern.

    Args:
        name: File beside this one; a row without columns adds alternatives to the
            one above it.

    Returns:
        Rows in their order, each with its columns and its pattern.
    """
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    rows: list[tuple[tuple[str, ...], str]] = []
    for line in text.splitlines():
        head, bar, pattern = line.partition("| ")
        if line.startswith("#") or not bar:
            continue
        if head.strip():
            rows.append((tuple(head.split()), pattern))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]}|{pattern}")
    return rows


def put_in_pieces(pattern: str, pieces: Mapping[str, str]) -> str:
    """Write a pattern out whose pieces stand by name.

    Args:
        pattern: With ``@name@`` for a piece.
        pieces: Patterns by their names.

    >>> put_in_pieces("killed@gap@oom", {"gap": ".{0,40}"})
    'killed.{0,40}oom'
    """
    for name, piece in pieces.items():
        pattern = pattern.replace(f"@{name}@", piece)
    return pattern


# Each begins with a letter of its own: "re" passes over what begins with another.
_MEMORY = r"(?:memory|mem|(?<![a-z])ram|vram|hbm)\b"
APOSTROPHE = "['\u2019]"
"""As typewriters and as printers write it; a piece of a pattern."""
_PIECES = {
    "memory": _MEMORY,
    "what": r"(?:(?!to\b|and\b|or\b)[\w'/.-]{1,30} ){0,5}",
    "apostrophe": APOSTROPHE,
}


def phrases_in(where: FoldedText) -> Iterator[tuple[Phrase, tuple[int, int]]]:
    """Find the phrases of a text, those of one way after those of another.

    >>> text = FoldedText.of("cannot allocate 3 GiB: out of memory")
    >>> [way.name for way, _ in phrases_in(text)]
    ['RAN_OUT', 'FAILED']
    """
    for phrase, pattern in phrases().items():
        for span in pattern.spans(where):
            yield phrase, span


@functools.cache
def phrases() -> dict[Phrase, FoldedAlternatives]:
    """Give each way with its phrases, from ``phrases.txt``."""
    return {
        phrase: FoldedAlternatives(tuple(map(compile_folded, alternatives_of(pattern))))
        for phrase, pattern in phrase_texts().items()
    }


@functools.cache
def phrase_texts() -> dict[Phrase, str]:
    """Give the pattern of each way of saying it."""
    return {
        Phrase[name]: put_in_pieces(pattern, _PIECES)
        for (name,), pattern in read_table("phrases.txt")
    }


@functools.cache
def _other_subjects() -> tuple[FoldedPattern, ...]:
    """Give what is said where something else was short, from ``not_memory.txt``."""
    rows = "|".join(pattern for _, pattern in read_table("not_memory.txt"))
    return tuple(map(compile_folded, alternatives_of(rows)))


def is_about_something_else(sentence: str) -> bool:
    """Whether what was short is no memory.

    >>> is_about_something_else("no space left on disk")
    True
    """
    return next(_other_subjects_in(sentence), None) is not None


def words_about_something_else(sentence: str) -> str | None:
    """Give the first words that say so; None where none do.

    >>> words_about_something_else("there is no space left on disk")
    'no space left'
    """
    first = min(_other_subjects_in(sentence), default=None)
    return None if first is None else sentence[slice(*first)]


def _other_subjects_in(sentence: str) -> Iterator[tuple[int, int]]:
    where = FoldedText.of(sentence)
    for subject in _other_subjects():
        if subject.can_match(where.small):
            match = subject.search(where)
            if match is not None:
                yield match


OTHER_THING = compile_words(
    r"\b(?:files?|specifications?|requirements?|pending|privileges?|permissions?|contain|pack|packets?|body|payload|upload|messages?|entity|tokens?|rows?|"
    r"columns?|(?<!memory\s)(?<!ram\s)(?<!hbm\s)quota|disk(?!\sand\smemory\b)|"
    r"recursion|index|indices|connections?|time|seconds|minutes|"
    r"rate|length of|characters|depth|sequence length|context length|int(?:32|64)?|"
    r"epochs?|steps|address(?!\sspace)|addresses|pointer|segfault|segmentation|lstm|learning)\b"
)
"""What else can be too large, too many or used up."""
_ERROR_MARK = compile_words(
    r"\b\w{0,40}(?:error|exception|failed|failures?|fails|fail|"
    r"fatal|panic\w{0,4}|abort\w{0,3}|"
    r"terminat\w{1,4}|killed|evicted|crash\w{0,3}|resource_exhausted)\b"
    r"|[A-Za-z]\w{0,40}(?:Error|Exception)\b|\bE\d{4,5}\b|\berrno\b|status"
)


@dataclass(frozen=True)
class BackendWords:
    """A backend and the words that give it away."""

    backend: str
    """As :attr:`loaderkit.budget.diagnosis.messages.Message.backend` names it."""
    words: re.Pattern[str]
    """Any of them is enough."""


BACKEND_WORDS = (
    BackendWords(
        "hip",
        compile_words(
            r"\b(?:hip|dcu|rocm|miopen|amdgpu)(?![a-z])|(?-i:hip[A-Z_]|HIP_)|\bhsa_"
            r"|\b(?:hip|roc)(?:blas|sparse|fft|solver|rand|tensor|dnn)"
        ),
    ),
    BackendWords(
        "xpu",
        compile_words(
            r"\bxpu\b|level[ _]zero|\bsycl|_sycl|\b(?:UR|ZE|PI)_\w|(?-i:\bze[A-Z]\w)|"
            r"ipex|SYCL\d|Current platform can NOT allocate memory block"
        ),
    ),
    BackendWords(
        "npu",
        compile_words(
            r"\bnpu\b|ascend|\bacl|EL0004|207001|\bGE module|\bhccl"
            r"|(?-i:\brtM(?:alloc|emcpy))"
        ),
    ),
    BackendWords(
        "tpu",
        compile_words(
            r"\btpu(?:\b|_)|\bhbm\d?\b|hbmoom|\bvmem\b.{0,12}capacity|scoped vmem"
            r"|memory space [hsv]\w{1,3}\b"
        ),
    ),
    BackendWords(
        "mps",
        compile_words(
            r"\bmps\b|\bmetal\b|_metal|kIOGPU|MTL[A-Z]|malloc_or_wait|iogpu|\bmlx\b"
            r"|\bon (?:private|shared) pool\b"
        ),
    ),
    BackendWords(
        "hpu",
        compile_words(r"\bhpu\b|habana|synapse|synStatus|PT_(?:DEVMEM|BRIDGE)|gaudi"),
    ),
    BackendWords("musa", compile_words(r"\bmusa\b")),
    BackendWords("mlu", compile_words(r"\bmlu\b|cnrt")),
    BackendWords(
        "neuron",
        compile_words(r"\bneuron|\bnrt_|NRT_RESOURCE|\bTDRV\b|\bND \d{1,3}:NC"),
    ),
    BackendWords(
        "opencl",
        compile_words(r"opencl|\bcl(?:Enqueue|Create|Build)|\bcl::|\bCL_[A-Z]"),
    ),
    BackendWords("dml", compile_words(r"\bdml\b|directml|\bd3d1[12]\b|\bdxgi")),
    BackendWords(
        "vulkan", compile_words(r"vulkan|\bvk(?:::|_|\b|Alloc)|ErrorOutOfDeviceMemory")
    ),
    BackendWords(
        "xpu", compile_words(r"intel\(r\) [^\n]{0,30}(?:gpu|graphics)|\bintel_gpu\b")
    ),
    BackendWords(
        "cuda",
        compile_words(
            r"(?<![a-z])cuda|\bgpu|vram|\bcu_?(?:blas|dnn|fft|mem|result|stream|ctx|launch|module)|nvidia|tensorrt|\btrt\b"
            r"|nvinfer|virtualMemoryBuffer|\brmm\b|cupy|\bnccl|gpu_memory_utilization"
            r"|thrust::"
        ),
    ),
)
"""Backends; a word that is used for several stands last."""
HOST_PLACE = compile_words(
    r"(?<![a-z])cpu|\bhost\b|\bnumpy|\bmalloc\b|memalign|\brealloc\b|array with shape|"
    r"arrow|opencv|cv::|"
    r"\bheap\b|java|javascript|\bmmap|\bRAM\b|libgomp|bad_?alloc|duckdb|ggml_aligned|"
    r"mach_vm|system memory|context's memory pool|out of memory error: |"
    r"cannot allocate memory|\[?errno 12\]?|panicked|\bruntime: (?:out|cannot alloc)|"
    r"(?<!outof)MemoryError|"
    r"\bruntime: virtualalloc|errno=1455|memory resources are available to process|"
    r"allocate vector|allowed memory size|\bphp\b|virtual memory exhausted|"
    r"off-heap|direct buffer|GC overhead|\bspark\b"
)
"""Words of allocations by the processor."""
COMPILER = compile_words(
    r"\b(?:llvm|clang|gcc|g\+\+|cc1(?:plus)?|collect2|l?ld|rustc|javac|nvcc|ptxas|cicc)"
    r"(?:\.exe)? ?:? ?(?:(?:fatal )?error|fatal)? ?: ?\Z"
)
"""Right before a phrase: a compiler that ran out itself, whatever it compiles for."""
ANY_DEVICE = compile_words(
    r"\b(?:device|dev|dev_?id|accelerator|graphics card|w(?:eb)?gpu)\b"
    r"|OutOf(?:Device|Video|Graphics)Memory"
)
"""Words of a device that is not named."""
PINNED = compile_words(
    r"(?<!back\sto\s)pinned|page.?locked|HostAlloc|HostMalloc|host_malloc|HostRegister|pin_memory|"
    r"pin memory|bytes on (?:the )?host: (?:cuda|hip)"
)
SHARED = compile_words(
    r"/dev/shm|shared storage|object store|plasma|\bshm\b|shm_open|torch_shm|"
    r"shared memory (?:segment|object|file|\(shm\))"
)
BUDGET = compile_words(
    r"gpu_memory_utilization|gpu memory utilization|mem-fraction|mem_fraction|kv cache|"
    r"cache blocks|limit set to|per_process_memory_fraction|user-supplied memory"
)
"""Software that keeps to a share of the device."""
ONE_BLOCK = compile_words(
    r"maximum (?:allowed )?(?:buffer|allocation|block) size|block with size larger|"
    r"max(?:imum)?[ _]?(?:buffer|mem(?:ory)?[ _]?alloc(?:ation)?)[ _]?(?:length|size)|"
    r"buffer maximum|buffer size limit|memory allocation limit|"
    r"max(?:imum)? (?:size of )?(?:\w{1,20} ){0,2}"
    r"(?:buffer|alloc|block|memory object)\b"
)
"""One request is larger than the device gives in one piece."""


ENDED = compile_words(
    r"(?:job|worker|process(?:es)?|container|task|pod|step|unit|executor|function|session|kernel|"
    r"service|notebook|daemon)s?\b[^.\n]{0,100}\b"
    r"(?:killed|aborted|evicted|terminated|restarted|restarting|held"
    r"|(?:been|was) (?:stopped|shut down))\b"
    r"|\b(?:killed|killing|evicting|restarting) (?:this |the |latest |a )?"
    r"(?:job|worker|process|container|task|pod|step)\b"
    r"|sen(?:t|ding|ds) (?:a )?(?:SIG)?(?:TERM|KILL)\b"
    r"|killed by (?:external |the |a )?(?:signal|kernel|scheduler|system|operating)"
    r"|\brespawn(?:ed|ing)\b|\benforced\b[^\n]{0,60}limit"
    r"|\bkilled (?:due to|for) (?:consuming|using|exceeding)\b"
    r"|being killed|killing (?:latest|largest)"
    r"|\bprocess (?:exits|exited|exiting|quits|quitting) (?:after|for|because|due)\b"
)
"""What a watchdog of the host says that it did for its memory's sake."""
_NAME_PARTS = re.compile(r"_|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def split_names(text: str) -> str:
    """Part names into their words.

    >>> split_names("total_used, MaxAllocSize")
    'total used, Max Alloc Size'
    """
    return _NAME_PARTS.sub(" ", text)


def position_before_split(text: str, position: int) -> int:
    """Give where in a text stands what stands at a place of its split names.

    Args:
        text: With its names whole.
        position: In :func:`split_names` of it.

    >>> position_before_split("the maxAllocSize", len("the max Alloc"))
    12
    """
    inserted = 0
    for boundary in _NAME_PARTS.finditer(text):
        if boundary.start() + inserted >= position:
            break
        # An underscore becomes a blank; between two letters a blank comes in.
        if boundary.start() == boundary.end():
            inserted += 1
    return position - inserted


def with_name_parts(text: str) -> str:
    """Add the words that names are made of, since a name says where it belongs.

    >>> with_name_parts("RMM_ERROR in RandintCuda")
    'RMM_ERROR in RandintCuda RMM ERROR in Randint Cuda'
    """
    parts = split_names(text)
    return text if parts == text else f"{text} {parts}"


def has_error_mark(text: str) -> bool:
    """Whether a text is the report of a failure.

    >>> has_error_mark("fatal: out of memory"), has_error_mark("we ran out of memory")
    (True, False)
    """
    return _ERROR_MARK.search(text) is not None


def backend_named(text: str) -> str | None:
    """Give the device that the words of a text, or parts of its names, speak of.

    >>> backend_named("in ggml_backend_vulkan"), backend_named("on the host")
    ('vulkan', None)
    """
    text = with_name_parts(text)
    for row in BACKEND_WORDS:
        if row.words.search(text):
            return row.backend
    return None


def names_any_gpu(text: str) -> bool:
    """Whether words that name a GPU do not say of whom.

    >>> names_any_gpu("[GPU] out of memory"), names_any_gpu("on NVIDIA GPU 0")
    (True, False)
    """
    return backend_named(_ANY_GPU.sub(" ", with_name_parts(text))) != "cuda"


_ANY_GPU = compile_words(r"\bgpu\w{0,20}|vram")


def speaks_of_the_host(text: str) -> bool:
    """Whether words, or parts of names, are of the processor's memory.

    >>> speaks_of_the_host("DefaultCPUAllocator: not enough memory")
    True
    """
    return HOST_PLACE.search(with_name_parts(text)) is not None
