"""A summary of a cache is printed in columns, also where a field's name is long."""

from loaderkit.datasets.inspect import CacheSummary, Field
from loaderkit.wrapping import WIDTH

NAMES = ["x", "a_name_of_exactly_thirty_six_letters", "model.encoder." * 9]


def summary_of(names):
    fields = [Field(name, "tensor", "float32", "[12, ?]", 900, 12) for name in names]
    return CacheSummary("c.lk", 12, "dict", 1, 1, 9, None, tuple(fields), (), {})


def test_columns_stand_below_each_other_behind_names_of_any_length():
    rows = [line for line in str(summary_of(NAMES)).splitlines() if "float32" in line]

    assert len(rows) == len(NAMES)
    assert len({row.index("float32") for row in rows}) == 1
    assert max(map(len, rows)) <= WIDTH


def test_a_card_has_a_row_for_each_field():
    # Long names may break where they have underscores and dots.
    card = summary_of(NAMES)._repr_html_().replace("<wbr>", "")

    assert [card.count(f">{name}</td>") for name in NAMES] == [1, 1, 1]
