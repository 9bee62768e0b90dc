"""Numbers → text: the one place that decides how a count, a size, a ratio or a time is written. Pure functions.

Every function takes ``None`` for "not known" and answers ``UNKNOWN``; none of them ever turns that into 0.
"""

from __future__ import annotations

import math
from typing import Final

UNKNOWN: Final = "—"
#: An engine that counts blocks and keeps no tensors.
BOOKS_ONLY: Final = "books only"

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL: Final = ("", "k", "M", "G", "T", "P")


def count(number: float | None) -> str:
    """Write a whole number in full: ``12,345``."""
    return UNKNOWN if number is None else f"{round(number):,}"


def short(number: float | None) -> str:
    """Write a number in at most five characters: ``987``, ``12.3k``, ``4.6M``."""
    if number is None:
        return UNKNOWN
    sign, size, power = "-" if number < 0 else "", abs(number), 0
    if round(size) < 10_000:
        return f"{sign}{round(size)}"
    while size >= 999.5 and power < len(_DECIMAL) - 1:
        size, power = size / 1000, power + 1
    return f"{sign}{size:.{1 if size < 99.95 else 0}f}{_DECIMAL[power]}"


def blocks(number: int | None) -> str:
    """Write a number of blocks with its noun: ``1 block``, ``4,096 blocks``."""
    return f"{count(number)} {'block' if number == 1 else 'blocks'}"


def size(num_bytes: float | None) -> str:
    """Write bytes in binary units: ``512 B``, ``4.0 MiB``."""
    if num_bytes is None:
        return UNKNOWN
    value, power = float(num_bytes), 0
    while abs(value) >= 1023.95 and power < len(_BINARY) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.0f} B" if power == 0 else f"{value:.1f} {_BINARY[power]}"


def percent(ratio: float | None) -> str:
    """Write a ratio as a percentage; 0 and 100 % are written only when exactly that: ``67.4%``, ``<0.1%``."""
    if ratio is None or math.isnan(ratio):
        return UNKNOWN
    if 0 < ratio < 0.0005:
        return "<0.1%"
    if 0.9995 <= ratio < 1:
        return "99.9%"
    return f"{ratio * 100:.1f}%" if ratio < 1 else f"{ratio * 100:.0f}%"


def difference(value: float | None) -> str:
    """Write how far two results are apart; 0 is written only when exactly that: ``0``, ``1.2e-07``."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2g}"


def rate(per_s: float | None) -> str:
    """Write something a second: ``0/s``, ``3.5/s``, ``1,204/s``."""
    if per_s is None:
        return UNKNOWN
    if per_s and abs(per_s) < 0.05:
        return "<0.1/s"
    return f"{per_s:.1f}/s" if per_s and abs(per_s) < 100 else f"{short(per_s)}/s"


def seconds(duration_s: float | None) -> str:
    """Write a duration with two leading units at most: ``38 ms``, ``3.2 s``, ``5m 12s``, ``2h 05m``, ``3d 04h``."""
    if duration_s is None:
        return UNKNOWN
    if 0 < duration_s < 0.0995:
        return f"{duration_s * 1000:.1f} ms" if duration_s < 0.00995 else f"{duration_s * 1000:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    whole = round(duration_s)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours == 0:
        return f"{minutes}m {whole % 60:02d}s"
    if days == 0:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24:02d}h"


def storage(device: str, geometry: str) -> str:
    """Write where keys and values lie, and in which shape: ``cpu tiny``, or ``books only`` where none are kept."""
    return BOOKS_ONLY if geometry == "none" else f"{device} {geometry}"


def speed(times: float | None) -> str:
    """Write the pace of virtual time: ``x1``, ``x0.25``; ``None`` is no pace at all: ``max``."""
    return "max" if times is None else f"x{times:g}"
