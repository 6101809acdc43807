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
