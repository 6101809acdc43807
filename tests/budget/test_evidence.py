"""A law of evidence: prose, code and manuals about running out are no reports of it.

The sentences here are ours.  Public ones of the same kinds were weighed for
``evidence.txt`` and are not kept (docs/budget.md).
"""

import itertools

import pytest

from loaderkit import diagnose_oom
from loaderkit.budget.diagnosis.evidence import weigh_evidence
from loaderkit.budget.diagnosis.messages import read_message
from loaderkit.budget.diagnosis.moods import Span

WORDINGS = (
    "out of memory",
    "CUDA out of memory",
    "cannot allocate memory",
    "insufficient memory",
    "memory limit exceeded",
    "OOM",
    "MemoryError",
)
PROSE = {
    "a person tells": "Yesterday I got {} again after an hour, and we do not know why.",
    "a person complains": "My laptop says {} with every model that I try to load.",
    "somebody answers": "You are seeing {} since the images are larger than before.",
    "somebody advises": "Try a smaller crop, the {} will go away then.",
    "a guide": "The most frequent reason for {} is a batch that grew with the data.",
    "a lecture": "A process gets {} once the pages that it touches exceed the share.",
    "a comparison": "This runs slower than the old version, but has no {} any more.",
    "a title": "{} during training on two cards",
    "a title about a step": "{} when loading the checkpoint",
    "a plan": "- Handle {} in the export step",
    "a change": "Fixed {} when the cache is empty",
    "a test's name": "check that {} is shown to the user",
    "a row of a manual": "ENOMEM There was {} for the copy of the name.",
    "a list of an interface": "EAGAIN, ENOMEM, EINVAL: interrupted, {}, wrong argument",
    "a comment of C": " * the caller has to free the list, {} or not",
    "a comment behind code": "    if (!p) goto fail;  /* {} */",
    "a comment of Python": "# {} is handled by the caller",
    "a string in a tuple": '    "{}",',
    "a dictionary": '    12: "{}",',
    "a handler": "    except MemoryError:  # {}",
    "a check": '    assert "{}" in str(caught.value)',
    "a branch": '    if "{}" in message:',
    "a log call": '    logger.error("{}");',
    "a page's link": "- [{}](#how-to-shrink-a-batch)",
    "markup": "<li><code>{}</code> is one of the states</li>",
    "a call over several lines": 'report(\n    "{}",\n    code,\n)',
    "a branch of C": 'if (!p) {{\n  fail("{}");\n  return -1;\n}}',
    "a row of a table": "| {} | lower the batch |",
    "a symptom": "Symptom: {}\nSolution: add memory",
    "an explanation": "{} \u2013 the device has no room left.",
    "a regular expression": "PATTERN = re.compile('{}|killed')",
    "a line of a changelog": "- Log {} ([#88](https://example.org/88))",
    "an error that is made": 'error = MemoryError("{}")\nhandle(error)',
    "a template": "throw new Error(`{} in ${{name}}`)",
    "a shell's branch": 'if [ "$reason" = "{}" ]; then',
    "a macro": '#define FULL "{}"\n#define BUSY "busy"',
    "what a function returns": "returns -1 on error ({})",
    "a bold label": "- **{}:** use fewer workers.",
    "an alias": "OutOfMemoryError is an alias of the class for {}.",
}
REPORTS = {
    "alone": "{}",
    "with a stop": "{}.",
    "an error": "RuntimeError: {}",
    "an error with a path": "torch.AcceleratorError: {}",
    "a program": "ffmpeg: {}",
    "a source line": "alloc.cc:212] {}",
    "a traceback": 'Traceback (most recent call last):\n  File "a.py"\nOSError: {}',
    "a status": "Error: exit status 1 ({})",
    "a field": '{{"level": "error", "msg": "{}"}}',
    "a field among others": '{{"level": "error", "msg": "{}", "ts": 17}}',
    "a service": "worker 3 failed: {}",
    "an amount": "failed with {} (requested 2.5 GiB)",
    "a label and a value": "status=FAILED reason={} pid=411",
}


