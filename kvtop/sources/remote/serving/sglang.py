"""Sglang: operations of an SGLang server."""

from __future__ import annotations

from typing import Final

from allocator.commands import command_name
from allocator.plans import Effect, Plan
from kvtop.model.remote import RemoteFacts, total
from kvtop.serving_commands import (
    ContinueGeneration,
    PauseGeneration,
    ReleaseMemory,
    ResetPrefixCache,
    ResumeMemory,
    ServingCommand,
)
from kvtop.sources.remote.fetch import Page
from kvtop.sources.remote.offers import RESET_RUNNING, is_before
from kvtop.sources.remote.serving.base import (
    Call,
    cleared,
    load_effects,
    resident_blocks,
    running,
    status_refusal,
    words_of,
)

#: Our word for a mode → (SGLang's, what becomes of requests).
_MODES: Final = {
    "keep": ("in_place", "requests stand still with what they hold"),
    "retract": ("retract", "requests go back to the queue and are computed again"),
    "abort": ("abort", "requests end with an error"),
}
_CALLS: Final = {
    ContinueGeneration: "/continue_generation",
    ReleaseMemory: "/release_memory_occupation",
    ResumeMemory: "/resume_memory_occupation",
}


class Sglang:
    """A ``Serving``. Every call is a POST: this server flushes and releases on a GET too."""

    def plan(self, command: ServingCommand, facts: RemoteFacts) -> Plan:
        name, requests = command_name(command), running(facts)
        cache = [
            Effect("resident blocks", resident_blocks(facts), 0),
            Effect("cached tokens", total(row.cached_tokens for row in facts.rows), 0),
        ]
        match command:
            case ResetPrefixCache(is_running):
                summary = "flush the prefix cache"
                if requests:
                    summary += f"; the engine will refuse while {requests:,.0f} requests run"
                refusal = facts.refusal(RESET_RUNNING if is_running else name)
                effects = (*cache, *load_effects(facts, disturbs=False))
                return Plan(summary, evicted_blocks=resident_blocks(facts) or 0, effects=effects, refusal=refusal)
            case PauseGeneration(mode):
                refusal = facts.refusal(name) or self._pause_refusal(mode, facts)
                summary = f"pause; {_MODES[mode][1]}" if mode in _MODES else "pause"
                effects = tuple(load_effects(facts, disturbs=mode != "keep"))
                return Plan(summary, effects=effects, refusal=refusal)
            case ContinueGeneration():
                effects = tuple(load_effects(facts, disturbs=True))
                return Plan("go on after a pause", effects=effects, refusal=facts.refusal(name))
            case ReleaseMemory(tags):
                lost = tuple(cache) if "kv_cache" in tags else ()
                summary = f"release the memory of {', '.join(tags)}; only while nothing is served"
                return Plan(
                    summary,
                    effects=(*lost, *load_effects(facts, disturbs=False)),
                    refusal=self._no_tags(name, tags, facts),
                )
            case ResumeMemory(tags):
                return Plan(f"resume the memory of {', '.join(tags)}", refusal=self._no_tags(name, tags, facts))
        return Plan(name, refusal=facts.refusal(name))

    @staticmethod
    def _no_tags(name: str, tags: tuple[str, ...], facts: RemoteFacts) -> str | None:
        return facts.refusal(name) or (None if tags else "name some of kv_cache, weights, cuda_graph")

    @staticmethod
    def _pause_refusal(mode: str, facts: RemoteFacts) -> str | None:
        if mode not in _MODES:
            return f"{mode}: SGLang has keep, retract and abort"
        if mode != "abort" and is_before(facts.version, 0, 5, 4):
            return f"{mode}: SGLang {facts.version} has abort alone"
        return None

    def call(self, command: ServingCommand, facts: RemoteFacts) -> Call:
        match command:
            case ResetPrefixCache():
                return Call("/flush_cache")
            case PauseGeneration(mode):
                is_old = is_before(facts.version, 0, 5, 4)
                return Call("/pause_generation", {} if is_old else {"mode": _MODES[mode][0]})
            case ReleaseMemory(tags) | ResumeMemory(tags):
                return Call(_CALLS[type(command)], {"tags": list(tags)})
            case _:
                return Call(_CALLS[ContinueGeneration], {})

    def refused(self, command: ServingCommand, page: Page) -> str | None:
        if isinstance(command, ResetPrefixCache) and page.status == 400:
            return words_of(page) or "the engine has not flushed it: requests run or wait"
        return status_refusal(page)

    def told(self, command: ServingCommand, page: Page) -> str | None:
        said = words_of(page)
        return f"the engine says: {said.rstrip('.')}" if said and said != "null" else None

    def shows(self, command: ServingCommand, facts: RemoteFacts) -> bool:
        return self._clears(command) and facts.events is not None

    def seen(self, command: ServingCommand, before: RemoteFacts, now: RemoteFacts) -> str | None:
        return cleared(before, now) if self._clears(command) else None

    def unseen(self, command: ServingCommand, now: RemoteFacts) -> str:
        if not self._clears(command):
            return "this engine has nothing that would show it"
        if now.events is None:
            return "not visible from here: an idle engine's metrics stand still, and there are no cache events"
        return "not yet visible"

    @staticmethod
    def _clears(command: ServingCommand) -> bool:
        is_release = isinstance(command, ReleaseMemory) and "kv_cache" in command.tags
        return is_release or isinstance(command, ResetPrefixCache)
