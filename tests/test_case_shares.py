"""Of a product of lists no row is left out."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

from case_shares import choose_cases


@dataclass(eq=False)
class Case:
    """A test of pytest's, as far as it is looked at."""

    name: str
    callspec: SimpleNamespace
    marks: list

    def iter_markers(self, name):
        assert name == "parametrize"
        return self.marks


def cases_of(lists, fixture=()):
    """Make the cases of a law, as pytest makes them.

    Args:
        lists: Rows by the names of their parameters, as ``parametrize`` takes both.
        fixture: Values of a fixture.
    """
    marks = [SimpleNamespace(args=(names, rows)) for names, rows in lists.items()]
    cases = []
    for rows in itertools.product(*lists.values(), fixture or (None,)):
        *rows, of_fixture = rows
        params = {"of_fixture": of_fixture} if fixture else {}
        for names, row in zip(lists, rows, strict=True):
            names = names.split(", ")
            params |= zip(names, row if len(names) > 1 else [row], strict=True)
        cases.append(Case(f"test[{params}]", SimpleNamespace(params=params), marks))
    return cases


def values(cases, *names):
    return {tuple(case.callspec.params[name] for name in names) for case in cases}


def test_of_a_single_list_a_number_of_cases_runs():
    cases = cases_of({"number": range(10)})

    assert len(choose_cases(cases, 3)) == 3
    assert choose_cases(cases, 3) == choose_cases(cases[::-1], 3)


def test_of_a_product_each_row_of_each_list_is_in_a_case():
    pairs = [(first, second) for first in range(3) for second in range(2)]
    lists = {"name": list("abcde"), "first, second": pairs}
    cases = cases_of(lists, fixture=["slow", "fast"])

    chosen = choose_cases(cases, 1)

    assert len(chosen) < len(cases) / 5
    assert values(chosen, "name") == values(cases, "name")
    assert values(chosen, "first", "second") == set(pairs)
    assert values(chosen, "of_fixture") == {("slow",), ("fast",)}
    half = len(cases) // 2
    assert choose_cases(cases, half)[: len(chosen)] == chosen
    assert len(choose_cases(cases, half)) == half
