"""EngineActions: what the keys ask of the engine through ``attachment.operations``, on the command thread."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Final

from textual.message import Message

from allocator.commands import (
    Abort,
    Cancel,
    Compact,
    CompactGoal,
    EvictCached,
    Fork,
    InjectFault,
    Pause,
    Pin,
    Resize,
    Resume,
    SetSpeed,
    Step,
    SwapIn,
    SwapOut,
    Unpin,
    VerifyContents,
    command_name,
)
from allocator.config import MAX_BLOCKS
from allocator.fault_kinds import FAULT_KINDS
from allocator.ids import BlockFlag
from allocator.plans import Outcome, Plan, WorkProgress
from allocator.work import CANCELLED
from kvtop.attachment import Attachment
from kvtop.model import format as fmt
from kvtop.serving_commands import AnyCommand
from kvtop.sources.recorded import RecordedSource
from kvtop.tui.actions import Action
from kvtop.tui.arrange_actions import ArrangeActions
from kvtop.tui.background import reason
from kvtop.tui.messages import CommandFinished, PlanReady
from kvtop.tui.screens.sheet import ActionSheet, Choice, NumberField
from kvtop.tui.undo import Changes, inverse_of
from kvtop.tui.widgets.sequences import Sequences

#: Virtual seconds a real second: how slow and how fast the keys go before ``max``.
_SLOWEST, _FASTEST = 1 / 64, 1024.0

#: Longest waits for a command: for one that copies slice by slice, and can be ended, and for any other. [s]
_SLICED_S, _WHOLE_S = 600.0, 60.0
#: Blocks of a range that are pinned at once, at most.
MAX_PINNED: Final = 10_000

_GOALS: Final[tuple[tuple[str, CompactGoal], ...]] = (
    ("pack low", "pack-low"),
    ("longest run", "longest-run"),
    ("by sequence", "by-sequence"),
)


def _abort_plan(work: WorkProgress) -> Plan:
    left = work.total_blocks - work.done_blocks
    return Plan(
        f"end {work.name} after {fmt.count(work.done_blocks)} of {fmt.blocks(work.total_blocks)}; "
        f"{fmt.count(left)} are not moved",
    )


class EngineActions(ArrangeActions):
    """What is asked of the engine, and what came of it. ``KvtopApp`` is the only subclass."""

    _poll_now: threading.Event

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._changes = Changes()

    def _post(self, message: Message) -> bool:
        raise NotImplementedError

    # On offer, asked, planned ---------------------------------------------------------------------------------------

    def refusal(self, action: Action) -> str | None:
        """Return why ``action`` cannot be done on this engine; ``None`` when it can, or may yet."""
        if self.attachment is None:
            return None
        is_recording = isinstance(self.attachment.source, RecordedSource)
        if action.group == "wind":
            return None if is_recording else "only a recording can be wound back"
        if not action.operates or (is_recording and action.group == "run"):
            return None
        return self.attachment.source.missing.get("operations")

    def _missing(self, capability: str) -> str:
        """Return why the engine does not offer something to look at."""
        assert self.attachment is not None
        return self.attachment.source.missing.get(capability, "nothing to show")

    def _may(self, name: str) -> Attachment | None:
        """Return the attachment if the action is on offer; else say why not."""
        if self.attachment is None or (self.view.snapshot is None and self.view.remote is None):
            self.say("the engine is still starting")
            return None
        reason = self.refusal(self.look.table.of(name))
        if reason is not None:
            self.say(f"refused: {reason}", "bad")
            return None
        return self.attachment

    def _apply(self, command: AnyCommand) -> None:
        attachment = self.attachment
        if attachment is None:
            return
        inverse = inverse_of(command, self.view)
        timeout_s = _SLICED_S if isinstance(command, (Compact, Resize, SwapOut, SwapIn)) else _WHOLE_S

        def work() -> None:
            is_known = True
            try:
                outcome = attachment.operations.apply(command, timeout_s)
            except Exception as error:
                outcome, is_known = Outcome(ok=False, message=reason(error)), False
            self._post(CommandFinished(command, outcome, is_known, inverse))

        if isinstance(command, Abort):  # beside the command thread, which waits for what this ends
            self._background.start("abort", work)
        elif not self._background.submit(work):
            self.say("too many commands are waiting", "bad")

    def on_command_finished(self, message: CommandFinished) -> None:
        outcome = message.outcome
        self._poll_now.set()
        self._note_command(message.command, outcome, time.strftime("%m-%d %H:%M:%S"))
        if outcome.ok:
            self._changes.note(message.command, message.inverse)
            took = f" in {fmt.seconds(outcome.seconds)}" if outcome.seconds and outcome.moved_blocks else ""
            self.say(f"{outcome.message}{took}", "good" if outcome.is_seen else "warn")
        else:
            is_refused = message.is_known and not outcome.message.startswith(CANCELLED)
            self.say(f"refused: {outcome.message}" if is_refused else outcome.message, "bad")

    def _open_sheet(self, name: str, title: str, offer: AnyCommand | list[Choice] | NumberField) -> None:
        attachment = self._may(name)
        if attachment is None:
            return
        if self._in_progress is not None:
            self.say(f"{self._in_progress.name} is in progress; {self.look.key('abort')} ends it")
            return

        def ask(sheet: ActionSheet, request: int, command: AnyCommand) -> None:
            def work() -> None:
                if not sheet.wants(request):
                    return
                try:
                    plan = attachment.operations.plan(command)
                except Exception as error:
                    plan = Plan(summary=command_name(command), refusal=reason(error))
                with contextlib.suppress(RuntimeError):
                    sheet.post_message(PlanReady(request, plan))

            if not self._background.submit(work):
                sheet.post_message(PlanReady(request, Plan("busy", refusal="too many commands are waiting")))

        def answer(command: AnyCommand | None) -> None:
            if command is not None:
                self.say(f"{command_name(command)}…")
                self._apply(command)

        self.push_screen(ActionSheet(self.look, title, offer, ask), answer)

    # The actions ------------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        if self._may_run("pause"):
            self._apply(Resume() if self._phase == "paused" else Pause())

    def action_step(self) -> None:
        if self._may_run("step"):
            if self._phase == "paused":
                self._apply(Step(1))
            else:
                self.say(f"pause first ({self.look.key('pause')}), then step")

    def _may_run(self, name: str) -> bool:
        """Return whether the engine can be set going or stopped at all; else say why not."""
        if self._may(name) is None:
            return False
        if self._phase == "done":
            self.say("the run is done")
        return self._phase != "done"

    @property
    def _phase(self) -> str:
        return self.view.snapshot.phase if self.view.snapshot else ""

    def action_speed(self, way: str) -> None:
        if self._may("speed") is None or self.view.snapshot is None:
            return
        self._apply(SetSpeed(next_speed(self.view.snapshot.speed, way)))

    def _sequence_for(self, name: str) -> int | None:
        """Return the sequence that an action means: the selected one, else the row under the table's cursor."""
        if self._may(name) is None:
            return None
        if self.selected is not None:
            return self.selected
        if isinstance(self.focused, Sequences) and self.focused.cursor is not None:
            return self.focused.cursor
        key = self.look.key("select")
        self.say(f"select a sequence first: {key} on a row, or on one of its blocks")
        return None

    def action_swap_out(self) -> None:
        if (seq_id := self._sequence_for("swap_out")) is not None:
            self._open_sheet("swap_out", f"Swap out sequence {seq_id}", SwapOut(seq_id))

    def action_swap_in(self) -> None:
        if (seq_id := self._sequence_for("swap_in")) is not None:
            self._open_sheet("swap_in", f"Swap in sequence {seq_id}", SwapIn(seq_id))

    def action_fork(self) -> None:
        if (seq_id := self._sequence_for("fork")) is not None:
            self._open_sheet("fork", f"Fork sequence {seq_id}", Fork(seq_id))

    def action_cancel(self) -> None:
        if (seq_id := self._sequence_for("cancel")) is not None:
            self._open_sheet("cancel", f"Cancel sequence {seq_id}", Cancel(seq_id))

    def action_compact(self) -> None:
        self._open_sheet("compact", "Compact the device pool", [Choice(n, Compact(goal)) for n, goal in _GOALS])

    @property
    def _in_progress(self) -> WorkProgress | None:
        return self.view.snapshot.work if self.view.snapshot else None

    def action_abort(self) -> None:
        if self._may("abort") is None:
            return
        if self._in_progress is None:
            self.say("no compaction, resize or swap is in progress")
            return

        def ask(sheet: ActionSheet, request: int, command: AnyCommand) -> None:
            # Planned here: the engine's door for commands is held by the very command that this ends.
            work = self._in_progress
            done = Plan("nothing", refusal="it has ended meanwhile") if work is None else _abort_plan(work)
            sheet.post_message(PlanReady(request, done))

        def answer(command: AnyCommand | None) -> None:
            if command is not None:
                self._apply(command)

        self.push_screen(ActionSheet(self.look, f"End {self._in_progress.name}", Abort(), ask), answer)

    def action_resize(self) -> None:
        total = self.view.device.numbers.total if self.view.device else 0

        def make(text: str) -> AnyCommand | str:
            if not text:
                return "type the new number of blocks"
            number = int(text)
            if not 1 <= number <= MAX_BLOCKS:
                return f"{fmt.count(number)}: from 1 to {fmt.count(MAX_BLOCKS)} blocks"
            return f"the pool has {fmt.count(number)} blocks" if number == total else Resize(number)

        field = NumberField("blocks", str(total), make, "type the new size")
        self._open_sheet("resize", f"Resize the device pool of {fmt.blocks(total)}", field)

    def action_evict(self) -> None:
        def make(text: str) -> AnyCommand | str:
            if not text:
                return EvictCached(None)
            return EvictCached(int(text)) if int(text) >= 1 else "0: at least 1 block, or nothing typed for all"

        self._open_sheet(
            "evict", "Evict cached blocks", NumberField("blocks", "", make, "nothing typed: all cached blocks")
        )

    def action_pin(self) -> None:
        block, device = self.main.cursor, self.view.device
        if block.tier != "device":
            self.say("only device blocks can be pinned")
            return
        pinned = device is not None and bool(int(device.arrays.flags[block.block_id]) & BlockFlag.PINNED)
        chosen = self.main.range
        ids = (block.block_id,) if chosen is None else tuple(range(chosen[1], chosen[2] + 1))
        if len(ids) > MAX_PINNED:
            self.say(f"{fmt.blocks(len(ids))} are marked; at most {fmt.count(MAX_PINNED)} can be pinned at once")
            return
        name = f"block {ids[0]}" if len(ids) == 1 else f"blocks {ids[0]}-{ids[-1]}"
        self._open_sheet("pin", f"{'Unpin' if pinned else 'Pin'} {name}", Unpin(ids) if pinned else Pin(ids))

    def action_verify(self) -> None:
        self._open_sheet("verify", "Verify laws and contents", VerifyContents())

    def action_inject(self) -> None:
        choices = [Choice(kind, InjectFault(kind)) for kind in FAULT_KINDS]
        self._open_sheet("inject", "Inject a fault", choices)


def next_speed(speed: float | None, way: str) -> float | None:
    """Return the speed after a key: doubled or halved within bounds, ``None`` (no pace) above the fastest."""
    if way == "max":
        return None
    if speed is None:
        return None if way == "up" else _FASTEST
    if way == "down":
        return max(_SLOWEST, speed / 2)
    return None if speed >= _FASTEST else speed * 2
