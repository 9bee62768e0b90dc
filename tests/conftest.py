"""What every test shares: Hypothesis profiles, and block arrays made from a few words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from allocator.block_map import BlockArrays
from allocator.ids import NO_ROW, BlockState

# The same examples every time; the long profile looks further. Slow machines are no failure.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, max_examples=60, stateful_step_count=40, **_COMMON)
settings.register_profile("long", max_examples=1500, stateful_step_count=80, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="session")
def _nobodys_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the configuration and the logs of whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable.lower())))
        yield


MakeArrays = Callable[..., BlockArrays]

_STATES = {
    "f": BlockState.FREE,
    "c": BlockState.CACHED,
    "a": BlockState.ACTIVE,
    "r": BlockState.RESERVED,
    "x": BlockState.RETIRED,
}


@pytest.fixture
def make_arrays() -> MakeArrays:
    """Return a maker of block arrays: one letter a block (f, c, a, r; x is retired), all active blocks full."""

    def make(states: str, *, block_size: int = 16, ref_counts: dict[int, int] | None = None) -> BlockArrays:
        state = np.array([_STATES[letter] for letter in states], np.uint8)
        active = state == BlockState.ACTIVE
        ref_count = active.astype(np.uint16)
        for block, refs in (ref_counts or {}).items():
            ref_count[block] = refs
        return BlockArrays(
            state=state,
            flags=np.zeros(len(state), np.uint8),
            ref_count=ref_count,
            fill=np.where(active | (state == BlockState.CACHED), block_size, 0).astype(np.uint16),
            owner=np.full(len(state), NO_ROW, np.int32),
            last_used=np.zeros(len(state), np.uint32),
            hash64=np.zeros(len(state), np.uint64),
        )

    return make
