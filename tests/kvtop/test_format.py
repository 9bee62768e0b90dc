"""Numbers as text: the cases where rounding or the unknown would mislead."""

from __future__ import annotations

import math

import pytest

from kvtop.model import format as fmt

_ALL = [fmt.count, fmt.short, fmt.size, fmt.percent, fmt.difference, fmt.rate, fmt.seconds]


@pytest.mark.parametrize("write", _ALL)
def test_unknown_is_never_zero(write):
    assert write(None) == fmt.UNKNOWN
    assert write(0) != fmt.UNKNOWN


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (fmt.count, 12_345, "12,345"),
        (fmt.blocks, 1, "1 block"),
        (fmt.blocks, 4096, "4,096 blocks"),
        (fmt.blocks, None, "— blocks"),
        (fmt.short, 0, "0"),
        (fmt.short, 9999, "9999"),
        (fmt.short, 9999.6, "10.0k"),
        (fmt.short, 10_000, "10.0k"),
        (fmt.short, 99_949, "99.9k"),
        (fmt.short, 99_960, "100k"),
        (fmt.short, 999_499, "999k"),
        (fmt.short, 999_500, "1.0M"),
        (fmt.short, 1_048_576, "1.0M"),
        (fmt.short, -12_300, "-12.3k"),
        (fmt.size, 0, "0 B"),
        (fmt.size, 1023, "1023 B"),
        (fmt.size, 1024, "1.0 KiB"),
        (fmt.size, 1024**2 - 1, "1.0 MiB"),
        (fmt.size, 7.125 * 1024**3, "7.1 GiB"),
        (fmt.percent, 0, "0.0%"),
        (fmt.percent, 0.0004, "<0.1%"),
        (fmt.percent, 0.674, "67.4%"),
        (fmt.percent, 0.9996, "99.9%"),
        (fmt.percent, 1.0, "100%"),
        (fmt.percent, math.nan, "—"),
        (fmt.difference, 0.0, "0"),
        (fmt.difference, 1.19e-7, "1.2e-07"),
        (fmt.difference, math.inf, "—"),
        (fmt.rate, 0, "0/s"),
        (fmt.rate, 0.01, "<0.1/s"),
        (fmt.rate, 3.456, "3.5/s"),
        (fmt.rate, 1204.4, "1204/s"),
        (fmt.rate, 123_456, "123k/s"),
        (fmt.seconds, 0, "0.0 s"),
        (fmt.seconds, 0.0038, "3.8 ms"),
        (fmt.seconds, 0.038, "38 ms"),
        (fmt.seconds, 3.2, "3.2 s"),
        (fmt.seconds, 59.96, "1m 00s"),
        (fmt.seconds, 312, "5m 12s"),
        (fmt.seconds, 3600, "1h 00m"),
        (fmt.seconds, 7500, "2h 05m"),
        (fmt.seconds, 273_600, "3d 04h"),
        (fmt.speed, None, "max"),
        (fmt.speed, 1.0, "x1"),
        (fmt.speed, 0.25, "x0.25"),
    ],
)
def test_text(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize("exponent", range(18))
def test_short_numbers_stay_short(exponent):
    for digits in (1, 9.994, 9.995, 9.9994, 9.9996):
        assert len(fmt.short(digits * 10**exponent)) <= 5