@pytest.mark.parametrize("kind", PROSE)
def test_what_is_written_about_running_out_is_no_report(kind):
    taken = [
        text
        for wording in WORDINGS
        if read_message(text := PROSE[kind].format(wording)).is_oom is not False
    ]

    assert taken == []


@pytest.mark.parametrize("kind", REPORTS)
def test_what_a_program_printed_is_a_report(kind):
    missed = [
        text
        for wording in WORDINGS
        if read_message(text := REPORTS[kind].format(wording)).is_oom is not True
    ]

    assert missed == []


@pytest.mark.parametrize(
    "text",
    [
        "out of memory",
        "Out of memory",
        "CUDA out of memory.",
        "Cannot allocate memory",
        "MemoryError",
        "MemoryError:",
        "java.lang.OutOfMemoryError: Java heap space",
        "std::bad_alloc",
        "OOMKilled",
        "ENOMEM",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "Insufficient memory",
        "oom-kill",
    ],
)
def test_a_wording_pasted_alone_is_a_report(text):
    assert read_message(text).is_oom is True


def test_a_kill_without_its_reason_may_be_memory():
    assert read_message("Killed").is_oom == "maybe"


@pytest.mark.parametrize(
    "text",
    [
        "Task exited due to SIGKILL",
        "terminated by signal SIGKILL",
        "exit status: signal: 9, SIGKILL: kill",
        "received SIGKILL from the kernel",
    ],
)
def test_a_signals_name_is_a_guess_where_it_ended_something(text):
    assert read_message(text).is_oom == "maybe"


@pytest.mark.parametrize(
    "text",
    [
        "    os.kill(pid, signal.SIGKILL)",
        "SIGKILL = 9",
        "terminate() sends SIGKILL to the process",
        "# Send SIGKILL for immediate termination.",
        "1. **Limit:** a smaller one causes SIGKILL during the capture",
    ],
)
def test_a_signals_name_elsewhere_is_none(text):
    assert read_message(text).is_oom is False


def test_a_guess_in_a_line_of_advice_is_none():
    text = "- **CPU OOM:** Kubernetes ends the pod (exit code 137)"

    assert read_message(text).is_oom is False
    assert read_message("the pod ended with exit code 137").is_oom == "maybe"


@pytest.mark.parametrize(
    "below",
    ["  return 1;", "free(p);", "try:", "    );", "const n = 2;", "@Override {"],
)
def test_a_line_of_code_speaks_against_the_line_above_it(below):
    line = "acme: insufficient memory"
    phrase = Span(6, len(line))

    def weight(text):
        return weigh_evidence(text, phrase, Span(0, len(line))).weight

    assert weight(f"{line}\n{below}") < weight(line)
    assert weight(f"{line}\nSee the log.") == weight(line)


def test_an_error_below_the_code_that_raises_it_is_found():
    text = (
        '  File "a.py", line 3, in allocate\n'
        "    raise MemoryError('too large')\n"
        "MemoryError: too large"
    )

    assert read_message(text).is_oom is True


def test_reasons_against_are_said_to_the_reader():
    [note] = diagnose_oom("The OOM killer is a part of the kernel.").notes

    assert note.startswith('not understood: "OOM" tells of no event here')
    assert note.endswith(": errors as a topic, articles, a sentence")


def test_every_prose_frame_weighs_less_than_every_report():
    def weight(frame, wording):
        text = frame.format(wording)
        start = text.index(wording)
        phrase = Span(start, start + len(wording))
        begin = text.rfind("\n", 0, start) + 1
        return weigh_evidence(text, phrase, Span(begin, len(text))).weight

    pairs = itertools.product(("RuntimeError: {}", "alloc.cc:212] {}"), WORDINGS)
    lowest = min(weight(frame, wording) for frame, wording in pairs)
    pairs = itertools.product(
        (PROSE["a person tells"], PROSE["a log call"], PROSE["markup"]), WORDINGS
    )
    highest = max(weight(frame, wording) for frame, wording in pairs)

    assert highest < 0 < lowest
