"""Load: workloads put together into one stream of requests, whose rate and size can be changed while it runs.

Components are merged in order of arrival; at one moment the component named first goes first. A component's share
stretches its time: with shares that add up to 1, several workloads keep a pool as busy as one of them alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from allocator.content import Request
from kvtop.errors import UserError
from kvtop.workloads.catalog import Workload, find_workload
from kvtop.workloads.draws import SizeDial

MAX_COMPONENTS: Final = 16
MAX_WEIGHT: Final = 1000.0
#: Written between workloads, and before a weight.
_AND, _TIMES = "+", ":"


@dataclass(frozen=True, slots=True)
class Component:
    """One workload of a load.

    Attributes:
        workload: Which.
        weight: Its part of the load, relative to the other components'. One with a rate of its own has none: ``None``.
        parameters: The workload's parameters, by name; the others are as the factory has them.
    """

    workload: Workload
    weight: float | None = 1.0
    parameters: Mapping[str, float] = field(default_factory=dict)


def parse_workloads(text: str) -> tuple[Component, ...]:
    """Return what ``NAME[:WEIGHT][+NAME[:WEIGHT]…]`` asks for.

    Raises:
        UserError: No such workload, or a weight that is none.
    """
    parts = text.split(_AND)
    if len(parts) > MAX_COMPONENTS:
        raise UserError(f"--workload {text}: at most {MAX_COMPONENTS} workloads")
    components = []
    for part in parts:
        name, colon, weight = part.strip().partition(_TIMES)
        where = "--workload" if len(parts) == 1 and not colon else f"--workload {text}:"
        components.append(Component(find_workload(name.strip(), where), _weight(text, weight) if colon else 1.0))
    return tuple(components)


def _weight(text: str, weight: str) -> float:
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_WEIGHT:
        raise UserError(f"--workload {text}: weight {weight}: a number above 0, at most {MAX_WEIGHT:g}")
    return number


class Load:
    """One stream of requests out of several workloads; an ``AdjustableLoad``.

    Args:
        components: What it is made of; the first draws as it would alone.
        seed: The run's seed.
        block_size, num_blocks: The pool it is meant for.
        rate_scale, size_scale: Factors at the start.
        num_requests: Requests after which it ends; ``None`` is never.
    """

    def __init__(
        self,
        components: Sequence[Component],
        seed: int,
        *,
        block_size: int,
        num_blocks: int,
        rate_scale: float = 1.0,
        size_scale: float = 1.0,
        num_requests: int | None = None,
    ) -> None:
        self.rate_scale = rate_scale
        self.num_requests = num_requests
        self._dial = SizeDial(size_scale)
        # Time of the components and of the engine: equal at these two moments, and at ``rate_scale`` to each other.
        self._their_s = self._engine_s = 0.0
        self._last_s = 0.0
        total = sum(c.weight for c in components if c.weight is not None)
        streams = []
        for i, c in enumerate(components):
            requests = c.workload.requests(
                seed + (i << 64), block_size=block_size, num_blocks=num_blocks, dial=self._dial, **c.parameters
            )
            share = 1.0 if c.weight is None else c.weight / total
            streams.append(requests if share == 1.0 else _stretched(requests, share))
        self._merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_arrival)

    @property
    def size_scale(self) -> float:
        """How many times as long requests are."""
        return self._dial.scale

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, each with its arrival on the engine's clock; there is one stream, to be read once."""
        num_made = 0
        while self.num_requests is None or num_made < self.num_requests:
            request = next(self._merged, None)
            if request is None:
                return
            # Rounding must not let one overtake another.
            self._last_s = max(self._last_s, self._engine_s + (request.arrival_s - self._their_s) / self.rate_scale)
            request.arrival_s = self._last_s
            num_made += 1
            yield request

    def adjust(self, now_s: float, rate_scale: float, size_scale: float, pending: Request | None) -> None:
        """Change rate and size from ``now_s`` on, and move the arrival of ``pending`` along.

        Lengths change with the next request that is made; each component has made one ahead.
        """
        if pending is not None and pending.arrival_s > now_s:
            pending.arrival_s = now_s + (pending.arrival_s - now_s) * self.rate_scale / rate_scale
        self._last_s = now_s if pending is None else pending.arrival_s
        self._their_s += (now_s - self._engine_s) * self.rate_scale
        self._engine_s = now_s
        self.rate_scale = rate_scale
        self._dial.scale = size_scale


def _stretched(requests: Iterator[Request], share: float) -> Iterator[Request]:
    for request in requests:
        request.arrival_s /= share
        yield request


def _arrival(request: Request) -> float:
    return request.arrival_s
