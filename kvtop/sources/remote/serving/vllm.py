"""Vllm: operations of a vLLM server in development mode, for each release that has them."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from allocator.commands import command_name
from allocator.plans import Effect, Plan
from kvtop.model.remote import RemoteFacts
from kvtop.serving_commands import ContinueGeneration, PauseGeneration, ResetPrefixCache, ServingCommand, Sleep, Wake
from kvtop.sources.remote.fetch import Page
from kvtop.sources.remote.offers import RESET_RUNNING, SLEEP_0, is_before
from kvtop.sources.remote.serving.base import (
    Call,
    cleared,
    known,
    load_effects,
    preemptions,
    resident_blocks,
    running,
    status_refusal,
)

_LEVELS: Final = {
    0: "stop scheduling",
    1: "move the weights to the host and drop the cache",
    2: "drop the weights and the cache",
}
_MODES: Final = {
    "keep": "requests stand still with their blocks",
    "wait": "requests are finished first",
    "abort": "requests end with an error",
}


class Vllm:
    """A ``Serving``. All answers are those of vLLM 0.6 to 0.33."""

    def plan(self, command: ServingCommand, facts: RemoteFacts) -> Plan:
        resident = resident_blocks(facts)
        match command:
            case ResetPrefixCache():
                return self._plan_reset(command, facts)
            case Sleep(level, mode):
                after = resident if level == 0 else 0
                effects = (Effect("resident blocks", resident, after), *load_effects(facts, disturbs=mode != "keep"))
                summary = f"sleep at level {level}: {_LEVELS[level]}; {_MODES[mode]}"
                refusal = facts.refusal(SLEEP_0 if level == 0 else "sleep") or self._sleep_refusal(command, facts)
                return Plan(summary, effects=effects, refusal=refusal)
            case Wake(tags):
                return Plan(f"wake {', '.join(tags) or 'all of the engine'}", refusal=facts.refusal("wake"))
            case PauseGeneration(mode):
                effects = (Effect("resident blocks", resident, resident), *load_effects(facts, disturbs=mode != "keep"))
                refusal = facts.refusal("pause-generation") or self._pause_refusal(command, facts)
                return Plan(f"pause; {_MODES.get(mode, mode)}", effects=effects, refusal=refusal)
            case ContinueGeneration():
                effects = tuple(load_effects(facts, disturbs=True))
                return Plan("go on after a pause", effects=effects, refusal=facts.refusal("continue-generation"))
        name = command_name(command)
        return Plan(name, refusal=facts.refusal(name))

    def _plan_reset(self, command: ResetPrefixCache, facts: RemoteFacts) -> Plan:
        resident, requests = resident_blocks(facts), running(facts)
        effects = [
            Effect("resident blocks", resident, 0 if not command.running else None),
            *load_effects(facts, disturbs=command.running),
        ]
        summary = "reset the prefix cache"
        if command.running:
            summary += "; running requests lose their blocks and are computed again"
            effects.append(Effect("preemptions", preemptions(facts), None))
        elif requests:
            summary += f"; the engine will refuse while {requests:,.0f} requests run"
        refusal = facts.refusal(RESET_RUNNING if command.running else "reset-prefix-cache")
        return Plan(summary, evicted_blocks=resident or 0, effects=tuple(effects), refusal=refusal)

    def _sleep_refusal(self, command: Sleep, facts: RemoteFacts) -> str | None:
        if not is_before(facts.version, 0, 18):
            return None
        requests = running(facts)
        if requests == 0:
            return None
        found = "it is not known whether requests run" if requests is None else f"{requests:,.0f} requests run"
        return f"vLLM {facts.version} sleeps at once, whatever it is doing, and {found}"

    def _pause_refusal(self, command: PauseGeneration, facts: RemoteFacts) -> str | None:
        if command.mode not in _MODES:
            return f"{command.mode}: vLLM has keep, wait and abort"
        if command.mode == "keep" and is_before(facts.version, 0, 16):
            return f"keep: vLLM {facts.version} has wait and abort"
        return None

    def call(self, command: ServingCommand, facts: RemoteFacts) -> Call:
        match command:
            case ResetPrefixCache(is_running):
                return Call("/reset_prefix_cache" + ("?reset_running_requests=true" if is_running else ""))
            case Sleep(level, mode):
                query = {"level": level} if is_before(facts.version, 0, 18) else {"level": level, "mode": mode}
                return Call(f"/sleep?{urlencode(query)}")
            case Wake(tags):
                return Call("/wake_up" + (f"?{urlencode([('tags', tag) for tag in tags])}" if tags else ""))
            case PauseGeneration("keep"):
                return Call("/pause?mode=keep")
            case PauseGeneration(mode):
                waits = f"wait_for_inflight_requests={'true' if mode == 'wait' else 'false'}"
                how = waits if is_before(facts.version, 0, 16) else f"mode={mode}"
                return Call(f"/pause?{how}&clear_cache=false")
            case _:
                return Call("/resume")

    def refused(self, command: ServingCommand, page: Page) -> str | None:
        told = page.json()
        if isinstance(command, ResetPrefixCache) and isinstance(told, dict) and told.get("success") is False:
            return "the engine has not reset it: blocks are held, by running requests or by transfers under way"
        return status_refusal(page)

    def told(self, command: ServingCommand, page: Page) -> str | None:
        told = page.json()
        if not isinstance(told, dict):
            return "this release does not say whether it worked" if isinstance(command, ResetPrefixCache) else None
        if told.get("success") is True:
            return "the engine reports success"
        status = told.get("status")
        return f"the engine says: {status}" if status in ("sleeping", "awake", "paused", "resumed") else None

    def shows(self, command: ServingCommand, facts: RemoteFacts) -> bool:
        return facts.events is not None if isinstance(command, ResetPrefixCache) else bool(facts.states)

    def seen(self, command: ServingCommand, before: RemoteFacts, now: RemoteFacts) -> str | None:
        emptied = cleared(before, now)
        match command:
            case ResetPrefixCache(is_running):
                was, is_ = preemptions(before), preemptions(now)
                taken = f"{is_ - was:,.0f} requests taken off their blocks" if was is not None and is_ else None
                return known((emptied, taken if is_running else None)) if emptied else None
            case Sleep():
                return known((_turned("asleep", "sleeping", before), emptied)) if now.is_now("sleeping") else None
            case Wake(tags):
                if tags and now.is_now("sleeping"):
                    return "the engine sleeps on until the rest is woken too"
                return "the engine is awake" if now.is_now("sleeping") is False else None
            case PauseGeneration():
                return known((_turned("paused", "paused", before), emptied)) if now.is_now("paused") else None
            case _:
                return "the engine is no longer paused" if now.is_now("paused") is False else None

    def unseen(self, command: ServingCommand, now: RemoteFacts) -> str:
        if not isinstance(command, ResetPrefixCache):
            return "not yet visible"
        if now.events is None:
            return "not visible from here without its cache events"
        return "not yet visible: an idle engine publishes with its next step"


def _turned(word: str, state: str, before: RemoteFacts) -> str:
    """Return that the engine is in a state, and whether it was already."""
    return f"the engine is {word}{', as it was' if before.is_now(state) else ''}"
