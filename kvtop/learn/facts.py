"""LessonFacts: what expressions in a lesson may ask, and where each answer is found in a view of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from allocator.geometry import GEOMETRIES
from allocator.ids import BlockFlag
from allocator.metrics import allocatable_mask, run_lengths
from allocator.snapshot import Counters, SequenceRow, Snapshot
from kvtop.learn.expression import PLAIN, UnknownFact, Value
from kvtop.learn.lesson import RequestSpec
from kvtop.model.view import TierView, View


@dataclass(slots=True)
class LessonFacts:
    """Answers expressions from one view, and from what the lesson has kept.

    Attributes:
        view: The view.
        requests: The engine's scripted requests by label.
        known: Kept values, results of experiments, ``answer`` and ``right``.
        panel, colour: What the screen shows.
        selected: The selected sequence's id; ``None`` without one.
    """

    view: View
    requests: Mapping[str, RequestSpec] = field(default_factory=dict)
    known: Mapping[str, Value] = field(default_factory=dict)
    panel: str = "map"
    colour: str = ""
    selected: int | None = None

    def value(self, name: str) -> Value:
        """Return the value of a name. Raises ``UnknownFact``."""
        if name in self.known:
            return self.known[name]
        found = NAMES[name](self) if name in NAMES else None
        if found is None:
            raise UnknownFact(name)
        return found.item() if isinstance(found, np.generic) else found

    def call(self, name: str, arguments: tuple[Value, ...]) -> Value:
        """Return the value of a function. Raises ``UnknownFact``."""
        if name not in FUNCTIONS:
            raise UnknownFact(name)
        found = FUNCTIONS[name].work(self, *arguments)
        if found is None:
            raise UnknownFact(f"{name}{arguments}")
        return found.item() if isinstance(found, np.generic) else found

    # Where things are -----------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot. Raises ``UnknownFact`` without one."""
        if self.view.snapshot is None:
            raise UnknownFact("the engine")
        return self.view.snapshot

    def tier(self, name: str = "device") -> TierView:
        """Return one tier. Raises ``UnknownFact`` where it is not known."""
        found = self.view.device if name == "device" else self.view.host
        if found is None:
            raise UnknownFact(f"the {name} tier")
        return found

    def find(self, label: Value) -> SequenceRow | None:
        """Return the unfinished sequence of that label, or of that number; ``None`` when there is none."""
        return next((row for row in self.snapshot.sequences if label in (row.label, row.seq_id)), None)

    def row(self, label: Value) -> SequenceRow:
        """Return the unfinished sequence of that label. Raises ``UnknownFact`` when there is none."""
        found = self.find(label)
        if found is None:
            raise UnknownFact(f"sequence {label}")
        return found

    def block(self, array: str, block_id: Value) -> Any:
        """Return one device block's entry of an array."""
        values = getattr(self.tier().arrays, array)
        if not isinstance(block_id, int) or not 0 <= block_id < len(values):
            raise UnknownFact(f"block {block_id}")
        return values[block_id]

    def contiguous_rows(self) -> list[tuple[SequenceRow, RequestSpec]]:
        """Return the running sequences that the lesson's file describes, each with its request."""
        rows = [row for row in self.snapshot.sequences if row.label in self.requests and row.num_blocks]
        return [(row, self.requests[row.label]) for row in rows]


_Name = Callable[[LessonFacts], Any]


def _number(field_name: str, scale: float = 1.0, tier: str = "device") -> _Name:
    def read(facts: LessonFacts) -> Any:
        value = getattr(facts.tier(tier).numbers, field_name)
        return value if value is None or scale == 1.0 else value * scale

    return read


def _snapshot(field_name: str) -> _Name:
    return lambda facts: getattr(facts.snapshot, field_name)


def _counter(field_name: str) -> _Name:
    return lambda facts: getattr(facts.snapshot.counters, field_name)


def _slots_reserved(facts: LessonFacts) -> int:
    return sum(max(0, spec.end - row.num_tokens) for row, spec in facts.contiguous_rows())


def _slots_never(facts: LessonFacts) -> int:
    size = facts.snapshot.block_size
    return sum(row.num_blocks * size - max(spec.end, row.num_tokens) for row, spec in facts.contiguous_rows())


def _slots_written(facts: LessonFacts) -> int:
    return sum(row.num_tokens for row, _ in facts.contiguous_rows())


def _slots_held(facts: LessonFacts) -> int:
    return facts.tier().numbers.active * facts.snapshot.block_size


def _hit_percent(facts: LessonFacts) -> float | None:
    return None if facts.view.hit_ratio is None else facts.view.hit_ratio * 100


def _selected(facts: LessonFacts) -> str:
    row = None if facts.selected is None else facts.find(facts.selected)
    return "none" if row is None else row.label


def _remote(field_name: str, scale: float = 1.0) -> _Name:
    def read(facts: LessonFacts) -> Any:
        remote = facts.view.remote
        value = getattr(remote.rows[0], field_name) if remote is not None and remote.rows else None
        return value if value is None or scale == 1.0 else value * scale

    return read


