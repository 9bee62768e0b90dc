"""Inspector: one block in words, as a pane and as one line; and the selected sequence's runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.text import Text

from allocator.ids import NO_ROW, BlockFlag, BlockState, Tier
from allocator.snapshot import SequenceRow, Snapshot
from kvtop.model import format as fmt
from kvtop.model.block_log import Happening
from kvtop.model.view import View, is_attached
from kvtop.tui.look import Look
from kvtop.tui.widgets.block_map import BlockRef
from kvtop.tui.widgets.lines import Lines, fit, line, printable, rule

_STATE_WORDS = {
    BlockState.FREE: "free",
    BlockState.CACHED: "cached, evictable",
    BlockState.ACTIVE: "active",
    BlockState.RESERVED: "reserved: held back",
    BlockState.RETIRED: "retired: above the pool's end",
}
_HOLDERS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What is known of one block, in words ready to be drawn."""

    name: str
    state: str
    ref_count: str
    holders: str
    key: str
    fill: str
    last_use: str
    slab: str
    flags: str

    def as_text(self) -> str:
        """Return the facts as lines to be copied."""
        pairs = (
            ("block", self.name),
            ("slab", self.slab),
            ("state", self.state),
            ("ref_count", self.ref_count),
            ("held by", self.holders),
            ("hash", self.key),
            ("filled", self.fill),
            ("last use", self.last_use),
            ("flags", self.flags),
        )
        return "\n".join(f"{label}: {value}" for label, value in pairs)


def range_facts(view: View, tier: Tier, low: int, high: int) -> list[tuple[str, str]]:
    """Return what is known of the blocks from ``low`` to ``high`` together, as (label, words)."""
    shown = view.device if tier == "device" else view.host
    if shown is None or view.snapshot is None:
        return []
    part = slice(low, high + 1)
    arrays = shown.arrays
    states, refs = arrays.state[part], arrays.ref_count[part]
    counts = [(state, int(np.count_nonzero(states == state))) for state in BlockState]
    words = ", ".join(f"{fmt.count(n)} {state.name.lower()}" for state, n in counts if n)
    rows = {int(row) for row in np.unique(arrays.owner[part]) if row != NO_ROW}
    owners = [str(s.seq_id) for s in view.snapshot.sequences if s.row in rows] if tier == "device" else []
    more = f" +{len(owners) - _HOLDERS_SHOWN}" if len(owners) > _HOLDERS_SHOWN else ""
    held = int(np.count_nonzero(states == BlockState.ACTIVE))
    slots = held * view.snapshot.block_size
    filled = int(arrays.fill[part][states == BlockState.ACTIVE].sum(dtype=np.int64))
    size = fmt.size((high - low + 1) * view.snapshot.block_bytes) if view.snapshot.block_bytes else fmt.UNKNOWN
    return [
        ("blocks", f"{tier} {low}-{high} ({fmt.count(high - low + 1)}, {size})"),
        ("states", words),
        ("shared", f"{fmt.count(int(np.count_nonzero(refs >= 2)))}, most holders {int(refs.max(initial=0))}"),
        ("owners", (" ".join(owners[:_HOLDERS_SHOWN]) + more) or fmt.UNKNOWN),
        ("filled", fmt.percent(filled / slots) if slots else fmt.UNKNOWN),
    ]


