"""Which cases of a law run where not all do: a share, in which no row is missing."""

import collections
import zlib


def checksum_of(item):
    """Give a number by which items are in no order of their parameters.

    Every fourth of them would be the same value of a parameter that has four.
    """
    return zlib.crc32(item.name.encode())


def rows_of(case):
    """Name the row of each list of parameters that a case is made of."""
    params = case.callspec.params
    lists = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        lists.append([name.strip() for name in names])
    listed = {name for names in lists for name in names}
    # Those of fixtures stand alone.
    lists += [[name] for name in params if name not in listed]
    # A value is the same object in all cases that it is in.
    return {tuple((name, id(params[name])) for name in names) for names in lists}


def choose_cases(cases, count):
    """Choose some of a law's cases: a number, or more.

    Of a product of lists each row of each list is in one case at least, as in a Latin
    square, and these cases come first; of a single list it is the number alone.
    """
    cases = sorted(cases, key=checksum_of)
    rows = {case: rows_of(case) for case in cases}
    counts = collections.Counter(row for case in cases for row in rows[case])
    unseen = {row for row, count in counts.items() if count > 1}
    chosen = []
    while unseen:
        # The first of those that show most of what is still to be seen.
        case = max(cases, key=lambda case: len(rows[case] & unseen))
        chosen.append(case)
        unseen -= rows[case]
    others = [case for case in cases if case not in chosen]
    return chosen + others[: max(count - len(chosen), 0)]
