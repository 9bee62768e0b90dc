"""Skipping: how many steps pass in which nothing can happen, so that an engine may take them in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator.ids import IdArray

if TYPE_CHECKING:
    from allocator.engine import Engine


def quiet_steps(engine: Engine, rows: IdArray, stops: IdArray, budget: int) -> int:
    """Return how many steps pass until a block of these rows fills or anything else happens.

    Args:
        engine: At the beginning of the first of these steps.
        rows: Those that decode. [d], at least 1
        stops: Tokens at which each finishes, or its client acts. [d]
        budget: Steps that may be taken.

    Returns:
        From 1 to ``budget``.
    """
    manager = engine.manager
    tables = manager.tables
    tokens = tables.num_tokens[rows]
    room = np.minimum(tables.num_blocks[rows] * manager.block_size, stops) - tokens
    return steps_to_change(engine, min(budget, int(room[room.argmin()])))


def steps_to_change(engine: Engine, steps: int) -> int:
    """Return ``steps``, or fewer if a client acts, a copy is due or a look at fragmentation is; at least 1."""
    if (until := _next_client_step(engine)) is not None:
        steps = min(steps, until - engine.step)
    if (due := engine.copies.next_due) is not None:
        steps = min(steps, due - engine.step)
    if engine.compact == "auto":
        steps = min(steps, engine.compactor.auto.next_look - engine.step)
    if (change := engine.thrash.next_change()) is not None:
        steps = min(steps, change - engine.step)
    return max(1, steps)


def idle_steps(engine: Engine, budget: int) -> int:
    """Return how many steps pass until a client brings work, while there is none; 0 when none ever does."""
    until = _next_client_step(engine)
    if until is None:
        return 0
    steps = min(budget, max(1, until - engine.step))
    if (change := engine.thrash.next_change()) is not None:
        steps = min(steps, change - engine.step)
    return steps


def _next_client_step(engine: Engine) -> int | None:
    """Return the step at which a request arrives or a client hangs up; ``None`` when neither ever happens."""
    steps = [engine.lifecycle.next_deadline()]
    if not engine.config.serial:
        steps.append(engine.arrivals.next_step)
    return min((step for step in steps if step is not None), default=None)
