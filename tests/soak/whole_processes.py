"""All ways to leak, searched for among all objects of a process; 3 min of CPU.

``tests/leaks/test_cases.py`` leaves out what importing torch makes, for most of them.
"""

import leaks_corpus
from cases import CASES
from test_cases import judge_corpus, judge_our_cases


def test_our_cases_are_judged_right_among_all_objects(tmp_path):
    judge_our_cases(list(CASES), tmp_path, "all")


def test_the_corpus_is_judged_right_among_all_objects(tmp_path):
    judge_corpus(list(leaks_corpus.CASES), tmp_path, "all")
