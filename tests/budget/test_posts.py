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


WHOLE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU "
        "0 has a total capacity of 8.00 GiB of which 12.00 MiB is free."
    ),
    "Out of memory: Killed process 4121 (python3) total-vm:4821kB, anon-rss:1671kB",
    "java.lang.OutOfMemoryError: Java heap space",
    (
        "MemoryError: Unable to allocate 3.2 GiB for an array with shape (40000, "
        "10000) and data type float64"
    ),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0.",
    "OSError: [Errno 12] Cannot allocate memory",
    (
        "duckdb.OutOfMemoryException: Out of Memory Error: could not allocate block of "
        "size 256.0 KiB (4.7 GiB/4.7 GiB used)"
    ),
    "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
)
"""With their class and their numbers, of one sentence or several."""
QUOTATIONS = {
    "a comment": "    // {}\n    retry(batch);",
    "a comment among statements": "x = 1\n# {}\ny = 2",
    "a comment behind a statement": "    out = model(x)  # {}",
    "a comment in SQL": "SELECT 1;\n-- {}\nSELECT 2;",
    "a variable": 'message = "{}"',
    "a constant": "const msg = '{}';",
    "what is asserted": "assert '{}' in log",
    "what is expected": 'expect(e.message).toBe("{}")',
    "what is raised": '    raise RuntimeError("{}")',
    "what is printed": "    print('{}')",
    "a key": '    "{}": "retry",',
    "a pattern": "pattern: '{}'",
    "an example": 'examples:\n  - text: "{}"\n    label: memory',
    "an explanation": 'The message "{}" means that the batch is too large.',
    "a condition": "When you see `{}`, lower the batch.",
    "a cell": "| `{}` | lower the batch |",
    "a bold label": "* **{}** \u2013 use less",
    "a change": "Fix {} (#812)",
    "a list of literals": 'MARKERS = (\n    "lost",\n    "{}",\n    "timeout",\n)',
}
TOLD = {
    "what a job ended with": 'The job stopped with "{}".',
    "what somebody got": 'I got "{}" after an hour.',
    "a span of code": "I ran it with two cards and got:\n\n`{}`",
    "a log": 'ERROR trainer: caught exception "{}" in step 3',
    "a field": 'level=error msg="{}" job=7',
    "a record": '{{"error": "{}", "code": 1}}',
    "a column": "2026-01-01 10:00:00 | ERROR | {} | job 7",
    "a line among statements": "step 3: loss = 0.2\n{}\nsaving = 1",
}


@pytest.mark.parametrize("frame", QUOTATIONS)
def test_a_whole_message_that_is_quoted_is_no_report(frame):
    texts = [QUOTATIONS[frame].format(message) for message in WHOLE]

    assert [text for text in texts if read_message(text).is_oom is not False] == []


@pytest.mark.parametrize("frame", TOLD)
def test_a_whole_message_that_is_told_is_found(frame):
    texts = [TOLD[frame].format(message) for message in WHOLE]

    assert [text for text in texts if read_message(text).is_oom is False] == []


MANUALS = {
    "an entry with its cause": "NNL-00003\n\n{}\n\nCause\n\nThe program is large.",
    "an entry with what to do": "{}\n\nMore is needed.\n\nUser response:\n\nWait.",
    "an article": "### Memory\n\n**Error**:\n{}\n\n**Solution**:\n\nUse less.",
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


@pytest.mark.parametrize(
    "name", ["torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError", "MemoryError"]
)
def test_a_class_in_a_docstring_is_no_report(name):
    for frame in (
        "    Raises:\n        {}: if the batch is too large\n            for the card.",
        "    Returns:\n        The loss.\n\n    Raises:\n        {}: The card is full.",
        "Throws:\n    {}: when nothing is left",
    ):
        text = frame.format(name)
        assert read_message(text).is_oom is False, text


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


def test_a_fence_parts_paragraphs_and_a_broken_line_is_joined():
    assert clean_log("It stops with\n\n```\nfull\n```\nWhy?") == (
        "It stops with\n\nfull\n\nWhy?"
    )
    assert clean_log("Allocating the last\nblock") == "Allocating the last block"


@pytest.mark.parametrize("verb", ["got", "hit", "received", "encountered"])
def test_an_error_that_somebody_got_by_its_class_alone_is_found(verb):
    for text in ("MemoryError", "RuntimeError: CUDA error: out of memory"):
        assert read_message(f"I {verb} the error `{text}` twice.").is_oom is True
        assert read_message(f"If I {verb} the error `{text}`, wait.").is_oom is False
