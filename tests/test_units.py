"""Sizes as text and back."""

import pytest

from loaderkit import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (1 << 50, "1024 TiB")],
)
def test_a_size_is_written_with_three_digits(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize("text", ["", "many", "3 XB", "-1 MiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="a size is a number and a unit"):
        parse_bytes(text)
