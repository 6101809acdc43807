"""Laws of what stands beside a sentence: a report's parts come from one message.

Look-alikes that are read as none stay none side by side: neither the amounts nor the
end of another sentence make a report of them.  A report between them stays one.
"""

import random
import sys
from pathlib import Path

import pytest

from loaderkit.budget.diagnosis.evidence import is_prose
from loaderkit.budget.diagnosis.judge import judge
from loaderkit.budget.diagnosis.messages import read_message
from loaderkit.budget.diagnosis.moods import Span
from loaderkit.budget.diagnosis.sentences import message_around

sys.path.insert(0, str(Path(__file__).parents[1] / "corpora"))

from reported_messages import REPORTS


def is_sentence(text):
    is_whole = text[:1].isupper() and text.rstrip().endswith(".")
    return is_whole and "\n" not in text and 40 < len(text) < 300


LOOK_ALIKES = sorted(
    {row.text for row in REPORTS if row.is_oom is False and is_sentence(row.text)}
)
REPORTED = sorted(
    {row.text for row in REPORTS if row.is_oom is True and 20 < len(row.text) < 1000}
)


def draw_paragraphs(seed, count):
    """Two to five look-alikes side by side, each of them read as no report."""
    chance = random.Random(seed)
    for _ in range(count):
        texts = chance.sample(LOOK_ALIKES, chance.randint(2, 5))
        yield " ".join(texts)


def count_taken(paragraphs):
    return sum(read_message(text).is_oom is not False for text in paragraphs)


def draw_between(seed, count):
    """Reports between two look-alikes, in paragraphs or lines of their own."""
    chance = random.Random(seed)
    for _ in range(count):
        above, below = chance.sample(LOOK_ALIKES, 2)
        report = chance.choice(REPORTED)
        joint = chance.choice(("\n", "\n\n"))
        yield report, joint.join((above, report, below))


MOST_TAKEN = 0.004
"""Of paragraphs; 0.3 % of 10,000 were (3.0 % before neighbours were told apart)."""
MOST_LOST, MOST_CHANGED, MOST_RESTATED = 0.02, 0.04, 0.05
"""Of reports between look-alikes, 0.9, 1.6 and 1.9 % of 6,000 (1.8, 2.7 and 4.9 % of
them before a sentence lent amounts only where it states some)."""
AMOUNTS = ("requested", "free", "capacity", "in_use", "limit")


@pytest.mark.slow
def test_look_alikes_side_by_side_report_nothing():
    assert count_taken(draw_paragraphs(seed=1, count=500)) <= MOST_TAKEN * 500


@pytest.mark.slow
def test_a_report_among_look_alikes_is_taken():
    chance = random.Random(1)
    report = "Worker died: CUDA out of memory. Tried to allocate 2.00 GiB."
    planted = []
    for text in draw_paragraphs(seed=1, count=50):
        sentences = [text, report]
        chance.shuffle(sentences)
        planted.append("\n".join(sentences))

    assert count_taken(planted) >= 48


@pytest.mark.slow
def test_a_report_between_look_alikes_stays_one():
    lost = changed = restated = 0
    for report, text in draw_between(seed=1, count=300):
        alone, beside = read_message(report), read_message(text)
        if alone.is_oom is not True:
            continue
        lost += beside.is_oom is False
        changed += judge(beside).verdict != judge(alone).verdict
        restated += any(getattr(beside, x) != getattr(alone, x) for x in AMOUNTS)

    assert lost <= MOST_LOST * 300
    assert changed <= MOST_CHANGED * 300
    assert restated <= MOST_RESTATED * 300


STORIES = (
    "The worker then reports an OutOfMemoryError to the scheduler of the cluster.",
    "Anything larger does not fit in GPU memory as one picture, so it is tiled.",
    "It was difficult to see, as the pods were deleted after the OOM had ended them.",
)
NEIGHBOURS = (
    "This error comes up from time to time, as all errors do.",
    "For example, a large model in float32 needs some 8 GB of VRAM.",
    "Try a smaller batch as this may be caused by a large one.",
    "The kernel ended the process since it had used all of its memory.",
    "ValueError: utilization must be less than 1.0. Got 1.2.",
    "You are certain that 256 GB is the size of the disk?",
)


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("story", STORIES)
def test_a_neighbour_makes_no_report_of_a_story(story, neighbour):
    assert read_message(story).is_oom is False

    assert read_message(f"{story} {neighbour}").is_oom is False
    assert read_message(f"{neighbour} {story}").is_oom is False


PARTS = (
    ("Failed to resize buffer.", "Requested: 614416, available 494876.", "requested"),
    ("Job exceeded memory limit of 2048 MB.", "Peak usage: 2310 MB.", "limit"),
    ("Out of memory on the GPU.", "Used: 7.5 GiB, total: 8 GiB.", "in_use"),
)


@pytest.mark.parametrize(("event", "amounts", "field"), PARTS)
def test_a_part_that_was_printed_with_it_belongs_to_a_report(event, amounts, field):
    message = read_message(f"{event} {amounts}")

    assert message.is_oom is True
    assert getattr(message, field) is not None


@pytest.mark.parametrize(
    "advice", ["Lower the batch size, since that is what helps most people.", ""]
)
def test_advice_parts_no_report_from_its_amounts(advice):
    text = f"Out of memory on the GPU. {advice} Requested: 4 GiB, free: 1 GiB."

    message = read_message(text)

    assert (message.requested, message.free) == (4 << 30, 1 << 30)


def test_a_story_in_the_next_line_lends_no_amount():
    error = "CPLEX Error 1001: Out of memory."
    story = "My machine has 32 GB of RAM and I have disabled any swap."

    assert read_message(f"{error}\n{story}").capacity is None
    assert read_message(f"{error}\nMachine: 32 GB of RAM in total").requested is None


def test_a_phrase_ends_with_its_sentence():
    text = "Source data is larger than buffer. Memory in use was read before."

    assert read_message(text).is_oom is False
    assert read_message("RuntimeError: model is larger than GPU memory.").is_oom is True


def test_a_message_begins_with_its_error():
    text = "Out of memory. Used: 8 GiB. ValueError: 7 GiB"

    assert text[slice(*message_around(text, Span(0, 13)))].endswith("8 GiB")
    assert message_around(text, Span(28, len(text))).start == 28


def test_an_old_quotation_is_closed():
    text = (
        "cannot open `a.png' here. My guess was that it was OOMKilled, but it exited."
    )

    assert read_message(text + " See `try_reserve` for more.").is_oom is False


@pytest.mark.parametrize(
    ("sentence", "is_story"),
    [
        ("We recently bought more memory and it still raises this error", True),
        ("Diagnosis: The code tried to use more than 128MB of RAM", False),
        ("You need at least 550k of conventional memory to run this program", False),
    ],
)
def test_what_a_person_wrote_is_known_by_its_words(sentence, is_story):
    assert is_prose(sentence) is is_story


def test_an_end_in_another_line_counts_where_it_is_told_as_a_fact():
    error = "tar: memory exhausted"
    rule = "Problem: when a job is killed by the oom killer, nobody sees it."

    assert read_message(f"{error}\n{rule}").kind == read_message(error).kind
    assert (
        read_message(f"{error}\nThe job was killed by the oom killer").kind == "killed"
    )
