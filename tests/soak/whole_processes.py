"""Our ways to leak, searched for among all objects of a process; 2 min of CPU.

``tests/leaks/test_cases.py`` leaves out what importing torch makes.
"""

from cases import CASES
from test_cases import judge_our_cases


def test_our_cases_are_judged_right_among_all_objects(tmp_path):
    judge_our_cases(list(CASES), tmp_path, "all")
