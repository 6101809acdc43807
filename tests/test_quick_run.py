"""The end of a quick run tells what took too long: tests, and the cases of a law."""

from quick_run import BUSY, MOST_CPU_S, MOST_LAW_CPU_S, tell_what_is_not_quick

LONG_S, SHORT_S = BUSY * MOST_CPU_S + 0.05, BUSY * MOST_CPU_S - 0.05
LAW = {f"test_d.py::test_law[{number}]": SHORT_S for number in range(3)}


def test_what_takes_too_long_is_told_the_longest_first():
    cpu_s = {"test_a.py::test_long": LONG_S, "test_b.py::test_short": SHORT_S, **LAW}

    lines = tell_what_is_not_quick(cpu_s)

    assert [line.split("::")[1] for line in lines] == ["test_law, 3 cases", "test_long"]
    assert f"{3 * SHORT_S:.2f} s" in lines[0]


def test_a_law_is_told_of_its_cases_together_and_of_no_other_test():
    few = dict(list(LAW.items())[:2])
    assert sum(few.values()) < BUSY * MOST_LAW_CPU_S

    assert tell_what_is_not_quick(few | {"test_d.py::test_alone": SHORT_S}) == []
