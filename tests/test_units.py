"""Sizes as text and back."""

import pytest

from loaderkit.units import format_amount, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (1 << 50, "1.00 PiB"),
        (2**63, "8.00 EiB"),
    ],
)
def test_a_size_is_written_with_three_digits(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize("text", ["", "many", "3 XB", "-1 MiB", "8", " 1.5 ", "4095"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="a size is a number and a unit"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("1K", 1000),
        ("1 kib", 1024),
        ("3 MB", 3_000_000),
        ("3MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("0.5 TB", 500_000_000_000),
        ("0.5TiB", 1 << 39),
        ("2 PiB", 2 << 50),
        ("8 EB", 8 * 10**18),
    ],
)
def test_units_are_powers_of_1000_and_with_an_i_of_1024(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1000, "0.98 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (-3 << 20, "-3.00 MiB"),
    ],
)
def test_digits_shrink_as_numbers_grow(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("value", "unit", "short", "text"),
    [
        (3.0, "threads", False, "3 threads"),
        (3.25, "threads", False, "3.2 threads"),
        (1234567.0, "blocks", True, "1,234,567"),
        (2048.4, "bytes", True, "2.00 KiB"),
    ],
)
def test_an_amount_has_its_unit(value, unit, short, text):
    assert format_amount(value, unit, short=short) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0009994, "999 us"),
        (0.0009996, "1.00 ms"),
        (0.9994, "999 ms"),
        (1.0, "1.00 s"),
        (12.34, "12.3 s"),
        (119.0, "119 s"),
        (120.0, "2.00 min"),
        (5000.0, "83.3 min"),
        (7200.0, "2.00 h"),
        (172_000.0, "47.8 h"),
        (7e6, "81.0 d"),
    ],
)
def test_a_time_has_three_digits(seconds, text):
    assert format_seconds(seconds) == text
