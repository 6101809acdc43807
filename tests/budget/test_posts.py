"""Laws of posts and pages: what stands around a message decides whether it happened.

The same messages are put into what users write around an error that they had, and into
sentences, lists, tables and files that only speak of it.
"""

import pytest

from loaderkit.budget.diagnosis.log_text import clean_log
from loaderkit.budget.diagnosis.messages import read_message

MESSAGES = (
    "CUDA out of memory",
    "cannot allocate memory",
    "insufficient memory",
    "memory limit exceeded",
    "OutOfMemoryError",
    "CUDA error: out of memory",
    "failed to allocate 2048 MB",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "Out of memory: Killed process 4121 (python3)",
    "JavaScript heap out of memory",
    "std::bad_alloc",
    "Container killed by YARN for exceeding memory limits",
)
WHOLE_MESSAGES = {"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"}
"""With its class and its amount: who tells one in a sentence had it."""
REPORTS = {
    "a question behind it": "Got this after an hour:\n\n{}\n\nCan anyone help?",
    "advice behind it": "My run stops with\n\n{}\n\nIf you need more, tell me.",
    "a log in fences": "### Logs\n```\nstep 3\nERROR: {}\n```\n### Version\n2.1",
    "a bar above it": "My run died:\n\n100%|##| 12/12 [00:01<00:00]\nERROR: {}",
    "a quoted post": "> I have this with two cards:\n>\n> RuntimeError: {}\n>\n> Why?",
    "syslog": "May 07 14:29:23 node7 trainer[1852]: {}",
    "journalctl in French": "avril 16 21:08:50 node7 trainer[1852]: {}",
    "a field of a pod": "State:     Terminated\n  Reason:  {}\n  Exit Code:  137",
}
MENTIONS = {
    "an example of a condition": "If you see this message, use less:\n```\n{}\n```",
    "an example of a possibility": "You may get this message:\n\n{}\n\nClose others.",
    "a typical message": "A typical message looks like this:\n\n    {}\n",
    "a pattern to look for": "  - name: memory\n    pattern: '{}'\n    action: retry",
    "an arm of a match": 'Error::Memory => "{}",',
    "a person in small letters": "i have seen {} when we use more than two workers",
    "an example in a sentence": 'For example, "{}" tells us that it was too small.',
}


@pytest.mark.parametrize("frame", REPORTS)
def test_a_message_in_a_post_is_found(frame):
    missed = [
        text
        for message in MESSAGES
        if read_message(text := REPORTS[frame].format(message)).is_oom is False
    ]

    assert missed == []


@pytest.mark.parametrize("frame", MENTIONS)
def test_what_only_speaks_of_a_message_is_none(frame):
    taken = [
        text
        for message in set(MESSAGES) - WHOLE_MESSAGES
        if read_message(text := MENTIONS[frame].format(message)).is_oom is not False
    ]

    assert taken == []


@pytest.mark.parametrize(
    "table",
    [
        "12 {}\n13 permission denied\n14 bad address",
        "- {} of the applications\n- Too many open files",
        "1. {} - lower the batch size\n2. Timeout - raise the limit",
        "  JOB_OK = 0,\n  OUT_OF_MEMORY = 3, // {}\n  JOB_LOST = 4,",
        "    [NO_MEMORY]: '{}',\n    [BUSY]: 'the device is busy',",
    ],
)
def test_a_row_beside_rows_of_other_words_is_no_report(table):
    taken = [
        text
        for message in ("out of memory", "insufficient memory", "not enough memory")
        if read_message(text := table.format(message)).is_oom is not False
    ]

    assert taken == []


MANUALS = {
    "an entry with its cause": "NNL-00003\n\n{}\n\nCause\n\nThe program is large.",
    "an entry with what to do": "{}\n\nMore is needed.\n\nUser response:\n\nWait.",
    "a row of a table": "Status | Meaning\n---|---\n1 | lost\n2 | busy\n3 | {}",
    "a later row of a table": "| Id | Text |\n|---|---|\n| 1 | lost |\n| 3 | {} |",
    "a rule of alerts": "alert: M\nexpr: x > 0\nannotations:\n  summary: {}",
    "a comparison in CMake": 'elseif(log MATCHES "{}")\n    set(short ON)',
    "a query": "SELECT id FROM runs WHERE error LIKE '%{}%'",
    "a title of a change": "docker: log that a task had {} before it ended",
}


@pytest.mark.parametrize("page", MANUALS)
def test_an_entry_of_a_manual_or_of_a_program_is_no_report(page):
    taken = [
        text
        for message in ("out of memory", "insufficient memory", "memory exhausted")
        if read_message(text := MANUALS[page].format(message)).is_oom is not False
    ]

    assert taken == []


@pytest.mark.parametrize("code", [137, -9])
@pytest.mark.parametrize(
    "words",
    [
        "Exit code {} in Docker typically indicates a kill.",
        "Exit code {} usually means that the kernel ended it.",
        "Exit code {}. That's what SIGKILL leaves.",
        "Exit code {} (this is SIGKILL) has several causes.",
        "- Exit code: {} or 247\nThe data may be too large.",
    ],
)
def test_a_code_that_is_explained_is_no_report(words, code):
    assert read_message(words.format(code)).is_oom is False


@pytest.mark.parametrize(
    "name",
    [
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CL_OUT_OF_RESOURCES",
        "JOB_OUT_OF_MEMORY",
    ],
)
def test_a_member_of_an_enumeration_is_no_report(name):
    for member in (f"  {name} = 3,", f"  {name} = 0x3,  // it failed", f"{name} = -5,"):
        text = f"  X_SUCCESS = 0,\n{member}\n  X_INVALID_VALUE = 7,"
        assert read_message(text).is_oom is False, text
        assert read_message(member).is_oom is False, member
    assert read_message(f"RuntimeError: {name} when calling `create()`").is_oom


def test_lines_that_repeat_their_words_are_a_log():
    text = "3: worker out of memory\n4: worker out of memory"

    assert read_message(text).is_oom is True


def test_paragraphs_stay_apart():
    assert clean_log("It stops with\n\n```\nfull\n```\nWhy?") == (
        "It stops with\n\nfull\n\nWhy?"
    )
    assert clean_log("Allocating the last\nblock") == "Allocating the last block"
