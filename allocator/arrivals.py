"""Arrivals: the requests that have not arrived yet, and when the next one does. Owns the engine's stream of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from allocator.config import STEP_S
from allocator.content import AdjustableLoad, Request


class Arrivals:
    """Requests in order of arrival, one read ahead.

    Args:
        requests: In order of arrival; read as they are taken; may be endless.
        load: The same, where their rate and size can be changed; in place of ``requests``.

    Attributes:
        load: As given.
    """

    def __init__(self, requests: Iterable[Request] = (), load: AdjustableLoad | None = None) -> None:
        self.load = load
        self._requests: Iterator[Request] = iter(requests if load is None else load)
        self._next: Request | None = next(self._requests, None)

    @property
    def are_over(self) -> bool:
        """Whether no request is left."""
        return self._next is None

    @property
    def next_step(self) -> int | None:
        """Step at which the next request arrives; ``None`` when none is left."""
        return None if self._next is None else math.ceil(self._next.arrival_s / STEP_S - 1e-9)

    def pop(self) -> Request | None:
        """Take the next request, arrived or not; ``None`` when none is left."""
        request = self._next
        if request is not None:
            self._next = next(self._requests, None)
        return request

    def pop_due(self, step: int) -> Request | None:
        """Take the next request if it has arrived by ``step``; ``None`` otherwise."""
        at = self.next_step
        return self.pop() if at is not None and at <= step else None

    def adjust(self, now_s: float, rate_scale: float | None, size_scale: float | None) -> None:
        """Change how fast requests of an adjustable load arrive and how long they are; ``None`` leaves either."""
        load = self.load
        assert load is not None
        rate = load.rate_scale if rate_scale is None else rate_scale
        load.adjust(now_s, rate, load.size_scale if size_scale is None else size_scale, self._next)
