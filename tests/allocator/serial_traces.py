"""Requests for serial replays: drawn at random, and where the public traces lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from allocator.content import KeyedContent, Request

TRACES = Path(__file__).parents[3] / "shared" / "traces"

#: Prompt tokens, output tokens, ids of the full prompt blocks.
Row = tuple[int, int, list[int]]


@st.composite
def traces(draw, sizes):
    """Rows that continue, repeat or branch off earlier ones; ids name all before them, and so are unique to a path."""
    size = draw(sizes)
    rows: list[Row] = []
    names: dict[tuple[int, ...], int] = {}
    for _ in range(draw(st.integers(1, 25))):
        path = list(draw(st.sampled_from([(), *names])))[: draw(st.integers(0, 20))]
        path += draw(st.lists(st.integers(0, 2), max_size=4))
        rest = draw(st.integers(0, size - 1))
        if not path and not rest:
            rest = 1 if size > 1 else 0
            path = [] if rest else [0]
        ids = [names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))]
        rows.append((len(path) * size + rest, draw(st.integers(0, 3 * size)), ids))
    return size, rows


def as_requests(rows: list[Row], size: int) -> list[Request]:
    return [
        Request(KeyedContent(prompt + output, np.array(ids, np.int64), size, i), prompt)
        for i, (prompt, output, ids) in enumerate(rows)
    ]
