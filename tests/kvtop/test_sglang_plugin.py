"""The SGLang plugin against stand-ins for SGLang's structures: what is published, when it declines, how it fails."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_engine import until
from fake_sglang import PAGE, BaseScheduler, Req, Tensor, imported
from published import is_listening, own_directories

from allocator.ids import BlockState
from kvtop.attachment import Attachment
from kvtop.model.view import View
from kvtop.plugins import sglang as plugin
from kvtop.targets import open_target

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _directories(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "sglang.kvtop")
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        monkeypatch.setenv("KVTOP_PUBLISH", "on")
        monkeypatch.setattr("kvtop.plugins.publisher.EVERY_S", 0.0)
        monkeypatch.setattr("kvtop.plugins.publisher.SHARE", 1e9)
        yield


def scheduler_of(release: str = "0.5.23", **ranks: int) -> BaseScheduler:
    with imported(release, **ranks) as make:
        plugin.register()
        return make()


@contextmanager
def spinning(scheduler: BaseScheduler, step: Callable[[], object] | None = None) -> Iterator[None]:
    """Let the scheduler go round as it does when there is nothing to do, until the block ends."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            (step or scheduler.step)()

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(TIMEOUT_S)


@pytest.fixture
def look() -> Iterator[Callable[..., View]]:
    """Return what reads a scheduler that goes round meanwhile."""
    opened: list[Attachment] = []

    def look(scheduler: BaseScheduler, **focus: int | None) -> View:
        if not opened:
            opened.append(open_target("local:sglang"))
        opened[0].look_at(seq_id=focus.get("seq_id"), block_id=focus.get("block_id"))
        with spinning(scheduler):
            return opened[0].poll(TIMEOUT_S)

    yield look
    for attachment in opened:
        attachment.close()


def test_pages_are_free_held_or_cached(look: Callable[..., View]) -> None:
    scheduler = scheduler_of()
    first, second = Req("first", 40), Req("second", 70, max_new_tokens=30)
    scheduler.process_input_requests([first])
    scheduler.step()
    scheduler.process_input_requests([second])
    scheduler.step(np.array([1, 2]))
    view = look(scheduler)
    assert view.error is None, view.error
    assert view.snapshot is not None
    assert view.device is not None
    arrays, numbers = view.device.arrays, view.device.numbers
    assert (numbers.total, numbers.reserved, numbers.active, numbers.cached, numbers.free) == (65, 1, 6, 0, 58)
    assert arrays.state[0] == BlockState.RESERVED
    assert arrays.ref_count[:7].tolist() == [0, 2, 2, 1, 1, 1, 1]
    assert arrays.fill[:7].tolist() == [0, 16, 16, 8, 16, 16, 6]
    assert view.snapshot.block_bytes == 64 * PAGE
    assert view.snapshot.num_running == 2
    rows = {row.label: row for row in view.snapshot.sequences}
    assert (rows["second"].num_target, rows["second"].hit_blocks, rows["second"].shared_blocks) == (100, 2, 2)
    seen = look(scheduler, seq_id=rows["second"].seq_id, block_id=2)
    assert seen.focus_table is not None
    assert seen.focus_table.tolist() == [1, 2, 4, 5, 6]
    assert seen.focus_block is not None
    assert seen.focus_block.total == 2
    scheduler.finish(first)
    scheduler.finish(second)
    numbers = look(scheduler).device.numbers  # type: ignore[union-attr]
    assert (numbers.active, numbers.cached, numbers.free) == (0, 6, 58)
    scheduler.flush_cache()
    numbers = look(scheduler).device.numbers  # type: ignore[union-attr]
    assert (numbers.active, numbers.cached, numbers.free) == (0, 0, 64)


def test_pages_that_wait_to_be_sorted_in_are_free(look: Callable[..., View]) -> None:
    scheduler = scheduler_of()
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.staged_pages = [Tensor(allocator.take(3)), Tensor(allocator.take(2))]
    assert look(scheduler).device.numbers.free == 64  # type: ignore[union-attr]


def test_what_is_not_told_is_unknown(look: Callable[..., View]) -> None:
    view = look(scheduler_of())
    assert view.snapshot is not None
    assert view.snapshot.counters.evictions is None
    assert view.hit_ratio is None
    assert view.next_victims is None


def test_only_the_engines_own_thread_reads() -> None:
    scheduler = scheduler_of()
    attachment = open_target("local:sglang")
    try:
        assert "ended no step" in (attachment.poll(0.3).error or "")
        with spinning(scheduler):
            assert attachment.poll(TIMEOUT_S).error is None
    finally:
        attachment.close()


@pytest.mark.parametrize(("ranks", "name"), [({"dp_rank": 1, "dp_size": 2}, "sglang-dp1"), ({"dp_rank": 0}, "sglang")])
def test_the_name_has_the_rank_behind_it(ranks: dict[str, int], name: str) -> None:
    _scheduler = scheduler_of(**ranks)
    assert is_listening(name)


@pytest.mark.parametrize("ranks", [{"tp_rank": 1}, {"pp_rank": 2}])
def test_other_ranks_have_the_same_pages_and_do_not_publish(ranks: dict[str, int]) -> None:
    scheduler = scheduler_of(**ranks)
    assert not is_listening("sglang")
    assert not is_wrapped(scheduler)


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24", "0.6.0", "0.5", "main"])
def test_a_release_that_was_not_tried_is_left_alone(release: str, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_of(release)
    assert not is_wrapped(scheduler)
    assert not is_listening("sglang")
    (line,) = [record.getMessage() for record in caplog.records]
    assert release in line
    assert "0.5.23" in line


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTOP_PUBLISH")
    assert not is_wrapped(scheduler_of())


def test_a_pool_of_another_kind_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with imported("0.5.23") as make, pytest.MonkeyPatch.context() as patch:
        plugin.register()
        patch.setattr(BaseScheduler, "collect_inflight_reqs", None)
        assert not is_wrapped(make())
    assert "of another kind" in caplog.records[-1].getMessage()


def test_a_failure_ends_the_publication_and_not_the_engine(look: Callable[..., View]) -> None:
    scheduler = scheduler_of()
    assert look(scheduler).error is None
    table = scheduler.req_to_token_pool
    scheduler.process_input_requests([Req("one", 40)])
    scheduler.step()
    scheduler.req_to_token_pool = None  # type: ignore[assignment]
    assert "the publication ended by itself" in (look(scheduler).error or "")
    until(lambda: not is_listening("sglang"))
    assert not is_wrapped(scheduler)
    scheduler.req_to_token_pool = table
    scheduler.step()


def is_wrapped(scheduler: BaseScheduler) -> bool:
    return any(name in vars(scheduler) for name in ("get_next_batch_to_run", "process_batch_result", "flush_cache"))
