"""The synthetic workloads by name, with their parameters. Add one by adding its line to ``WORKLOADS``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from allocator.content import Request
from kvtop.errors import UserError
from kvtop.workloads.arrivals import batch_requests, burst_requests, pressure_requests, priority_requests
from kvtop.workloads.chat import chat_requests
from kvtop.workloads.clients import beam_requests, cancel_storm_requests
from kvtop.workloads.model import model_requests
from kvtop.workloads.prefixes import agents_requests, rag_requests
from kvtop.workloads.runs import contiguous_requests, fragmenter_requests

#: Makes a workload's requests: lazily, in order of arrival, the same for the same arguments. Called with the seed,
#: and by name with ``block_size``, ``num_blocks``, ``dial`` and the workload's own parameters.
WorkloadFactory: TypeAlias = Callable[..., Iterator[Request]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number that a workload takes, and its limits.

    Attributes:
        name: As the factory and a workload file write it.
        low, high: What is allowed, both included.
        is_whole: Whether it is a whole number.
    """

    name: str
    low: float
    high: float
    is_whole: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        return f"a {'whole ' if self.is_whole else ''}number from {self.low:g} to {self.high:g}"

    def accepts(self, value: object) -> bool:
        """Return whether ``value`` is allowed."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return math.isfinite(value) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Workload:
    """One synthetic workload: its name on the command line, one line of help, its requests, what can be set."""

    name: str
    help: str
    requests: WorkloadFactory
    parameters: tuple[Parameter, ...] = ()


_MAX_TOKENS: Final = 1 << 20
_RATE: Final = Parameter("rate_per_s", 0.001, 10_000)


def _tokens(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"{name}_tokens", 1, _MAX_TOKENS) for name in names)


def _no_requests(seed: int, **_: object) -> Iterator[Request]:
    return iter(())


_PROMPT_AND_ANSWER: Final = (_RATE, *_tokens("prompt", "answer"))
_ALL: Final = (
    Workload("chat", "conversations in turns over a few shared system prompts", chat_requests, (_RATE,)),
    Workload(
        "rag",
        "short questions about a few long documents, shared by all who ask",
        rag_requests,
        (_RATE, Parameter("documents", 1, 1000, is_whole=True), *_tokens("document", "question", "answer")),
    ),
    Workload(
        "agents",
        "trees of tool calls whose prefixes grow with every call",
        agents_requests,
        (_RATE, Parameter("calls", 1, 1000), *_tokens("tool", "answer")),
    ),
    Workload(
        "batch",
        "long offline requests, hundreds at one moment",
        batch_requests,
        (*_PROMPT_AND_ANSWER, Parameter("rows", 1, 100_000, is_whole=True)),
    ),
    Workload(
        "beam",
        "beam searches: hypotheses fork, half are pruned each round, the n best finish",
        beam_requests,
        (
            *_PROMPT_AND_ANSWER,
            Parameter("width", 2, 64, is_whole=True),
            Parameter("rounds", 0, 64, is_whole=True),
        ),
    ),
    Workload(
        "burst",
        "arrivals on and off: seconds of many, then seconds of none",
        burst_requests,
        (*_PROMPT_AND_ANSWER, Parameter("on_s", 0.025, 3600), Parameter("off_s", 0, 3600)),
    ),
    Workload(
        "priority",
        "two classes: short requests of class 1, long ones of class 0 (see --policy)",
        priority_requests,
        (*_PROMPT_AND_ANSWER, Parameter("high_share", 0, 1)),
    ),
    Workload(
        "contiguous",
        "fused requests that need one run of blocks, among ordinary ones",
        contiguous_requests,
        (*_PROMPT_AND_ANSWER, Parameter("run_share", 0, 1), Parameter("run_ratio", 0.001, 1)),
    ),
    Workload(
        "fragmenter",
        "adversarial: combs the pool full of holes, then asks for a run",
        fragmenter_requests,
        (Parameter("run_ratio", 0.001, 0.45),),
    ),
    Workload(
        "pressure",
        "demand above the pool, growing while it runs: somebody must give way",
        pressure_requests,
        (_RATE, Parameter("demand", 0.1, 10)),
    ),
    Workload(
        "cancel-storm",
        "clients that hang up: waiting, after the prompt, halfway, or all at once",
        cancel_storm_requests,
        (*_PROMPT_AND_ANSWER, Parameter("cancel_share", 0, 1)),
    ),
    Workload("attached", "nothing by itself: programs that attach are all the load (needs --publish)", _no_requests),
    Workload(
        "model",
        "chat, answered by a small transformer whose keys and values lie in the pool",
        model_requests,
        (_RATE,),
    ),
)
WORKLOADS: Final = {workload.name: workload for workload in _ALL}


def find_workload(name: str, where: str = "--workload") -> Workload:
    """Return the workload called ``name``.

    Args:
        name: Its name.
        where: What the user gave it as, for the error.

    Raises:
        UserError: No such workload.
    """
    try:
        return WORKLOADS[name]
    except KeyError:
        raise UserError(f"{where} {name}: one of {', '.join(WORKLOADS)}") from None


def workload_lines() -> list[str]:
    """Return one line for each workload: its name and what it is."""
    wide = max(map(len, WORKLOADS))
    return [f"{workload.name:<{wide}}  {workload.help}" for workload in WORKLOADS.values()]