#: What each name is.
NAMES: Final[dict[str, _Name]] = {
    **{
        name: _number(name)
        for name in (
            *("total", "free", "cached", "active", "reserved", "shared", "fenced", "pinned"),
            *("allocatable", "largest_free_run", "free_runs"),
        )
    },
    "external_percent": _number("external_ratio", 100),
    "internal_percent": _number("internal_ratio", 100),
    "usage_percent": _number("usage_ratio", 100),
    "host_total": _number("total", tier="host"),
    "host_free": _number("free", tier="host"),
    "host_active": _number("active", tier="host"),
    "step": _snapshot("step"),
    "time_s": _snapshot("time_s"),
    "phase": _snapshot("phase"),
    "running": _snapshot("num_running"),
    "waiting": _snapshot("num_waiting"),
    "swapped": _snapshot("num_swapped"),
    "block_size": _snapshot("block_size"),
    "block_bytes": _snapshot("block_bytes"),
    "token_bytes": lambda facts: facts.snapshot.block_bytes // facts.snapshot.block_size,
    "policy": _snapshot("policy"),
    "eviction": _snapshot("eviction"),
    "preempt": _snapshot("preempt"),
    "compact": _snapshot("compact"),
    "compact_threshold_percent": lambda facts: facts.snapshot.compact_threshold_ratio * 100,
    "watermark_percent": lambda facts: facts.snapshot.watermark_ratio * 100,
    "hit_percent": _hit_percent,
    "slots_written": _slots_written,
    "slots_reserved": _slots_reserved,
    "slots_never": _slots_never,
    "slots_held": _slots_held,
    "selected": _selected,
    "longest": lambda facts: max((row.num_tokens for row in facts.snapshot.sequences), default=0),
    "some_sequence": lambda facts: next((r.seq_id for r in facts.snapshot.sequences if r.status == "running"), None),
    "panel": lambda facts: facts.panel,
    "colour": lambda facts: facts.colour,
    "remote_usage_percent": _remote("usage_ratio", 100),
    "remote_running": _remote("running"),
    "remote_waiting": _remote("waiting"),
    "remote_blocks": _remote("total_blocks"),
    "remote_preemptions": _remote("preemptions"),
    "remote_kind": lambda facts: None if facts.view.remote is None else facts.view.remote.kind,
    **{name: _counter(name) for name in Counters.__struct_fields__ if name not in ("faults_by_law", "injected")},
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of expressions: how many arguments it takes, and what it does."""

    arguments: int
    work: Callable[..., Any]


def _of_row(field_name: str) -> Function:
    return Function(1, lambda facts, label: getattr(facts.row(label), field_name))


def _table_entry(facts: LessonFacts, position: Value) -> int | None:
    table = facts.view.focus_table
    if table is None or not isinstance(position, int) or not 0 <= position < len(table):
        return None
    return int(table[position])


def _unusable(facts: LessonFacts, wanted: Value) -> int:
    """Return allocatable blocks in runs shorter than ``wanted``."""
    lengths = run_lengths(allocatable_mask(facts.tier().arrays), facts.snapshot.slab_size)
    return int(lengths[lengths < int(wanted)].sum())


def _blocks_with(facts: LessonFacts, references: Value) -> int:
    return int(np.count_nonzero(facts.tier().arrays.ref_count == references))


def _model_token_bytes(_facts: LessonFacts, geometry: Value) -> int | None:
    found = GEOMETRIES.get(str(geometry))
    return None if found is None else found.token_bytes


#: What each function is.
FUNCTIONS: Final[dict[str, Function]] = {
    "exists": Function(1, lambda facts, label: facts.find(label) is not None),
    "is_running": Function(1, lambda facts, label: (r := facts.find(label)) is not None and r.status == "running"),
    "status": _of_row("status"),
    "reason": _of_row("reason_kind"),
    "seq": _of_row("seq_id"),
    "tokens": _of_row("num_tokens"),
    "prompt": _of_row("num_prompt"),
    "blocks": _of_row("num_blocks"),
    "shared_blocks": _of_row("shared_blocks"),
    "hits": _of_row("hit_blocks"),
    "runs": _of_row("runs"),
    "labelled": Function(1, lambda facts, name: sum(r.label.startswith(str(name)) for r in facts.snapshot.sequences)),
    "entry": Function(1, _table_entry),
    "ref": Function(1, lambda facts, block: facts.block("ref_count", block)),
    "fill": Function(1, lambda facts, block: facts.block("fill", block)),
    "is_pinned": Function(1, lambda facts, block: bool(facts.block("flags", block) & BlockFlag.PINNED)),
    "blocks_with": Function(1, _blocks_with),
    "blocks_for": Function(1, lambda facts, tokens: -(-tokens // facts.snapshot.block_size)),
    "unusable": Function(1, _unusable),
    "model_token_bytes": Function(1, _model_token_bytes),
}
#: Functions and how many arguments they take; ``None`` for those that take any number.
ARGUMENTS: Final[Mapping[str, int | None]] = {
    **dict.fromkeys(PLAIN),
    **{name: function.arguments for name, function in FUNCTIONS.items()},
}
