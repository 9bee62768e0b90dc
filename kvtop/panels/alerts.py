"""The alerts panel: the shipped rules evaluated on this console's views: what would fire now, and why."""

from __future__ import annotations

from typing import Final

from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.monitoring.watch import AlertStatus, Condition
from kvtop.panels.content import Asked, Entry, Section

#: A comparison with one of these words in its text is of ratios.
_RATIOS: Final = ("usage", "fragmentation", "hit:ratio")
_WORDS: Final = {">": "above", "<": "below", "==": "at"}


def alerts(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return what fires and what is about to, one section each with its reasons, and the others in a line each."""
    if not asked.alerts:
        return (Section("Alerts", (Entry("alerts", fmt.UNKNOWN, "evaluated from the first reading on"),), wide=True),)
    by_state = {state: [s for s in asked.alerts if s.state == state] for state in ("firing", "pending")}
    quiet = tuple(_quiet(s) for s in asked.alerts if s.state == "quiet")
    unknown = tuple(_unknown(s) for s in asked.alerts if s.state == "unknown")
    loud = [_loud(s) for s in (*by_state["firing"], *by_state["pending"])]
    none = Section("Nothing fires, nothing is about to", (), wide=True)
    return (
        *(loud or (none,)),
        *((Section("Quiet", quiet, wide=True),) if quiet else ()),
        *((Section("Cannot be told here", unknown, wide=True),) if unknown else ()),
    )


def _loud(status: AlertStatus) -> Section:
    alert = status.alert
    held, hold = fmt.seconds(status.held_s), fmt.seconds(status.hold_s)
    if status.state == "firing":
        since = Entry("FIRING", f"for {held}", f"after {hold} of it" if status.hold_s else "at once", alarm=True)
    else:
        left = max(0.0, status.hold_s - (status.held_s or 0.0))
        since = Entry("pending", f"for {held}", f"fires in {fmt.seconds(left)} if it goes on")
    where = f" ({status.where})" if status.where else ""
    return Section(
        f"{alert.name}{where}, {alert.severity}",
        (
            since,
            *(Entry("why", _compared(c), c.text) for c in status.conditions),
            Entry("means", "", alert.description),
            Entry("runbook", "", status.runbook),
        ),
        wide=True,
        wrap=True,
    )


def _quiet(status: AlertStatus) -> Entry:
    first = next((c for c in status.conditions if not c.holds), status.conditions[0])
    hold = f" for {fmt.seconds(status.hold_s)}" if status.hold_s else ""
    limit = f"fires {_WORDS.get(first.sign, first.sign)} {_number(first, first.limit)}{hold}"
    return Entry(status.alert.name, _number(first, first.value), f"{limit}: {first.text}")


def _unknown(status: AlertStatus) -> Entry:
    told = "only Prometheus knows" if status.missing.startswith("up{") else "not told by this engine:"
    return Entry(status.alert.name, fmt.UNKNOWN, f"{told} {status.missing}")


def _compared(condition: Condition) -> str:
    return f"{_number(condition, condition.value)} {condition.sign} {_number(condition, condition.limit)}"


def _number(condition: Condition, number: float | None) -> str:
    if any(word in condition.text for word in _RATIOS):
        return fmt.percent(number)
    return fmt.short(number) if number is None or abs(number) >= 1000 else f"{number:.3g}"
