"""Workloads that live on shared prefixes: ``rag`` (long documents) and ``agents`` (trees of tool calls)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from allocator.config import STEP_S
from allocator.content import Request, TokenArray, TokenContent
from kvtop.workloads.draws import Draws, SizeDial

#: Share of the pool that all documents take together.
_DOCUMENTS_RATIO: Final = 0.4
#: Share of the longest stream that one document may take, so that a question and an answer have room.
_DOCUMENT_LIMIT: Final = 0.7
#: How often a document is asked about before a new version of it comes, on average.
_ASKED_PER_VERSION: Final = 64
_TOOLS: Final = 3
_TOOL_TOKENS: Final = 300
#: Chance that a call goes on from an earlier call than the last one.
_BRANCHES: Final = 0.35
_TOOL_S: Final = 1.0


def rag_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    documents: int = 8,
    document_tokens: float | None = None,
    question_tokens: float = 50.0,
    answer_tokens: float = 120.0,
) -> Iterator[Request]:
    """Yield short questions about a few long documents, for ever; each document comes in a new version now and then.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Requests a second; ``None`` keeps the pool busy.
        documents: How many there are, the first asked about most.
        document_tokens: Median length of one; by default all of them take 0.4 of the pool.
        question_tokens, answer_tokens: Median lengths, before scaling to the pool.
    """
    draws = Draws("rag", seed, block_size, num_blocks, dial)
    median = document_tokens or _DOCUMENTS_RATIO * draws.num_tokens / documents
    limit = max(1, int(_DOCUMENT_LIMIT * draws.longest))

    def write(d: Draws) -> int:
        return min(d.length(median, 0.2), limit)

    def ask(d: Draws) -> tuple[int, int]:
        return d.length(question_tokens * d.scale), d.length(answer_tokens * d.scale)

    def private(d: Draws) -> tuple[float, float]:
        question, answer = ask(d)
        return d.blocks(question + answer) + 1, answer

    resident = documents * draws.blocks(min(median, limit))
    rate = rate_per_s or draws.busy_rate(private, resident_blocks=resident)
    bounds = np.cumsum(1.0 / np.arange(1, documents + 1))
    texts: list[TokenArray | None] = [None] * documents
    versions = [0] * documents
    arrival_s, asked = 0.0, 0
    while True:
        which = int(np.searchsorted(bounds, draws.rng.random() * bounds[-1], side="right"))
        text = texts[which]
        if text is None or draws.rng.random() * _ASKED_PER_VERSION < 1:
            text = texts[which] = draws.tokens(write(draws))
            versions[which] += 1
        question, answer = ask(draws)
        prompt, output = draws.fit(len(text) + question, answer)
        own = prompt - len(text) + output  # at least the output: a document leaves room for one token
        stream = np.concatenate((text[: prompt + output], draws.tokens(max(0, own))))
        label = f"rag {asked} doc {which}v{versions[which]}"
        yield Request(TokenContent(stream), prompt, arrival_s, label)
        arrival_s += draws.gap_s(rate)
        asked += 1


def agents_requests(
    seed: int,
    *,
    block_size: int,
    num_blocks: int,
    dial: SizeDial | None = None,
    rate_per_s: float | None = None,
    calls: float = 8.0,
    tool_tokens: float = 120.0,
    answer_tokens: float = 60.0,
) -> Iterator[Request]:
    """Yield the calls of agents, for ever: each goes on from an earlier call of its task, with a tool's result added.

    A task is a tree: a call's prompt is the whole path to it, so that prefixes grow with depth and branches share.

    Args:
        seed, block_size, num_blocks, dial: As for every workload.
        rate_per_s: Calls a second; ``None`` keeps the pool busy.
        calls: Calls a task on average, at least 1.
        tool_tokens, answer_tokens: Median lengths of a tool's result and of a call, before scaling to the pool.
    """
    draws = Draws("agents", seed, block_size, num_blocks, dial)
    tools = [
        draws.tokens(min(draws.length(_TOOL_TOKENS * draws.scale, 0.3), draws.longest // 2)) for _ in range(_TOOLS)
    ]

    def whole_path(d: Draws) -> tuple[float, float]:
        task = _Task.draw(d, calls, tool_tokens, answer_tokens)
        at = int(d.rng.integers(len(task.parents)))
        return d.blocks(min(task.path_tokens(at), d.longest)), task.answers[at]

    rate = rate_per_s or draws.busy_rate(whole_path)
    waiting: list[tuple[float, int, int, _Task, TokenArray]] = []  # arrival, task, call, its tree, said so far
    next_task_s, num_tasks = 0.0, 0
    while True:
        while waiting and waiting[0][0] <= next_task_s:
            arrival_s, number, call, task, said = heapq.heappop(waiting)
            prompt, output = draws.fit(len(said) + task.results[call], task.answers[call])
            stream = np.concatenate((said, draws.tokens(prompt + output - len(said))))
            ended_s = arrival_s + output * STEP_S
            if draws.longest - len(stream) >= 2:
                for child in task.children(call):
                    heapq.heappush(waiting, (ended_s + draws.gap_s(1 / _TOOL_S), number, child, task, stream))
            yield Request(TokenContent(stream), prompt, arrival_s, f"agents {number}/{call}")
        task = _Task.draw(draws, calls, tool_tokens, answer_tokens)
        tool = tools[int(draws.rng.integers(_TOOLS))]
        heapq.heappush(waiting, (next_task_s, num_tasks, 0, task, tool))
        num_tasks += 1
        next_task_s += draws.gap_s(rate / calls)


@dataclass(frozen=True, slots=True)
class _Task:
    """One task's tree of calls: whose answer each goes on from (``-1`` for the first), and the lengths. [calls]"""

    parents: tuple[int, ...]
    results: tuple[int, ...]
    answers: tuple[int, ...]

    @classmethod
    def draw(cls, draws: Draws, calls: float, tool_tokens: float, answer_tokens: float) -> _Task:
        count = int(draws.rng.geometric(1.0 / calls))
        parents = [-1]
        for call in range(1, count):
            branches = draws.rng.random() < _BRANCHES
            parents.append(int(draws.rng.integers(call)) if branches else call - 1)
        results = tuple(draws.length(tool_tokens * draws.scale) for _ in range(count))
        return cls(tuple(parents), results, tuple(draws.length(answer_tokens * draws.scale) for _ in range(count)))

    def children(self, call: int) -> list[int]:
        """Return the calls that go on from ``call``."""
        return [child for child, parent in enumerate(self.parents) if parent == call]

    def path_tokens(self, call: int) -> int:
        """Return the tokens from the first call to this one, tool prompt aside."""
        total = 0
        while call >= 0:
            total += self.results[call] + self.answers[call]
            call = self.parents[call]
        return total
