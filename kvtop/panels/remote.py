"""An engine over the network in words: its rows, what its cache events tell, what it offers or why not."""

from __future__ import annotations

from collections.abc import Iterator

from kvtop.model import format as fmt
from kvtop.model.remote import EngineRow, EventFacts, RemoteFacts
from kvtop.panels.content import Entry, Section


def remote_overview(facts: RemoteFacts) -> tuple[Section, ...]:
    """Return one section an engine, then what is known of all of them together."""
    return tuple(_sections(facts))


def _sections(facts: RemoteFacts) -> Iterator[Section]:
    for row in facts.rows:
        yield Section(_title(row, facts.kind), _numbers(row))
    if facts.events is not None:
        yield Section("Cache events", _events(facts.events))
    if facts.notes:
        yield Section("Notes", tuple(Entry("note", note) for note in facts.notes))
    if facts.capabilities:
        offered = (Entry(each.name, "available" if each.reason is None else each.reason) for each in facts.capabilities)
        yield Section("Offered", tuple(offered))


def _title(row: EngineRow, kind: str) -> str:
    if row.trouble is not None:
        return row.target
    words = (row.target, row.kind or kind, row.model or "", f"rank {row.engine}")
    return " ".join(word for word in words if word)


def _numbers(row: EngineRow) -> tuple[Entry, ...]:
    if row.trouble is not None:
        return (Entry("trouble", row.trouble, alarm=True),)
    unit = f" {row.eviction_unit}" if row.eviction_unit and row.evictions is not None else ""
    return (
        Entry("used", fmt.percent(row.usage_ratio), share=row.usage_ratio),
        Entry("blocks held", fmt.count(row.used_blocks), f"of {fmt.count(row.total_blocks)}"),
        Entry("tokens cached", fmt.count(row.cached_tokens)),
        Entry("running", fmt.count(row.running)),
        Entry("waiting", fmt.count(row.waiting)),
        Entry("hit ratio", fmt.percent(row.hit_ratio)),
        Entry("preemptions", fmt.count(row.preemptions)),
        Entry("evictions", f"{fmt.count(row.evictions)}{unit}"),
        Entry("host used", fmt.percent(row.host_usage_ratio), share=row.host_usage_ratio),
        Entry("age", fmt.seconds(row.age_s)),
    )


def _events(events: EventFacts) -> tuple[Entry, ...]:
    resident = (
        Entry(f"resident on {medium}, rank {rank}", fmt.count(copies)) for medium, rank, copies in events.resident
    )
    return (
        Entry("known", events.state),
        *resident,
        Entry("stored", fmt.count(events.stored)),
        Entry("removed", fmt.count(events.removed)),
        Entry("gaps", fmt.count(events.gaps), f"{fmt.count(events.missed)} batches missed"),
        Entry("behind", fmt.seconds(events.behind_s)),
    )
