"""A law of moods: what frames put around a wording decides whether it is a report."""

import itertools

import pytest

from loaderkit.budget.diagnosis.messages import read_message

WORDINGS = (
    "CUDA out of memory",
    "Cannot allocate memory",
    "out of memory",
    "insufficient memory",
    "failed to allocate memory",
)
REPORTS = (
    "RuntimeError: {}",
    "fatal error: {}",
    "E1121 10:00:00.000000 17 worker.cc:41] {}.",
    '{{"level": "error", "msg": "{}"}}',
    "load_model: {}\nexiting",
)
FRAMES = {
    "advice": "If the job stops with {}, lower the batch size.",
    "a promise": "This setting prevents {} on small machines.",
    "a literal that is passed": '    log_message(LEVEL_ERROR, "{} for the cache");',
    "a literal that is printed": 'printf("{}\\n"); exit(1);',
    "a literal that is assigned": 'message = "{}: smaller batch"',
    "a literal that is sought": 'is_shortage = "{}" in str(error)',
    "a comment": "    // {} was seen here once",
    "a definition": "@returns -1 with {}",
    "a macro": '#define ERR_MEM "{}."',
    "a heading": "### {}\n- Use a smaller model",
    "a bold label": "**{}**: use a smaller model.",
    "a cell of a table": "| 137 | {} | Use a larger node |",
    "a rule": "This code usually means {}.",
    "a denial": "There is plenty left, so this is not {}",
    "errors as a topic": "Documentation of {} errors",
    "a question": "Why does it say {}?",
    "what comes next": "{}, retrying with a smaller buffer",
    "what comes next, in other words": "{}, trying to fall back to the other pool",
    "only a warning": "RuntimeError: {}. That is only a warning.",
    "a size that is left open": "RuntimeError: {}, tried XXX.X GiB",
    "bytes that are left open": "RuntimeError: {}: XXXX bytes of YYYY bytes",
    "a name for a size": "RuntimeError: {} (tried <size>)",
    "a comment that says what is raised": "# RuntimeError is raised: {}",
    "a line of a change": '- message = (\n-     "{} for the cache "',
    "what should be of a quotation": '"{}" should not happen any more',
    "how a quotation reads": 'It says "{}", which reads as a bug of the driver.',
}


@pytest.mark.parametrize("frame", FRAMES)
def test_a_wording_in_such_a_frame_is_no_report(frame):
    taken = [
        text
        for wording in WORDINGS
        if read_message(text := FRAMES[frame].format(wording)).is_oom is not False
    ]

    assert taken == []


def test_the_same_wordings_are_reports_elsewhere():
    texts = [
        report.format(wording)
        for report, wording in itertools.product(REPORTS, WORDINGS)
    ]

    missed = [text for text in texts if read_message(text).is_oom is not True]

    assert missed == []


@pytest.mark.parametrize("cause", ["reason", "cause"])
def test_what_the_system_said_is_no_guess(cause):
    failed = f"Error in mcfork(): unable to fork, possible {cause}: {{}}"

    assert read_message(failed.format("Cannot allocate memory")).is_oom is True
    assert read_message(failed.format("out of memory")).is_oom is False


def test_disk_and_memory_have_one_limit():
    text = "Error: query exceeded the maximum {} limit"

    assert read_message(text.format("disk and memory")).is_oom is True
    assert read_message(text.format("disk")).is_oom is False


@pytest.mark.parametrize(
    "name", ["errors::OutOfMemory", "std::bad_alloc", "OutOfMemoryError", "ENOMEM"]
)
def test_a_call_that_goes_on_in_the_next_line_is_code(name):
    assert read_message(f"    return {name}(\n        size);").is_oom is False
    assert read_message(f"RuntimeError: {name}").is_oom is True
