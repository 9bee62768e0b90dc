"""Arrangement: which panel stands where, how large, and in which order the tabs are. Frozen; knows no widget."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from kvtop.tui.actions import USUAL

#: Panels by name, in the order that tabs have at first.
PANELS: Final = tuple(a.name[6:-2] for a in USUAL.panels)
#: The map is always the main pane.
MOVABLE: Final = tuple(panel for panel in PANELS if panel != "map")
#: In place of a panel: that place goes to the map.
NONE: Final = "none"
PERCENT: Final = (20, 80)
LINES: Final = (3, 30)
#: What one key press changes.
_PERCENT_STEP, _LINES_STEP = 3, 1
#: Share of the screen beside the map until somebody changes it, to count from.
_USUAL_PERCENT: Final = 39


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the panels are.

    Attributes:
        beside: The panel beside the map, below the inspector; ``none`` gives its room to the map.
        below: The panel in the bottom row, beside the trends; ``none`` gives the row to the map.
        side: Where ``beside`` stands, ``right`` or ``left``.
        side_width: Its columns, of 100; ``None`` leaves it to the size of the screen.
        below_height: Lines of the bottom row.
        order: Tabs that come first, in this order.
        hidden: Panels without a tab; their keys show them all the same.
    """

    beside: str = "sequences"
    below: str = "events"
    side: str = "right"
    side_width: int | None = None
    below_height: int = 6
    order: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def tabs(self) -> tuple[str, ...]:
        """Every panel in the order of the tabs, hidden ones too."""
        return (*self.order, *(panel for panel in PANELS if panel not in self.order))

    def moved(self, panel: str, to: int) -> Arrangement:
        """Return the arrangement with a panel's tab at another place, counted from 0."""
        others = [name for name in self.tabs if name != panel]
        others.insert(max(0, min(to, len(others))), panel)
        return replace(self, order=tuple(others))

    def toggled(self, panel: str) -> Arrangement:
        """Return the arrangement with a panel's tab hidden, or shown again; the map's always stays."""
        if panel == "map":
            return self
        rest = tuple(name for name in self.hidden if name != panel)
        return replace(self, hidden=rest if panel in self.hidden else (*rest, panel))

    def next_at(self, place: str) -> Arrangement:
        """Return the arrangement with the next panel at ``beside`` or ``below``: those with tabs, then none."""
        names = [name for name in self.tabs if name in MOVABLE and name not in self.hidden] + [NONE]
        here = getattr(self, place)
        return put(self, place, names[(names.index(here) + 1) % len(names)] if here in names else names[0])

    def wider(self, times: int) -> Arrangement:
        """Return the arrangement with what is beside the map wider, or narrower where ``times`` is below 0."""
        return put(self, "side_width", _within((self.side_width or _USUAL_PERCENT) + times * _PERCENT_STEP, PERCENT))

    def higher(self, times: int) -> Arrangement:
        """Return the arrangement with a higher bottom row, or a lower one where ``times`` is below 0."""
        return put(self, "below_height", _within(self.below_height + times * _LINES_STEP, LINES))

    def to_plain(self) -> dict[str, object]:
        """Return what differs from the usual arrangement, by the names that files have for it."""
        usual = AT_FIRST
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value != getattr(usual, name)
        }


#: The arrangement until somebody changes it.
AT_FIRST: Final = Arrangement()


def put(arrangement: Arrangement, name: str, value: object) -> Arrangement:
    """Return the arrangement with one field changed; it was checked before."""
    changed: dict[str, Any] = {name: value}
    return replace(arrangement, **changed)


def _within(number: int, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(number, bounds[1]))


def side_width_of(columns: int, of: int) -> int:
    """Return the share of the screen that so many columns are."""
    return _within(round(100 * columns / max(1, of)), PERCENT)


def below_height_of(lines: int) -> int:
    """Return a height within bounds."""
    return _within(lines, LINES)


def read_field(name: str, value: object) -> tuple[str, Any]:
    """Return a field's name and value as ``Arrangement`` has them, from a file's.

    Raises:
        KeyError: There is no such field; the argument is one line.
        ValueError: The value is not allowed; the argument says what is.
    """
    field = name.replace("-", "_")
    match field:
        case "beside" | "below":
            return field, _one_of(value, (*MOVABLE, NONE))
        case "side":
            return field, _one_of(value, ("right", "left"))
        case "side_width":
            return field, _whole(value, PERCENT, "% of the columns")
        case "below_height":
            return field, _whole(value, LINES, "lines")
        case "order":
            return field, _several(value, PANELS)
        case "hidden":
            return field, _several(value, MOVABLE)
        case _:
            known = [f.name.replace("_", "-") for f in fields(Arrangement)]
            near = difflib.get_close_matches(name, known, 1)
            raise KeyError(f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}")


def _one_of(value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"one of {', '.join(allowed)}")
    return value


def _several(value: object, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) and v in allowed for v in value):
        raise ValueError(f"some of {', '.join(allowed)}, in brackets")
    return tuple(dict.fromkeys(value))


def _whole(value: object, bounds: tuple[int, int], unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"a whole number from {bounds[0]} to {bounds[1]}, {unit}")
    return value


def known_fields(values: Mapping[str, object]) -> dict[str, Any]:
    """Return those of a file's fields that can be used; panels that there are no longer are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        kept = [v for v in value if v in PANELS] if isinstance(value, list) else value
        try:
            field, read = read_field(name, kept)
        except (KeyError, ValueError):
            continue
        found[field] = read
    return found