def block_facts(view: View, block: BlockRef) -> BlockFacts | None:
    """Return what ``view`` knows of ``block``; ``None`` when its tier is unknown or has no such block."""
    snapshot = view.snapshot
    tier = view.device if block.tier == "device" else view.host
    if snapshot is None or tier is None or not 0 <= block.block_id < tier.arrays.num_blocks:
        return None
    arrays, b = tier.arrays, block.block_id
    state, refs = BlockState(int(arrays.state[b])), int(arrays.ref_count[b])
    words = _STATE_WORDS[state]
    if state is BlockState.ACTIVE and refs >= 2:
        words = f"active, shared by {refs}"
    flags = BlockFlag(int(arrays.flags[b]))
    names = [n for f, n in ((BlockFlag.FENCED, "copy in progress"), (BlockFlag.PINNED, "pinned")) if flags & f]
    last_used = int(arrays.last_used[b])
    steps = snapshot.step - last_used
    key = int(arrays.hash64[b])
    unused = last_used == 0 and state is BlockState.FREE
    empty = state in (BlockState.FREE, BlockState.RETIRED)
    return BlockFacts(
        name=f"{block.tier} block {b}",
        state=words,
        ref_count=str(refs),
        holders=_holders(view, block, snapshot),
        key=f"{key:016x}" if key else "none",
        fill=fmt.UNKNOWN if empty else f"{int(arrays.fill[b])}/{snapshot.block_size} tokens",
        last_use="in use" if state is BlockState.ACTIVE else "never" if unused else _ago(steps),
        slab=str(b // snapshot.slab_size) if snapshot.slab_size else fmt.UNKNOWN,
        flags=", ".join(names) or "none",
    )


def mirror_facts(view: View, block: BlockRef) -> list[tuple[str, str]]:
    """Return what events tell of one block of a mirror, as (label, words); empty when there is no such block."""
    mirror, tier = view.mirror, view.maps.get(block.tier)
    if mirror is None or tier is None or not 0 <= block.block_id < tier.arrays.num_blocks:
        return []
    places = mirror.reading.places
    place = next(p for p in places if p.tier == block.tier and p.first <= block.block_id < p.first + p.size)
    where = f"{printable(place.medium)}, rank {place.rank}"
    key = int(tier.arrays.hash64[block.block_id])
    name = ("place", f"{fmt.count(block.block_id)} of kvtop's; {where}")
    if tier.arrays.state[block.block_id] != BlockState.CACHED:
        beyond = "; size of the pool not told" if not place.is_sized else ""
        return [name, ("state", f"nothing told: free, or held without a hash{beyond}")]
    known = mirror.reading.block
    if known is None or (known.tier, known.block_id, known.hash64) != (block.tier, block.block_id, key):
        return [name, ("hash", f"{key:016x}")]
    parent = "none: begins a prompt" if known.is_first else fmt.UNKNOWN
    size = mirror.reading.block_size
    return [
        name,
        ("hash", f"{known.hash64:016x}"),
        ("parent", parent if known.parent64 is None else f"{known.parent64:016x}"),
        ("depth", f"{fmt.count(known.depth)}, {fmt.count(known.branches)} follow it"),
        ("tokens", f"{fmt.count(known.tokens)}/{size}; the ids are not kept" if size else fmt.count(known.tokens)),
        ("copies", f"{known.copies}, groups {' '.join(map(str, known.groups))}, stored {known.stores}×"),
        ("lives for", fmt.seconds(known.age_s)),
        ("last use", f"{fmt.seconds(known.quiet_s)} ago: stored or found"),
        ("held", "not told by events"),
    ]


def _ago(steps: int) -> str:
    if steps < 0:
        return fmt.UNKNOWN
    return "this step" if steps == 0 else "1 step ago" if steps == 1 else f"{fmt.count(steps)} steps ago"


def owner_of(view: View, block: BlockRef) -> list[int]:
    """Return the sequences known to hold a block, the first holder first."""
    snapshot = view.snapshot
    focus = view.focus_block
    if block.tier == "device" and focus is not None and focus.block_id == block.block_id:
        return list(dict.fromkeys(seq_id for seq_id, _ in focus.holders))
    if snapshot is None or block.tier != "device" or view.device is None:
        return []
    owners = view.device.arrays.owner
    row = int(owners[block.block_id]) if 0 <= block.block_id < len(owners) else NO_ROW
    return [s.seq_id for s in snapshot.sequences if s.row == row and row != NO_ROW]


def _holders(view: View, block: BlockRef, snapshot: Snapshot) -> str:
    focus = view.focus_block
    if block.tier == "device" and focus is not None and focus.block_id == block.block_id:
        shown = " ".join(f"{seq_id}@{position}" for seq_id, position in focus.holders[:_HOLDERS_SHOWN])
        left = focus.total - min(len(focus.holders), _HOLDERS_SHOWN)
        return (f"{shown} +{left}" if left > 0 else shown) or "none"
    known = owner_of(view, block)
    return " ".join(map(str, known)) if known else fmt.UNKNOWN


class Inspector(Lines):
    """The block under the mouse or cursor, and below it the selected sequence."""

    DEFAULT_CSS = "Inspector { height: 11; }"

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._view: View | None = None
        self._block = BlockRef("device", 0)
        self._chosen: int | None = None
        self._marked: tuple[Tier, int, int] | None = None
        self._happenings: tuple[Happening, ...] = ()

    def show(
        self,
        view: View,
        block: BlockRef,
        chosen: int | None,
        marked: tuple[Tier, int, int] | None = None,
        happenings: tuple[Happening, ...] = (),
    ) -> None:
        """Draw what a view knows of a block, or of the marked range, of the selected sequence, and what happened."""
        self._view, self._block, self._chosen, self._marked = view, block, chosen, marked
        self._happenings = happenings
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        look = self.look
        lines = [rule(look, width, "Inspector")]
        if self._view is not None and self._view.mirror is not None:
            told = mirror_facts(self._view, self._block)
            return [*lines, *(self._entry(label, value, width) for label, value in told)][:height]
        facts = block_facts(self._view, self._block) if self._view else None
        if self._marked is not None and self._view is not None:
            lines += [self._entry(label, value, width) for label, value in range_facts(self._view, *self._marked)]
            lines += [line()] * 2
        elif facts is None:
            lines.append(line((" no block", look.style("dim"))))
        else:
            for label, value in (
                ("block", f"{facts.name} · slab {facts.slab}"),
                ("state", facts.state),
                ("held by", facts.holders),
                ("hash", facts.key),
                ("filled", facts.fill),
                ("last use", facts.last_use),
                ("flags", facts.flags),
            ):
                lines.append(self._entry(label, value, width))
        lines += self._sequence(width)
        if facts is not None and self._marked is None:
            newest_first = self._happenings[::-1][: max(0, height - len(lines))]
            lines += [self._entry(f"@{h.step}", f"{h.what} {h.detail}", width) for h in newest_first]
        return lines[:height]

    def _entry(self, label: str, value: str, width: int) -> Text:
        value = fit(value, max(0, width - 11)).rstrip()
        return line((f" {label:<9} ", self.look.style("dim")), (value, self.look.style("text")))

    def _sequence(self, width: int) -> list[Text]:
        if self._chosen is None or self._view is None or self._view.snapshot is None:
            return [line((f" {self.look.key('select')} selects the holder of the block", self.look.style("faint")))]
        row = next((s for s in self._view.snapshot.sequences if s.seq_id == self._chosen), None)
        lines = [line()]
        name = f"sequence {self._chosen}"
        lines.append(line((f" {fit(_sequence_words(name, row), width - 1).rstrip()}", self.look.style("chosen"))))
        lines.append(self._entry("runs", table_runs(self._view, width - 11), width))
        return lines


def _sequence_words(name: str, row: SequenceRow | None) -> str:
    if row is None:
        return f"{name}: not in the list"
    if row.reason:
        return f"{name} {row.status}: {row.reason}"
    blocks = f"{fmt.count(row.num_blocks)} blocks, {fmt.count(row.shared_blocks)} shared"
    if is_attached(row):
        return f"{name}: {row.label}, {blocks}"
    return f"{name} {row.status}: {blocks}"


def table_runs(view: View, width: int) -> str:
    """Return the selected block table as runs of ids in token order: ``12-15 40-47 9``, cut to ``width``."""
    table, snapshot = view.focus_table, view.snapshot
    if table is None or snapshot is None:
        return fmt.UNKNOWN
    if len(table) == 0:
        return "none"
    breaks = np.flatnonzero((np.diff(table) != 1) | (table[1:] % max(1, snapshot.slab_size) == 0)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(table)]))
    prefix = f"{len(starts)}: "
    words: list[str] = []
    used = len(prefix)
    for first, last in zip(table[starts].tolist(), table[stops - 1].tolist(), strict=True):
        word = str(first) if first == last else f"{first}-{last}"
        if used + len(word) + 3 > width:
            words.append("…")
            break
        words.append(word)
        used += len(word) + 1
    return prefix + " ".join(words)


