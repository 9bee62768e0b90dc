"""ServingActions: what the keys ask of an inference server that is not ours; each shows its plan first."""

from __future__ import annotations

from typing import Final

from kvtop.model.remote import RemoteFacts, SlotRow
from kvtop.operations import NOT_OFFERED
from kvtop.panels.command_text import describe
from kvtop.serving_commands import (
    AnyCommand,
    ContinueGeneration,
    EraseSlot,
    PauseGeneration,
    ReleaseMemory,
    ResetPrefixCache,
    RestoreSlot,
    ResumeMemory,
    SaveSlot,
    ServingCommand,
    SetMemoryLimit,
    Sleep,
    Wake,
)
from kvtop.tui.actions import Action
from kvtop.tui.screens.sheet import Choice, NumberField
from kvtop.tui.wind_actions import WindActions

#: Action → the operations of a server that it leads to.
_OPERATIONS: Final = {
    "evict": ("reset-prefix-cache", "erase-slot"),
    "pause": ("pause-generation",),
    "resize": ("set-memory-limit",),
    "sleep": ("sleep", "sleep level 0", "wake", "release-memory", "resume-memory"),
    "slots": ("save-slot", "restore-slot"),
}
#: Command → the action that a line of the command line goes through.
_ACTION_OF: Final[dict[type[ServingCommand], str]] = {
    ResetPrefixCache: "evict",
    EraseSlot: "evict",
    PauseGeneration: "pause",
    ContinueGeneration: "pause",
    SetMemoryLimit: "resize",
    Sleep: "sleep",
    Wake: "sleep",
    ReleaseMemory: "sleep",
    ResumeMemory: "sleep",
    SaveSlot: "slots",
    RestoreSlot: "slots",
}
_SERVERS_ONLY: Final = "only for vLLM, SGLang and llama.cpp servers"
_ALL_MEMORY: Final = ("kv_cache", "weights")
#: Slots that a sheet offers; the command line takes any.
_MAX_SLOTS: Final = 4


class ServingActions(WindActions):
    """The same keys on a server that is not ours. ``KvtopApp`` is the only subclass."""

    def refusal(self, action: Action) -> str | None:
        """Return why ``action`` cannot be done here; ``None`` when it can, or may yet."""
        remote = self.view.remote
        if remote is None:
            is_elsewhere = action.group == "serve" and self.attachment is not None
            return super().refusal(action) or (_SERVERS_ONLY if is_elsewhere else None)
        if not action.operates:
            return super().refusal(action)
        reasons = [remote.refusal(operation) for operation in _OPERATIONS.get(action.name, ())]
        known = [reason for reason in reasons if reason != NOT_OFFERED]
        if not known:
            return NOT_OFFERED
        return super().refusal(action) or (None if None in known else known[0])

    def _command_line(self, command: AnyCommand) -> None:
        if isinstance(command, ServingCommand):
            self._open_sheet(_ACTION_OF[type(command)], describe(command), command)
        else:
            super()._command_line(command)

    def action_evict(self) -> None:
        remote = self.view.remote
        if remote is None:
            super().action_evict()
        elif remote.slots:
            choices = [Choice(f"slot {row.slot_id}", EraseSlot(row.slot_id)) for row in _held(remote)]
            self._offer("evict", "Erase a slot", choices, "no slot holds anything")
        else:
            choices = [Choice("while idle", ResetPrefixCache())]
            if remote.kind == "vLLM":
                choices.append(Choice("running requests too", ResetPrefixCache(running=True)))
            self._offer("evict", "Reset the prefix cache", choices)

    def action_pause(self) -> None:
        remote = self.view.remote
        if remote is None:
            super().action_pause()
            return
        keep, abort = Choice("keep", PauseGeneration("keep")), Choice("abort", PauseGeneration("abort"))
        other = PauseGeneration("wait" if remote.kind == "vLLM" else "retract")
        choices = [keep, Choice(other.mode, other), abort]
        go_on = Choice("continue", ContinueGeneration())
        self._offer("pause", "Pause", [go_on, *choices] if remote.is_now("paused") else [*choices, go_on])

    def action_sleep(self) -> None:
        remote = self.view.remote
        if remote is not None and remote.kind == "vLLM":
            sleeps = [Choice(f"level {level}", Sleep(level)) for level in (1, 2, 0)]
            wake = Choice("wake", Wake())
            self._offer("sleep", "Sleep", [wake, *sleeps] if remote.is_now("sleeping") else [*sleeps, wake])
            return
        choices = [
            Choice("release the cache", ReleaseMemory()),
            Choice("and weights", ReleaseMemory(_ALL_MEMORY)),
            Choice("resume the cache", ResumeMemory()),
            Choice("and weights", ResumeMemory(_ALL_MEMORY)),
        ]
        self._offer("sleep", "Release and resume memory", choices)

    def action_slots(self) -> None:
        remote = self.view.remote
        rows = remote.slots[:_MAX_SLOTS] if remote is not None else ()
        held = _held(remote) if remote is not None else []
        choices = [Choice(f"save {row.slot_id}", SaveSlot(row.slot_id, _file_of(row))) for row in held]
        choices += [Choice(f"restore {row.slot_id}", RestoreSlot(row.slot_id, _file_of(row))) for row in rows]
        self._offer("slots", "Save or restore a slot", choices, "its slots are not known")

    def action_resize(self) -> None:
        remote = self.view.remote
        if remote is None:
            super().action_resize()
            return
        limit_bytes = remote.rows[0].limit_bytes

        def make(text: str) -> AnyCommand | str:
            return SetMemoryLimit(int(text)) if text and int(text) else "type the new limit in MiB"

        start = "" if limit_bytes is None else str(limit_bytes >> 20)
        self._open_sheet("resize", "Change the memory limit", NumberField("MiB", start, make, "type the new limit"))

    def _offer(self, name: str, title: str, choices: list[Choice], nothing: str = "") -> None:
        """Open a sheet on what the server offers; say so when there is nothing to choose from."""
        if choices:
            self._open_sheet(name, title, choices)
        elif self._may(name) is not None:
            self.say(nothing)


def _held(remote: RemoteFacts) -> list[SlotRow]:
    """Return the slots that hold something, the fullest first."""
    held = [row for row in remote.slots if row.held_tokens]
    return sorted(held, key=lambda row: -row.held_tokens)[:_MAX_SLOTS]


def _file_of(row: SlotRow) -> str:
    return f"kvtop-slot-{row.slot_id}.bin"
