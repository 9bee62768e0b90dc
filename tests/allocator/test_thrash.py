"""ThrashGuard: what counts as thrash, how the limit tightens, and how time eases it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allocator.thrash import MIN_PREEMPTIONS, WINDOW_STEPS, ThrashGuard


def thrash(guard: ThrashGuard, step: int, running: int, *, gained: int = 0) -> list[str | None]:
    """As many preemptions of 100 tokens as it takes, with ``gained`` tokens generated from first to last."""
    return [
        guard.preempted(step + i, 100, gained * i // (MIN_PREEMPTIONS - 1), running) for i in range(MIN_PREEMPTIONS)
    ]


def test_it_takes_several_preemptions_that_gain_less_than_they_lose():
    guard = ThrashGuard(256)
    assert thrash(guard, 0, 5, gained=400) == [None] * MIN_PREEMPTIONS
    guard = ThrashGuard(256)
    *before, said = thrash(guard, 0, 5, gained=399)
    assert before == [None] * (MIN_PREEMPTIONS - 1)
    assert said == "thrashing: 4 preemptions in 4 steps gave up 400 tokens for 399 new ones; at most 5 may run"
    assert (guard.limit, guard.episodes) == (5, 1)


def test_preemptions_a_window_apart_are_no_thrash():
    guard = ThrashGuard(256)
    assert [guard.preempted(i * WINDOW_STEPS, 100, 0, 5) for i in range(20)] == [None] * 20


def test_the_limit_tightens_never_loosens_by_a_preemption_and_is_at_least_one():
    guard = ThrashGuard(256)
    thrash(guard, 0, 5)
    assert thrash(guard, 10, 7) == [None] * MIN_PREEMPTIONS
    assert guard.limit == 5
    thrash(guard, 20, 0)
    assert (guard.limit, guard.episodes) == (1, 1)


def test_quiet_windows_double_the_limit_until_it_is_none():
    guard = ThrashGuard(8)
    assert (guard.next_change(), guard.pass_time(10**6)) == (None, None)
    thrash(guard, 97, 1)
    assert guard.next_change() == 100 + WINDOW_STEPS
    assert guard.pass_time(99 + WINDOW_STEPS) is None
    assert guard.pass_time(100 + WINDOW_STEPS) == "at most 2 may run, after thrashing"
    assert guard.preempted(110 + WINDOW_STEPS, 1, 0, 1) is None  # one alone, and the quiet begins anew
    assert guard.next_change() == 110 + 2 * WINDOW_STEPS
    assert guard.pass_time(110 + 2 * WINDOW_STEPS) == "at most 4 may run, after thrashing"
    assert guard.pass_time(110 + 3 * WINDOW_STEPS) == "no more thrashing: no limit"
    assert (guard.limit, guard.next_change()) == (None, None)
    thrash(guard, 10_000, 3)
    assert (guard.limit, guard.episodes) == (3, 2)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300), st.integers(0, 200), st.integers(0, 20)), max_size=80)
)
def test_between_two_limits_no_window_loses_more_than_it_gains(happened):
    """While nothing is said, any window of enough preemptions has gained at least what it lost."""
    guard, step, generated = ThrashGuard(256), 0, 0
    seen: list[tuple[int, int, int]] = []
    for wait, lost, more, running in happened:
        step, generated = step + wait, generated + more
        guard.pass_time(step)
        before = guard.limit
        said = guard.preempted(step, lost, generated, running)
        seen.append((step, lost, generated))
        window = [row for row in seen if row[0] > step - WINDOW_STEPS]
        pays = len(window) < MIN_PREEMPTIONS or sum(row[1] for row in window) <= generated - window[0][2]
        if said is None and not pays:
            assert before is not None  # limited as far already
            assert guard.limit == before <= max(1, running)
        assert (said is not None) == (guard.limit != before)
        if not pays:
            seen.clear()
