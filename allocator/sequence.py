"""Sequence: one request's progress and where its blocks are. Changed by the engine alone."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from allocator.content import Content, TokenArray
from allocator.ids import BlockKey, SeqId, Status, WaitReason
from allocator.scripts import TokenAct

if TYPE_CHECKING:
    from allocator.transfers import Transfer

Keys: TypeAlias = "collections.abc.Sequence[BlockKey]"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One request.

    Attributes:
        seq_id: Number in order of arrival.
        content: Its tokens.
        label: Where it comes from.
        num_prompt: Prompt tokens.
        num_target: Tokens at which it finishes.
        keys: Keys of the leading full blocks that can be found by content; grows with generated tokens. [0..n]
        tokens: Tokens to be compared on a hit; ``None`` where keys are exact by themselves.
        arrived_step: When it was submitted.
        status: Where it is in its life.
        row: Row in the device tables, while running.
        host_row: Row in the host tables, while swapped.
        num_tokens: Tokens to have written before it decodes, when it is admitted (again).
        num_computed: Most tokens it had written when it last left the device; what is below is computed again.
        hit_blocks: Blocks the prefix cache gave it.
        resumed: Whether it has run before, so that finding its blocks again is not counted as a query.
        transfer: The swap under way that uses its blocks; ``None`` when there is none.
        held: Swapped out by an operator, until they swap it in.
        reason: What kept it waiting when it was last tried, with the numbers; empty when nothing did.
        reason_kind: Which kind that is.
        priority: Its class: higher goes first under the priority policy.
        waiting_since: Step at which it began to wait, for its first start or since its last preemption.
        contiguous: Whether its blocks must be one run of consecutive ids.
        order: Its place in the queue, lowest first; the scheduler's.
        acts: What its client still does at token counts, the next first.
    """

    seq_id: SeqId
    content: Content
    label: str
    num_prompt: int
    num_target: int
    keys: Keys
    tokens: TokenArray | None
    arrived_step: int
    status: Status = Status.WAITING
    row: int | None = None
    host_row: int | None = None
    num_tokens: int = 0
    num_computed: int = 0
    hit_blocks: int = 0
    resumed: bool = False
    transfer: Transfer | None = None
    held: bool = False
    reason: str = ""
    reason_kind: WaitReason | None = None
    priority: int = 0
    waiting_since: int = 0
    contiguous: bool = False
    order: tuple[int, int] = (0, 0)
    acts: tuple[TokenAct, ...] = ()

    @property
    def next_stop(self) -> int:
        """Tokens at which it finishes, or its client acts."""
        return min(self.num_target, self.acts[0].num_tokens) if self.acts else self.num_target