class InspectorLine(Lines):
    """The inspector where there is room for one line."""

    DEFAULT_CSS = "InspectorLine { height: 1; }"

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(look, id=id)
        self._facts: BlockFacts | None = None
        self._range = self._mirrored = ""

    def show(self, view: View, block: BlockRef, marked: tuple[Tier, int, int] | None = None) -> None:
        """Draw what a view knows of a block, or of the marked range."""
        self._facts = block_facts(view, block)
        self._mirrored = "  ".join(f"{label} {words}" for label, words in mirror_facts(view, block))
        self._range = "" if marked is None else "  ".join(f"{k} {v}" for k, v in range_facts(view, *marked))
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        facts, look = self._facts, self.look
        if self._range or self._mirrored:
            return [line((fit(f" {self._range or self._mirrored}", width).rstrip(), look.style("text")))]
        if facts is None:
            return [line()]
        text = line((f" {facts.name}", look.style("value")))
        flags = "" if facts.flags == "none" else facts.flags
        filled = "" if facts.fill == fmt.UNKNOWN else facts.fill
        for part in (facts.state, flags, filled, f"held by {facts.holders}", f"hash {facts.key[:8]}", facts.last_use):
            if part and text.cell_len + len(part) + 2 <= width:
                text.append(f"  {part}", look.style("text"))
        return [text]
