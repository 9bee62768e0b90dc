"""SharedPool under every schedule of short programs; and proof that the explorer finds races planted for it."""

from __future__ import annotations

import inspect
import linecache
from types import ModuleType

import pytest
from explorer import (
    BrokenError,
    Client,
    LawBrokenError,
    Program,
    Run,
    Scenario,
    Step,
    check_order,
    explore_exhaustively,
    explore_randomly,
    pack,
    replay,
    unpack,
)

from allocator import free_list, pool, reservation
from allocator.pool import BlockPool
from allocator.reservation import SharedPool


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few blocks enough for refills, spills and steals."""
    monkeypatch.setattr(reservation, "SLAB", 2)


def calls(*texts: str) -> Program:
    """Return a program that makes these calls, such as ``"allocate 2"``."""

    def program(client: Client) -> None:
        for text in texts:
            name, *numbers = text.split()
            call = getattr(client, name, None) or getattr(client.pool, name)
            call(*map(int, numbers))

    return program


def build(num_blocks: int, module: ModuleType = reservation) -> SharedPool:
    shared: SharedPool = module.SharedPool(BlockPool(num_blocks))
    return shared


#: Name → (pool size, programs). Slabs are 2 blocks: a refill takes 2, and more than 4 spill.
PROGRAMS = {
    "both refill and give back": (
        6,
        calls("allocate 1", "release", "allocate 1", "release"),
        calls("allocate 1", "release", "allocate 1", "release"),
    ),
    "both need what the other reserves": (
        4,
        calls("allocate 1", "release", "allocate 3", "release"),
        calls("allocate 1", "release", "allocate 3", "release"),
    ),
    "one takes all, one a few": (5, calls("allocate 5", "release"), calls("allocate 1", "release", "allocate 2")),
    "one asks for too much": (
        4,
        calls("allocate 2", "release", "allocate 3"),
        calls("allocate 2", "release", "allocate 5"),
    ),
    "both spill": (
        12,
        calls("allocate 5", "release", "allocate 2"),
        calls("allocate 5", "release", "allocate 2"),
    ),
    "a large batch meets small ones": (
        20,
        calls("allocate 9", "release", "allocate 10", "release"),
        calls("allocate 1", "allocate 7", "release", "release"),
    ),
    "a pin meets releases": (
        4,
        calls("allocate 1", "release", "allocate 1", "release"),
        calls("pin 0 1", "allocate 1", "unpin 0 1"),
    ),
    "a pin for good": (4, calls("allocate 2", "release", "reclaim_idle", "allocate 2"), calls("pin 0 1")),
    "a pin meets a single release": (4, calls("allocate 1", "release", "allocate 1"), calls("pin 0 1")),
    "pins come and go": (4, calls("allocate 2", "release"), calls("pin 0", "unpin 0", "pin 1")),
    "all are called back once": (6, calls("allocate 2", "release", "allocate 2"), calls("reclaim_all")),
    "all are called back": (
        6,
        calls("allocate 1", "release", "allocate 2", "release"),
        calls("reclaim_all", "reclaim_all"),
    ),
    "idle ones are called back": (
        6,
        calls("allocate 1", "release", "allocate 2", "release"),
        calls("reclaim_idle", "allocate 1", "reclaim_idle", "reclaim_idle"),
    ),
    "a thread gives back": (
        6,
        calls("allocate 1", "release", "give_back", "allocate 2"),
        calls("allocate 6", "release"),
    ),
    "a thread ends": (
        6,
        calls("allocate 2", "allocate 1", "release", "end_thread"),
        calls("allocate 1", "allocate 3", "reclaim_idle", "release"),
    ),
}


def scenario(name: str, **options: bool) -> Scenario:
    num_blocks, *programs = PROGRAMS[name]
    return Scenario(name, lambda: build(num_blocks), tuple(programs), **options)


def crowd(*words: str) -> Scenario:
    """Return threads that each mix small and large batches in a pool too small for all, with one that disturbs."""
    working = calls("allocate 1", "allocate 3", "release", "allocate 2", "release_all", "allocate 8", "release_all")
    return Scenario("a crowd", lambda: build(14), (working, working, working, calls(*words)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule_with_one_preemption(name: str) -> None:
    assert explore_exhaustively(scenario(name), preemptions=1) > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_schedules_with_two_preemptions(name: str) -> None:
    assert explore_exhaustively(scenario(name), preemptions=2, limit=6_000) > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schedules_with_three_preemptions() -> None:
    assert explore_exhaustively(scenario("pins come and go"), preemptions=3, limit=10_000) > 5_000


DISTURBANCES = {
    "pins": ("pin 0 5", "allocate 1", "unpin 5", "release", "pin 7", "unpin 0 7"),
    "calls back": ("reclaim_idle", "reclaim_all", "allocate 2", "reclaim_idle", "release"),
    "ends": ("allocate 4", "release", "end_thread"),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_random_schedules_of_four_threads(what: str) -> None:
    assert explore_randomly(crowd(*DISTURBANCES[what]), range(100)) == 100


@pytest.mark.slow
@pytest.mark.parametrize("what", DISTURBANCES)
def test_many_random_schedules_of_four_threads(what: str) -> None:
    for switch in (0.05, 0.25, 0.6):
        explore_randomly(crowd(*DISTURBANCES[what]), range(1000, 1500), switch)


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_schedules_between_instructions(name: str) -> None:
    explore_randomly(scenario(name, watched=(reservation, pool, free_list), opcodes=True), range(4), switch=0.05)


# -- planted races ----------------------------------------------------------------------------------------

#: Race → (program that shows it, text in ``reservation``, what stands there instead).
RACES = {
    "flags are looked at only before a block is appended": (
        "a pin for good",
        "        if len(mine.blocks) > 2 * SLAB or facts.num_flagged:\n",
        "        if len(mine.blocks) > 2 * SLAB:\n",
    ),
    "a pin steals first and raises its flag after": (
        "a pin for good",
        "            self.pool.set_flag(block_ids, BlockFlag.PINNED)\n",
        "            self._steal_all()\n            self.pool.set_flag(block_ids, BlockFlag.PINNED)\n"
        "            return\n",
    ),
    "a steal copies the list and then clears it": (
        "all are called back once",
        "        back = _pop_until(reservation.blocks, 0)\n",
        "        back = list(reservation.blocks)\n        reservation.blocks.clear()\n",
    ),
    "a refill without the lock": (
        "both refill and give back",
        '        """Fill a reservation that is short of ``n`` blocks, and allocate from it; else from the pool."""\n'
        "        with self.lock:\n",
        "        with contextlib.nullcontext():\n",
    ),
    "surplus goes back without the lock": (
        "both spill",
        '        """Give back what a reservation has too much of: all of it while any block is flagged."""\n'
        "        with self.lock:\n",
        "        with contextlib.nullcontext():\n",
    ),
    "states are written after the append": (
        "all are called back once",
        "        if not facts.restate_sole(ids, RESERVED):\n            return False\n        mine.blocks += ids\n",
        "        mine.blocks += ids\n        if not facts.restate_sole(ids, RESERVED):\n            return False\n",
    ),
    "an allocation looks at a block and then removes it": (
        "all are called back once",
        "                block = blocks.pop()\n                state[block] = SOLE\n",
        "                block = blocks[-1]\n                del blocks[-1:]\n                state[block] = SOLE\n",
    ),
    "blocks stolen back are marked free after they are listed": (
        "a thread gives back",
        "            self.pool.facts.state[ids] = FREE\n            self.pool.put_free(ids)\n",
        "            self.pool.put_free(ids)\n            self.lock.release()\n            self.lock.acquire()\n"
        "            self.pool.facts.state[ids] = FREE\n",
    ),
    "what was taken is not given back when others stole the rest": (
        "one takes all, one a few",
        "                state[block] = RESERVED\n            blocks += taken\n",
        "                state[block] = RESERVED\n",
    ),
    "who asks for too much makes others fail": (
        "one asks for too much",
        "        if len(blocks) < n:\n            return self._refill(mine, n)\n",
        "",
    ),
    "a thread that ends keeps its blocks": (
        "a thread ends",
        "                self.pool._put_back(_pop_until(self.mine.blocks, 0))\n",
        "",
    ),
}


def planted(race: str) -> Scenario:
    """Return a scenario over ``reservation`` with one race planted in its text."""
    name, old, new = RACES[race]
    text = inspect.getsource(reservation)
    assert text.count(old) == 1, f"{race}: this text is no longer there exactly once"
    text = text.replace(old, new)
    variant = ModuleType("reservation")
    variant.__file__ = f"<reservation where {race}>/reservation.py"
    linecache.cache[variant.__file__] = (len(text), None, text.splitlines(keepends=True), variant.__file__)
    exec(compile(text, variant.__file__, "exec"), variant.__dict__)
    variant.__dict__["SLAB"] = 2
    num_blocks, *programs = PROGRAMS[name]
    return Scenario(race, lambda: build(num_blocks, variant), tuple(programs), (variant, free_list))


@pytest.mark.parametrize("race", RACES)
def test_a_planted_race_is_found_and_can_be_replayed(race: str) -> None:
    with pytest.raises(LawBrokenError) as found:
        explore_exhaustively(planted(race), preemptions=2, limit=4000)
    text = str(found.value)
    assert "thread 0 @ " in text or "thread 1 @ " in text
    with pytest.raises(LawBrokenError) as again:
        replay(planted(race), text.split('"')[1])
    assert str(again.value) == text


def test_a_planted_race_found_at_random_names_its_seed() -> None:
    with pytest.raises(LawBrokenError, match=r"seed \d+, replay choices"):
        explore_randomly(planted("a refill without the lock"), range(500))


def test_a_deadlock_is_found_and_leaves_no_thread_behind() -> None:
    def grab(client: Client) -> None:
        client.pool.lock.acquire()

    with pytest.raises(LawBrokenError, match="deadlock"):
        Run(Scenario("nobody lets go", lambda: build(4), (grab, calls("reclaim_all"))), lambda _, enabled: 0).start()


def test_an_endless_program_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorer.MAX_POINTS", 300)

    def work(client: Client) -> None:
        while client.allocate(1):
            client.release()

    with pytest.raises(LawBrokenError, match="no end after 300 points"):
        explore_randomly(Scenario("endless", lambda: build(4), (work, work)), [1])


def test_choices_are_written_and_read() -> None:
    assert pack([0, 0, 0, 1, 2, 2]) == "0x3 1x1 2x2"
    assert unpack("0x3 1x1 2x2") == [0, 0, 0, 1, 2, 2]


def test_results_must_fit_some_order_of_the_calls() -> None:
    def step(thread: int, kind: str, n: int, ids: set[int] | None, called: int, returned: int) -> Step:
        return Step(thread, kind, n, None if ids is None else frozenset(ids), called, returned)

    took = step(0, "allocate", 2, {0, 1}, 1, 4)
    check_order([took, step(1, "allocate", 1, None, 2, 3)], 2)  # they overlap: the other may have been first
    check_order([took, step(0, "release", 2, {0, 1}, 5, 8), step(1, "allocate", 2, {0, 1}, 6, 7)], 2)
    check_order([step(0, "pin", 1, {0}, 1, 4), step(1, "allocate", 1, {0}, 2, 3)], 2)
    for steps in (
        [step(1, "allocate", 1, None, 0, 0), took],  # it failed before anybody had anything
        [took, step(1, "allocate", 1, {1}, 2, 3)],  # one block, two holders
        [step(0, "allocate", 2, None, 1, 4), step(1, "allocate", 2, None, 2, 3)],  # both cannot have been second
        [step(0, "pin", 1, {0}, 1, 2), step(1, "allocate", 1, {0}, 3, 4)],  # pinned before it asked
        [step(0, "pin", 1, {0}, 1, 2), step(0, "unpin", 1, {0}, 3, 4), step(1, "allocate", 2, None, 5, 6)],
    ):
        with pytest.raises(BrokenError, match="no order of these calls"):
            check_order(steps, 2)
