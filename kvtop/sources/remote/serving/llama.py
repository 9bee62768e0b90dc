"""Llama: operations on the slots of a llama.cpp server."""

from __future__ import annotations

from typing import Final

from allocator.commands import command_name
from allocator.plans import Effect, Plan
from kvtop.model.remote import RemoteFacts, SlotRow
from kvtop.serving_commands import EraseSlot, RestoreSlot, SaveSlot, ServingCommand
from kvtop.sources.remote.fetch import Page
from kvtop.sources.remote.serving.base import Call, status_refusal

_ACTIONS: Final = {EraseSlot: "erase", SaveSlot: "save", RestoreSlot: "restore"}


class Llama:
    """A ``Serving``. Slots are looked up first: a number that does not exist would reach another slot."""

    def plan(self, command: ServingCommand, facts: RemoteFacts) -> Plan:
        name = command_name(command)
        refusal = facts.refusal(name)
        if refusal is not None or not isinstance(command, EraseSlot | SaveSlot | RestoreSlot):
            return Plan(name, refusal=refusal)
        slot = _slot(facts, command.slot_id)
        if slot is None:
            last = max((row.slot_id for row in facts.slots), default=None)
            known = "its slots are not known" if last is None else f"its slots are 0 to {last}"
            return Plan(f"{name} {command.slot_id}", refusal=f"there is no slot {command.slot_id}: {known}")
        held = slot.held_tokens
        busy = "; a request is being served in it, and the server waits for its end" if slot.is_busy else ""
        match command:
            case EraseSlot():
                effects = (Effect("tokens in the slot", held, 0),)
                return Plan(f"erase slot {slot.slot_id}{busy}", effects=effects)
            case SaveSlot(_, filename):
                effects = (Effect("tokens in the slot", held, held),)
                summary = f"save slot {slot.slot_id} to {filename} on the server, over a file of that name{busy}"
                return Plan(summary, effects=effects, refusal=None if held else "the slot holds nothing")
            case RestoreSlot(_, filename):
                effects = (Effect("tokens in the slot", held, None),)
                lost = f"; the {held:,} tokens in it are dropped" if held else ""
                return Plan(f"restore slot {slot.slot_id} from {filename} on the server{lost}{busy}", effects=effects)

    def call(self, command: ServingCommand, facts: RemoteFacts) -> Call:
        assert isinstance(command, EraseSlot | SaveSlot | RestoreSlot)
        body = None if isinstance(command, EraseSlot) else {"filename": command.filename}
        return Call(f"/slots/{command.slot_id}?action={_ACTIONS[type(command)]}", body)

    def refused(self, command: ServingCommand, page: Page) -> str | None:
        return status_refusal(page)

    def told(self, command: ServingCommand, page: Page) -> str | None:
        told = page.json()
        if not isinstance(told, dict):
            return None
        counts = (
            ("n_erased", "tokens erased"),
            ("n_saved", "tokens saved"),
            ("n_restored", "tokens restored"),
            ("n_written", "bytes written"),
            ("n_read", "bytes read"),
        )
        said = [f"{told[key]:,} {words}" for key, words in counts if type(told.get(key)) is int]
        return f"the server says: {', '.join(said)}" if said else None

    def shows(self, command: ServingCommand, facts: RemoteFacts) -> bool:
        return not isinstance(command, SaveSlot)

    def seen(self, command: ServingCommand, before: RemoteFacts, now: RemoteFacts) -> str | None:
        assert isinstance(command, EraseSlot | SaveSlot | RestoreSlot)
        was, slot = _slot(before, command.slot_id), _slot(now, command.slot_id)
        if was is None or slot is None or isinstance(command, SaveSlot):
            return None
        change = f"slot {slot.slot_id}: {was.held_tokens:,} → {slot.held_tokens:,} tokens"
        if isinstance(command, EraseSlot):
            return change if slot.held_tokens < max(1, was.held_tokens) else None
        return change if slot.held_tokens and slot.held_tokens != was.held_tokens else None

    def unseen(self, command: ServingCommand, now: RemoteFacts) -> str:
        if isinstance(command, SaveSlot):
            return "its file is on the server's machine, not visible from here"
        if isinstance(command, RestoreSlot):
            return "not visible in /slots: the slot holds as many tokens as before"
        return "not yet visible in /slots"


def _slot(facts: RemoteFacts, slot_id: int) -> SlotRow | None:
    return next((row for row in facts.slots if row.slot_id == slot_id), None)
