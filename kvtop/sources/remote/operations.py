"""RemoteOperations: the door to a server that is not ours: plans from what is known, asks once, and looks what came."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from allocator.commands import command_name
from allocator.plans import Outcome, Plan
from kvtop.audit import AuditLog
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, RemoteObservation
from kvtop.model.remote import RemoteFacts
from kvtop.operations import NOT_OFFERED
from kvtop.serving_commands import AnyCommand, ServingCommand
from kvtop.sources.remote.fetch import Fetcher, FetchError, NotSent, Page, Remote
from kvtop.sources.remote.serving.base import Serving, known
from kvtop.sources.remote.serving.llama import Llama
from kvtop.sources.remote.serving.sglang import Sglang
from kvtop.sources.remote.serving.vllm import Vllm

SERVINGS: Final[Mapping[str, Serving]] = {"vLLM": Vllm(), "SGLang": Sglang(), "llama.cpp": Llama()}
#: Seconds in which the effect of an operation is looked for, at most, and between two looks.
LOOK_S: Final = 3.0
_PAUSE_S: Final = 0.2


class Looking(Protocol):
    """Who reads the server; ``RemoteSource`` does."""

    name: str
    remote: Remote

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the newest facts."""

    def facts_after(self, at_s: float, timeout_s: float) -> RemoteFacts | None:
        """Return facts read at ``at_s`` or later."""


class RemoteOperations:
    """Lets commands through to one server, one at a time, each leaving a line in the audit log.

    Args:
        looking: Who reads the server.
        audit: Where the lines go.
        look_s: Seconds in which an effect is looked for, at most.
        sleep: Waits between two looks.
    """

    def __init__(
        self,
        looking: Looking,
        audit: AuditLog,
        *,
        look_s: float = LOOK_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._looking = looking
        self._audit = audit
        self._look_s = look_s
        self._sleep = sleep

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do, from the newest facts; see ``Operations``."""
        return self._plan(command, timeout_s)[0]

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Ask the server for it, once, and report what is seen of it afterwards; see ``Operations``.

        Raises:
            SourceError: Whether it was done is not known.
        """
        who = (os.getpid(), os.getuid())
        plan = None
        try:
            plan, before = self._plan(command, timeout_s)
            outcome = self._apply(command, plan, before, timeout_s)
        except SourceError as error:
            self._audit.write(self._looking.name, who, command, plan, None, str(error))
            raise
        self._audit.write(self._looking.name, who, command, plan, outcome)
        return outcome

    def _plan(self, command: AnyCommand, timeout_s: float) -> tuple[Plan, RemoteFacts]:
        facts = self._looking.read(Focus(), timeout_s).facts
        serving = SERVINGS.get(facts.kind)
        if serving is None or not isinstance(command, ServingCommand):
            return Plan(command_name(command), refusal=NOT_OFFERED), facts
        return serving.plan(command, facts), facts

    def _apply(self, command: AnyCommand, plan: Plan, before: RemoteFacts, timeout_s: float) -> Outcome:
        if plan.refusal is not None or not isinstance(command, ServingCommand):
            return Outcome(ok=False, message=plan.refusal or NOT_OFFERED)
        serving = SERVINGS[before.kind]
        began_s = time.monotonic()
        try:
            page = self._post(serving, command, before, timeout_s)
        except NotSent as error:
            return Outcome(ok=False, message=f"not sent: {error}")
        except FetchError as error:
            return self._in_doubt(serving, command, before, str(error))
        if (refusal := serving.refused(command, page)) is not None:
            return Outcome(ok=False, message=refusal)
        seen, now = self._look(serving, command, before)
        seconds = time.monotonic() - began_s
        told = serving.told(command, page)
        if seen is not None:
            return Outcome(ok=True, message=known((f"observed: {seen}", told)), seconds=seconds)
        unseen = known((told, serving.unseen(command, now)))
        return Outcome(ok=True, message=f"acknowledged; {unseen}", seconds=seconds, is_seen=False)

    def _post(self, serving: Serving, command: ServingCommand, facts: RemoteFacts, timeout_s: float) -> Page:
        fetcher = Fetcher(self._looking.remote)
        try:
            call = serving.call(command, facts)
            return fetcher.post(call.path, call.body, answer_s=timeout_s)
        finally:
            fetcher.close()

    def _in_doubt(self, serving: Serving, command: ServingCommand, before: RemoteFacts, reason: str) -> Outcome:
        """Look what became of a request that got no answer; it is not sent again."""
        seen, _ = self._look(serving, command, before)
        if seen is None:
            raise SourceError(f"no answer: {reason}; whether it was done is not known")
        return Outcome(ok=True, message=f"no answer: {reason}; but observed: {seen}")

    def _look(self, serving: Serving, command: ServingCommand, before: RemoteFacts) -> tuple[str | None, RemoteFacts]:
        """Return what shows that it was done, and the newest facts; looks no longer than ``look_s``."""
        now, until_s = before, time.monotonic() + (self._look_s if serving.shows(command, before) else 0.0)
        while (left_s := until_s - time.monotonic()) > 0:
            fresh = self._looking.facts_after(time.monotonic(), left_s)
            if fresh is None:
                break
            now = fresh
            seen = serving.seen(command, before, now)
            if seen is not None:
                return seen, now
            self._sleep(min(_PAUSE_S, max(0.0, until_s - time.monotonic())))
        return None, now
