"""ClientRegistry: the sequences of attached programs, which share the pool with the engine's own. Owns who has which.

Programs call from threads of their own while the engine's thread runs, so all of this is read and changed under the
allocator lock. A call does its work or refuses at once; whoever wants to wait for room calls again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from allocator.content import GrowingTokens, TokenArray, slot_stamps
from allocator.errors import NotHeld, OutOfBlocks, Refused, SequenceGone, UnknownSequence
from allocator.events import EventKind
from allocator.ids import IdArray, SeqId, Status
from allocator.manager import BlockManager
from allocator.snapshot import Counters

MAX_CLIENTS: Final = 64
#: Sequences of one client at once.
MAX_CLIENT_SEQUENCES: Final = 1024
#: Tokens of one call: what fits into one message of the local socket.
MAX_CALL_TOKENS: Final = 250_000
MAX_TEXT: Final = 80
MAX_SALT: Final = 256
#: Ended sequences of one client whose reasons are remembered, and news kept until the engine takes them.
_GONE_KEPT: Final = 1024
_NEWS_KEPT: Final = 256

#: The totals that attached programs add to.
_COUNTED: Final = (
    "submitted",
    "finished",
    "cancelled",
    "prompt_tokens",
    "generated_tokens",
    "query_blocks",
    "hit_blocks",
    "query_tokens",
    "hit_tokens",
    "failures_capacity",
)


class SequenceState(NamedTuple):
    """How a client's sequence stands.

    Attributes:
        seq_id: Its number, one series with the engine's own.
        num_tokens: Tokens written.
        hit_tokens: Prompt tokens that the prefix cache had; a fork has its parent's.
    """

    seq_id: int
    num_tokens: int
    hit_tokens: int


class News(NamedTuple):
    """An event for the engine to record."""

    kind: EventKind
    text: str
    seq_id: int | None
    blocks: int


class AttachedSequence:
    """One sequence of an attached program.

    Attributes:
        seq_id: Its number, one series with the engine's own.
        session: Who holds it.
        content: Its tokens so far.
        label: Where it comes from: ``client:PID NAME``, and what the program calls it.
        num_prompt: Prompt tokens.
        hit_blocks: Blocks the prefix cache gave it.
        arrived_step: Engine step in which it started.
        row: Its row in the device tables; a client's sequence stays on the device while it lasts.
    """

    status: Final = Status.RUNNING
    reason: Final = ""
    priority: Final = 0
    host_row: Final = None
    transfer: Final = None
    num_target: Final = None

    __slots__ = ("arrived_step", "content", "hit_blocks", "label", "num_prompt", "row", "seq_id", "session")

    def __init__(
        self, seq_id: int, session: ClientSession, content: GrowingTokens, label: str, num_prompt: int, hit_blocks: int
    ) -> None:
        self.seq_id, self.session, self.content = seq_id, session, content
        self.label = f"{session.label} {label}".rstrip()
        self.num_prompt, self.hit_blocks = num_prompt, hit_blocks
        self.arrived_step = session.registry.manager.device.step
        self.row = 0


class ClientRegistry:
    """The attached programs of one engine.

    Args:
        manager: Blocks, tables and storage.
        new_seq_id: Numbers a sequence; called from any thread.
        keep: Blocks that must stay allocatable when a sequence starts while others run.
    """

    def __init__(self, manager: BlockManager, new_seq_id: Callable[[], SeqId], keep: Callable[[], int]) -> None:
        self.manager = manager
        self.counts = Counters()
        self.news: deque[News] = deque(maxlen=_NEWS_KEPT)
        self.new_seq_id, self.keep = new_seq_id, keep
        self.by_id: dict[int, AttachedSequence] = {}
        self.by_row: dict[int, AttachedSequence] = {}
        self._sessions: set[ClientSession] = set()
        self._is_closed = False

    @property
    def num_clients(self) -> int:
        """Programs attached."""
        return len(self._sessions)

    @property
    def num_sequences(self) -> int:
        """Sequences of all of them."""
        return len(self.by_id)

    @property
    def num_blocks(self) -> int:
        """Entries of their block tables; a block that two of them share counts twice."""
        with self.manager.lock:
            return sum(int(self.manager.tables.num_blocks[row]) for row in self.by_row)

    def open(self, name: str, pid: int) -> ClientSession:
        """Return the session of a program that attaches.

        Raises:
            Refused: Too many programs are attached, the name cannot be shown, or the engine has ended.
        """
        _check_text("name", name)
        with self.manager.lock:
            if self._is_closed:
                raise Refused("the engine has ended")
            if len(self._sessions) >= MAX_CLIENTS:
                raise Refused(f"{MAX_CLIENTS} programs are attached already, no more are allowed")
            session = ClientSession(self, f"client:{pid} {name}".rstrip())
            self._sessions.add(session)
            self.tell("note", f"{session.label} attached")
            return session

    def sequences(self) -> list[AttachedSequence]:
        """Return their sequences, by number."""
        with self.manager.lock:
            return list(self.by_id.values())

    def cancel(self, seq_id: int) -> None:
        """End a client's sequence for an operator; its program is told at its next call.

        Raises:
            UnknownSequence: It has ended meanwhile.
        """
        with self.manager.lock:
            sequence = self.by_id.get(seq_id)
            if sequence is None:
                raise UnknownSequence(seq_id)
            self.end(sequence, "cancelled by the operator", is_finished=False)

    def end(self, sequence: AttachedSequence, reason: str, *, is_finished: bool) -> None:
        """Release a sequence and remember why it ended; under the allocator lock."""
        self.manager.free(sequence.row)
        del self.by_id[sequence.seq_id], self.by_row[sequence.row]
        sequence.session.forget(sequence.seq_id, reason)
        if is_finished:
            self.counts.finished += 1
        else:
            self.counts.cancelled += 1
        text = f"sequence {sequence.seq_id} of {sequence.session.label} {reason}"
        self.tell("finish" if is_finished else "cancel", text, sequence.seq_id)

    def tell(self, kind: EventKind, text: str, seq_id: int | None = None, blocks: int = 0) -> None:
        """Leave an event for the engine; the oldest is lost when it takes none for long."""
        self.news.append(News(kind, text, seq_id, blocks))

    def detach(self, session: ClientSession) -> None:
        """Forget a session that has ended; under the allocator lock."""
        self._sessions.discard(session)

    def drain(self, totals: Counters) -> list[News]:
        """Add what was counted since the last call to ``totals``, and return the events since then, oldest first."""
        with self.manager.lock:
            for name in _COUNTED:
                setattr(totals, name, getattr(totals, name) + getattr(self.counts, name))
            totals.peak_active = max(totals.peak_active, self.counts.peak_active)
            self.counts = Counters()
            news = list(self.news)
            self.news.clear()
            return news

    def close(self) -> None:
        """End every session with the engine; none can be opened any more. Safe to call twice."""
        with self.manager.lock:
            self._is_closed = True
            for session in list(self._sessions):
                session.close("ended with the engine")


class ClientSession:
    """One attached program: what it may do. Every method may be called from any thread.

    A call that raises has changed nothing. Besides what is said at each, all raise ``Refused`` when the session is
    closed or an argument is out of bounds.

    Attributes:
        label: ``client:PID NAME``.
    """

    def __init__(self, registry: ClientRegistry, label: str) -> None:
        self.registry = registry
        self.label = label
        self._ids: set[int] = set()
        self._gone: dict[int, str] = {}
        self._is_short = self._is_closed = False

    def start(self, tokens: TokenArray, label: str = "", salt: bytes = b"") -> SequenceState:
        """Start a sequence with its prompt, blocks that the prefix cache knows shared. [1..] int32

        Raises:
            OutOfBlocks: Too few blocks now.
        """
        _check_tokens(tokens, at_least=1)
        _check_text("label", label)
        if len(salt) > MAX_SALT:
            raise Refused(f"salt of {len(salt)} bytes: at most {MAX_SALT}")
        registry, manager = self.registry, self.registry.manager
        config = manager.config
        content = GrowingTokens(tokens, config.block_size, salt, config.key_hash)
        with manager.lock:
            self._require_room()
            try:
                admission = manager.admit(content.keys, len(tokens), tokens=tokens, keep=registry.keep())
            except OutOfBlocks:
                self._count_shortage()
                raise
            hit_blocks = admission.hit_blocks
            sequence = AttachedSequence(registry.new_seq_id(), self, content, label, len(tokens), hit_blocks)
            self._add(sequence, admission.row)
            self._written(sequence, admission.matched_blocks * config.block_size, admission.matched_blocks)
            counts = registry.counts
            counts.prompt_tokens += len(tokens)
            if config.prefix_cache:
                counts.query_blocks += len(content.keys)
                counts.query_tokens += len(tokens)
                counts.hit_blocks += hit_blocks
                counts.hit_tokens += hit_blocks * config.block_size
            blocks = int(manager.tables.num_blocks[sequence.row])
            text = f"sequence {sequence.seq_id} of {self.label} admitted, {hit_blocks} blocks hit"
            registry.tell("admit", text, sequence.seq_id, blocks)
            return self._state(sequence)

    def append(self, seq_id: int, tokens: TokenArray) -> SequenceState:
        """Write tokens at the end of a sequence; a last block that others hold too is copied first. [0..] int32

        Raises:
            OutOfBlocks: Too few blocks now.
            StorageError: That copy failed.
            SequenceGone, UnknownSequence: It has ended; it was never this client's.
        """
        _check_tokens(tokens, at_least=0)
        registry, manager = self.registry, self.registry.manager
        with manager.lock:
            with contextlib.suppress(NotHeld):
                manager.wait_until_writable(self._find(seq_id).row)
            sequence = self._find(seq_id)  # again: the wait lets go of the lock
            content = sequence.content
            written, published = content.num_tokens, len(content.keys)
            try:
                manager.grow(sequence.row, len(tokens))
            except OutOfBlocks:
                self._count_shortage()
                raise
            self._is_short = False
            content.extend(tokens)
            self._written(sequence, written, published)
            registry.counts.generated_tokens += len(tokens)
            return self._state(sequence)

    def fork(self, seq_id: int, label: str = "") -> SequenceState:
        """Continue a sequence twice: the new one shares every block until one of them writes to it.

        Raises:
            SequenceGone, UnknownSequence: It has ended; it was never this client's.
        """
        _check_text("label", label)
        registry, manager = self.registry, self.registry.manager
        with manager.lock:
            self._require_room()
            parent = self._find(seq_id)
            child = AttachedSequence(
                registry.new_seq_id(), self, parent.content.copy(), label, parent.num_prompt, parent.hit_blocks
            )
            self._add(child, manager.fork(parent.row))
            registry.tell("fork", f"sequence {seq_id} of {self.label} forked as {child.seq_id}", child.seq_id)
            return self._state(child)

    def state(self, seq_id: int) -> SequenceState:
        """Return how a sequence stands. Raises as ``fork``."""
        with self.registry.manager.lock:
            return self._state(self._find(seq_id))

    def table(self, seq_id: int) -> IdArray:
        """Return a sequence's block ids, in token order; a compaction may move them at any time. Raises as ``fork``."""
        manager = self.registry.manager
        with manager.lock:
            return manager.tables.table(self._find(seq_id).row).copy()

    def release(self, seq_id: int) -> None:
        """End a sequence and release its blocks; nothing happens when it has ended already.

        Raises:
            UnknownSequence: It was never this client's.
        """
        with self.registry.manager.lock:
            try:
                sequence = self._find(seq_id)
            except SequenceGone:
                return
            self.registry.end(sequence, "released", is_finished=True)

    def close(self, reason: str = "released: its program has detached") -> None:
        """End the session and all its sequences. Safe to call twice."""
        registry = self.registry
        with registry.manager.lock:
            if self._is_closed:
                return
            for seq_id in sorted(self._ids):
                registry.end(registry.by_id[seq_id], reason, is_finished=False)
            self._is_closed = True
            registry.detach(self)
            registry.tell("note", f"{self.label} detached")

    def forget(self, seq_id: int, reason: str) -> None:
        """Note that a sequence has ended, and why; under the allocator lock."""
        self._ids.discard(seq_id)
        self._gone[seq_id] = reason
        if len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def _add(self, sequence: AttachedSequence, row: int) -> None:
        sequence.row = row
        self._ids.add(sequence.seq_id)
        self.registry.by_id[sequence.seq_id] = self.registry.by_row[row] = sequence
        self.registry.counts.submitted += 1
        self._is_short = False

    def _written(self, sequence: AttachedSequence, first: int, first_block: int) -> None:
        """Stamp the tokens from ``first`` on, and then let the blocks they filled be found by their content."""
        manager, content = self.registry.manager, sequence.content
        size, stop = manager.block_size, content.num_tokens
        if manager.config.stamp and first < stop:
            stamps = slot_stamps(content.tokens(first, stop), np.arange(first, stop, dtype=np.int64))
            manager.storage.write_stamps("device", manager.slots("device", sequence.row, first, stop), stamps)
        keys = content.keys[first_block:]
        own = content.tokens(first_block * size, (first_block + len(keys)) * size)
        manager.publish_keys(sequence.row, keys, first_block, tokens=own)
        counts = self.registry.counts
        counts.peak_active = max(counts.peak_active, manager.device.num_active)

    def _find(self, seq_id: int) -> AttachedSequence:
        if seq_id in self._ids:
            return self.registry.by_id[seq_id]
        if seq_id in self._gone:
            raise SequenceGone(seq_id, self._gone[seq_id])
        raise UnknownSequence(seq_id)

    def _require_room(self) -> None:
        if self._is_closed:
            raise Refused("this client is closed")
        if len(self._ids) >= MAX_CLIENT_SEQUENCES:
            raise Refused(f"this client has {MAX_CLIENT_SEQUENCES} sequences already, no more are allowed")

    def _count_shortage(self) -> None:
        """Count a failure once, however often the program tries again until it gets on."""
        if not self._is_short:
            self._is_short = True
            self.registry.counts.failures_capacity += 1

    @staticmethod
    def _state(sequence: AttachedSequence) -> SequenceState:
        size = sequence.session.registry.manager.block_size
        return SequenceState(sequence.seq_id, sequence.content.num_tokens, sequence.hit_blocks * size)


def _check_tokens(tokens: TokenArray, *, at_least: int) -> None:
    if not at_least <= len(tokens) <= MAX_CALL_TOKENS:
        raise Refused(f"{len(tokens)} tokens: from {at_least} to {MAX_CALL_TOKENS} in one call")
    if len(tokens) and int(tokens.min()) < 0:
        raise Refused(f"token {int(tokens.min())}: tokens are numbers from 0 to {2**31 - 1}")


def _check_text(what: str, text: str) -> None:
    if len(text) > MAX_TEXT or not text.isprintable():
        raise Refused(f"{what} {text[:MAX_TEXT]!r}: at most {MAX_TEXT} printable characters")
