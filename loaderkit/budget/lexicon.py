"""The words in which systems say that memory ran out: in which way, of which.  Pure.

``wordings.txt`` has the sharp cases, each with its own numbers.  These are the general
ones: a phrase of exhaustion, a resource and a backend make a message, whoever wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from importlib import resources


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
    pieces, in_class, position = [], False, 0
    while position < len(pattern):
        character = pattern[position]
        following = pattern[position + 1 : position + 2]
        if character == "\\":
            pieces.append(pattern[position : position + 2])
            position += 2
            continue
        if character == "[":
            in_class = True
        elif character == "]":
            in_class = False
        if character != " ":
            pieces.append(character)
        elif in_class:
            pieces.append(r"\s")
        elif following in {"?", "*"}:
            pieces.append(r"\s*")
            position += 1
        elif following == "{":
            pieces.append(r"\s")
        else:
            pieces.append(r"\s+")
            position += following == "+"
        position += 1
    return "".join(pieces)


def compile_words(pattern: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    """Compile a pattern whose blanks are any white space."""
    return re.compile(spaced(pattern), flags | re.MULTILINE)


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


_WHAT = r"(?:(?!to\b|and\b|or\b)[\w'/.-]{1,30} ){0,5}"
"""Words between "not enough" and "memory": "free GPU", "contiguous"."""
_KIND_OF_MEMORY = r"(?:v?ram|hbm|memory|mem)\b"

PHRASES = {
    Phrase.RAN_OUT: compile_words(
        r"out[ _-]{0,3}of[ _-]{0,3}(?:(?:device|host|gpu|cpu|heap|system|video|shared|"
        rf"pinned|virtual|physical|graphics)[ _-]{{0,2}})?{_KIND_OF_MEMORY}"
        r"|out_?of_?(?:\w{1,20}_)?mem(?:ory)?|outof(?:\w{1,20}?)memory\w{0,20}"
        r"|\b(?:hbm|cuda|device|gpu|vram)?oom\b(?![ _-]?(?:score|guard|adj|kill\w*-dis))"
        r"|resource[ _]?exhausted(?:error)?"
        rf"|(?:insufficient|not enough|no available|no more|lack of|low on) {_WHAT}"
        rf"{_KIND_OF_MEMORY}"
        rf"|{_KIND_OF_MEMORY}(?: \w{{1,20}})? (?:(?:is|are|was|were|isn['’]t|is not|not) )"
        r"{1,2}(?:enough|sufficient|insufficient|exhausted)"
        rf"|(?:exhausted|used up) (?:all )?{_WHAT}{_KIND_OF_MEMORY}"
        r"|low memory!|memory is insufficient|bad_alloc|bad allocation|\w{0,20}MemoryError"
        r"|mem(?:ory)?[ _]alloc(?:ation)?[ _]fail\w{0,4}"
        r"|cannot allocate memory|heap space\b|free memory on device"
    ),
    Phrase.FAILED: compile_words(
        r"(?:fail(?:ed|s|ure)?|unable|cannot|can['’]t|can not|could not|couldn['’]t|"
        r"not possible|refused?|impossible)(?: to)?(?: be)?(?: \w{1,12}){0,2}? "
        r"(?:re|c|m)?alloc(?:ate[ds]?|ating|ation)?\b"
        r"|\w{0,40}alloc\w{0,20}(?:\([^()\n]{0,40}\))?(?: of)?(?: [\w.,:]{1,24}){0,5}? "
        r"(?:retry )?fail(?:ed|ure|s)?\b"
        r"|(?:could|can)(?: not|not|n['’]t) be allocated"
        r"|\b\w{0,20}alloc(?:ation)?[_ ]?fail(?:ed|ure)\b"
        r"|(?:attempt\w{0,4}|tr(?:ied|ying)) to (?:re)?(?:alloc|reserv)\w{1,4}"
    ),
    Phrase.EXCEEDED: compile_words(
        r"(?:exceed(?:s|ed|ing)?|(?:great|larg|bigg)er than|more than|beyond|over|hit)"
        rf" (?:the |its |a )?(?:[\w%.-]{{1,20}} ){{0,4}}?{_KIND_OF_MEMORY}"
        r"(?: (?:space|limits?|budget|capacity|threshold|size))?"
        r"|(?:memory|heap|pool|vram|buffer)(?: size)? (?:limits? )?(?:was |is |has been )?"
        r"(?:exceed|reached)(?:ed|s)?"
        r"|exceed\w{0,3} (?:the )?(?:hbm|vram|memory|device) (?:capacity|limits?)"
        r"|maximum (?:allowed )?(?:buffer|pool|allocation) size"
        r"|reached heap limit"
    ),
    Phrase.KILLED: compile_words(
        r"oom[ _-]?kill(?:ed|er|ing)?\b(?!\W{0,3}: ?false)(?!-dis)"
        r"|kill(?:ed|ing)?(?: by| due to| for| because of)? (?:[\w/.-]{1,40} ){0,6}?"
        r"(?:(?:exceeding|high|low|out of) )?memory(?: pressure| limits?)?"
        r"|killed: (?:v?mem|memory|rss)\b"
        r"|memory (?:usage )?limit(?: of [\d.]{1,9} ?[KMGT]?i?B?)? (?:was |is |been ){0,2}"
        r"(?:exceeded|reached)"
        r"|evicted[^\n]{0,60} memory|low on resource: memory"
        r"|memory[\w ]{0,30}(?:, |\. )?(?:\w{1,12} )?(?:kill|restart)ing"
    ),
}
"""Each way with its phrases."""

_NOT_MEMORY = compile_words(
    r"out of resources?: ?(?:shared memory|registers)|shared memory, required"
    r"|static tls|pseudo.?t[er]|\bptys?\b|\bport\b|address already|\bsockets?\b"
    r"|\bdisk\b|no space left|quota|\brate limit|message larger than|file descriptors?"
    r"|allocate resources|job submit|\bnode configuration|nodes are available"
    r"|memory leak|leaked|free system memory|memory format|tokens? per"
    r"|out of bounds?|workspace memory to run|limited memory|\brecursion\b"
    r"|is not a failure|no attribute|cannot import|is not defined|\bdata to\b"
)
"""What was short was something else."""
_HEDGED = compile_words(
    r"\b(?:if|when(?!ever)|unless|avoid\w{0,3}|prevent\w{0,3}|in case|may|might|would|"
    r"could(?! not\b)|can(?! not\b) (?:cause|lead|run|be)|help\w{0,3}|hints?|tips?|"
    r"how to|handle\w{0,2}|"
    r"recover\w{0,3}|catch\w{0,3}|except|raise|ensure|whether|should|possibl[ey]|"
    r"potential\w{0,2}|workaround|test_\w{1,40}|set|fix\w{0,3}|feat|setting|"
    r"friend|told|adds?|def|class|import)\b"
)
"""Before the phrase, in its sentence: advice, code or a story, not an event."""
_FACT_BEFORE_HEDGE = compile_words(
    r"occurred|happened|\w{0,40}(?:error|exception|failed|fatal) ?:"
)
_ERROR_MARK = compile_words(
    r"\b\w{0,40}(?:error|exception|fail(?:ed|ure|s)?|fatal|panic\w{0,4}|abort\w{0,3}|"
    r"terminat\w{1,4}|killed|evicted|crash\w{0,3}|resource_exhausted)\b"
    r"|[A-Za-z]\w{0,40}(?:Error|Exception)\b|\bE\d{4,5}\b|\berrno\b|status"
)


@dataclass(frozen=True)
class Place:
    """A backend and the words that give it away."""

    backend: str
    """As :attr:`loaderkit.budget.messages.Message.backend` names it."""
    words: re.Pattern[str]
    """Any of them is enough."""


PLACES = (
    Place(
        "hip", compile_words(r"\b(?:hip|rocm|miopen|rocblas|amdgpu)(?![a-z])|hip[A-Z_]")
    ),
    Place(
        "xpu",
        compile_words(
            r"\bxpu\b|level[ _]zero|\bsycl|_sycl|\b(?:UR|ZE|PI)_\w|\bze[A-Z]\w|ipex|"
            r"Current platform can NOT allocate memory block"
        ),
    ),
    Place("npu", compile_words(r"\bnpu\b|ascend|\bacl|EL0004|207001|\bGE module")),
    Place("tpu", compile_words(r"\btpu\b|\bhbm\b|hbmoom")),
    Place(
        "mps",
        compile_words(
            r"\bmps\b|\bmetal\b|_metal|kIOGPU|MTL[A-Z]|malloc_or_wait|iogpu|\bmlx\b"
        ),
    ),
    Place("hpu", compile_words(r"\bhpu\b|habana|synapse|PT_DEVMEM|gaudi")),
    Place("musa", compile_words(r"\bmusa\b")),
    Place("mlu", compile_words(r"\bmlu\b|cnrt")),
    Place("neuron", compile_words(r"\bneuron|\bnrt_|NRT_RESOURCE")),
    Place("vulkan", compile_words(r"vulkan|\bvk::|ErrorOutOfDeviceMemory")),
    Place(
        "cuda",
        compile_words(
            r"(?<![a-z])cuda|\bgpu|vram|\bcu(?:blas|dnn|fft|Mem)|nvidia|tensorrt|\btrt\b"
            r"|nvinfer|virtualMemoryBuffer|\brmm\b|cupy|\bnccl|gpu_memory_utilization"
            r"|KV cache"
        ),
    ),
)
"""Backends; a word that is used for several stands last."""
HOST_PLACE = compile_words(
    r"\bcpu|\bhost\b|\bnumpy|\bmalloc\b|\brealloc\b|array with shape|arrow|opencv|cv::|"
    r"\bheap\b|java|javascript|\bmmap|\bRAM\b|libgomp|bad_?alloc|duckdb|ggml_aligned|"
    r"mach_vm|system memory|memory pool|out of memory error: |cannot allocate memory|"
    r"\[?errno 12\]?|panicked|\bruntime: out|MemoryError|"
    r"allocate vector|allowed memory size|\bphp\b|virtual memory exhausted"
)
"""Words of allocations by the processor."""
ANY_DEVICE = compile_words(r"\b(?:device|accelerator|graphics card)\b")
"""Words of a device that is not named."""
PINNED = compile_words(
    r"pinned|page.?locked|HostAlloc|HostMalloc|host_malloc|HostRegister|pin_memory|"
    r"pin memory"
)
SHARED = compile_words(
    r"/dev/shm|shared memory (?:segment|object|file|\(shm\))|\bshm\b|shm_open|"
    r"torch_shm"
)
BUDGET = compile_words(
    r"gpu_memory_utilization|gpu memory utilization|mem-fraction|mem_fraction|kv cache|"
    r"cache blocks|limit set to|per_process_memory_fraction|user-supplied memory"
)
"""Software that keeps to a share of the device."""
ONE_BLOCK = compile_words(
    r"maximum (?:allowed )?(?:buffer|allocation|block) size|block with size larger|"
    r"max(?:imum)?_?(?:buffer|memory_?allocation)_?(?:length|size)"
)
"""One request is larger than the device gives in one piece."""


def is_negated(text: str, start: int, end: int) -> bool:
    """Whether a phrase is advice, code or about something else than memory.

    Args:
        text: The sentence around it.
        start: Where the phrase begins.
        end: Where it ends.

    >>> text = "To avoid CUDA out of memory errors, lower the batch size."
    >>> is_negated(text, 9, 27)
    True
    """
    if _NOT_MEMORY.search(text):
        return True
    before = text[:start]
    hedge = _HEDGED.search(before)
    if hedge is None:
        return False
    return _FACT_BEFORE_HEDGE.search(before[: hedge.start()]) is None


def has_error_mark(text: str) -> bool:
    """Whether a text is the report of a failure.

    >>> has_error_mark("fatal: out of memory"), has_error_mark("we ran out of memory")
    (True, False)
    """
    return _ERROR_MARK.search(text) is not None
