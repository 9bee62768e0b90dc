"""The vLLM plugin against stand-ins for vLLM's structures: what is published, when it declines, and how it fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import until
from fake_vllm import MODULE, RELEASES, BaseScheduler, imported, request_of
from published import is_listening, own_directories

from allocator.block_map import BlockMapWriter
from allocator.commands import Resize
from allocator.ids import NO_ROW, BlockState
from kvtop.attachment import Attachment
from kvtop.compat import VllmCollector
from kvtop.errors import SourceError
from kvtop.exporter import ViewCollector
from kvtop.model.observation import Focus, Observation
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked
from kvtop.plugins import vllm as plugin
from kvtop.plugins import vllm_pool
from kvtop.plugins.publisher import PoolPublisher
from kvtop.plugins.vllm_pool import key64
from kvtop.sources.named import NamedEngine
from kvtop.targets import open_target

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        monkeypatch.setenv("KVTOP_PUBLISH", "1")
        yield


Make = Callable[..., BaseScheduler]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Return a maker of schedulers in a vLLM of a release that has loaded the plugin."""
    caplog.set_level(logging.INFO, "vllm.kvtop")
    made: list[BaseScheduler] = []

    def make(release: str = RELEASES[-1], **how: object) -> BaseScheduler:
        with imported(release) as scheduler_class:
            plugin.register()
            made.append(scheduler_class(**how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.shutdown()


@pytest.fixture
def at_every_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every observation make a reading, so that a test need not wait for one to be due."""
    monkeypatch.setattr("kvtop.plugins.publisher.EVERY_S", 0.0)
    monkeypatch.setattr("kvtop.plugins.publisher.SHARE", 1e9)


@pytest.fixture
def attach() -> Iterator[Callable[..., Attachment]]:
    opened: list[Attachment] = []

    def attach(name: str = "local:vllm") -> Attachment:
        opened.append(open_target(name))
        return opened[-1]

    yield attach
    for attachment in opened:
        attachment.close()


def read(attachment: Attachment, **focus: int) -> Observation:
    seen = attachment.source.read(Focus(**focus), TIMEOUT_S)
    assert isinstance(seen, Observation)
    assert seen.device is not None
    return seen


# ---- what is published


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.usefixtures("at_every_reading")
def test_the_map_is_the_pool(make: Make, attach: Callable[..., Attachment], release: str) -> None:
    scheduler = make(release)
    attachment = attach()
    rng = random.Random(release)
    families = [[rng.randrange(200) for _ in range(64)] for _ in range(3)]
    pool = scheduler.kv_cache_manager.block_pool
    for step in range(60):
        if step % 2 == 0 and len(scheduler.requests) < 8:
            prompt = rng.choice(families) + [rng.randrange(200) for _ in range(rng.randrange(40))]
            request_of(scheduler, f"r{step}", prompt, rng.randrange(1, 60))
        scheduler.step()
        if step % 5:
            continue
        seen = read(attachment, num_victims=64)
        arrays, snapshot = seen.device, seen.snapshot
        assert arrays is not None
        assert arrays.ref_count.tolist() == [0 if b.is_null else b.ref_cnt for b in pool.blocks]
        assert arrays.hash64.tolist() == [key64(b._block_hash) for b in pool.blocks]
        assert arrays.state[0] == BlockState.RESERVED
        active, cached = arrays.state == BlockState.ACTIVE, arrays.state == BlockState.CACHED
        assert active.tolist() == [b.ref_cnt > 0 for b in pool.blocks]
        assert cached.tolist() == [b.ref_cnt == 0 and b._block_hash is not None for b in pool.blocks]
        assert int(active.sum()) == round(pool.get_usage() * (pool.num_gpu_blocks - 1))
        victims = [b.block_id for b in pool.free_block_queue.get_all_free_blocks() if b._block_hash is not None]
        assert seen.next_victims == tuple(victims[:64])
        assert snapshot.num_running == len(scheduler.running)
        assert snapshot.num_waiting == len(scheduler.waiting)
        rows = {row.row: row for row in snapshot.sequences if row.row is not None}
        assert {int(owner) for owner in arrays.owner[active]} <= set(rows)
        assert set(arrays.owner[~active].tolist()) <= {NO_ROW}
        for row in rows.values():
            table = scheduler.kv_cache_manager.req_to_blocks[row.label]
            assert row.num_blocks == len(table)
            assert row.shared_blocks == sum(block.ref_cnt > 1 for block in table)


@pytest.mark.usefixtures("at_every_reading")
def test_a_request_is_told_with_its_table_and_its_last_blocks_fill(
    make: Make, attach: Callable[..., Attachment]
) -> None:
    scheduler = make()
    attachment = attach()
    request_of(scheduler, "first", list(range(40)), max_tokens=100)
    request_of(scheduler, "second", list(range(40)), max_tokens=100)
    request_of(scheduler, "too long", list(range(64)) * 20)
    scheduler.step()
    seen = read(attachment)
    first, second, waits = seen.snapshot.sequences
    assert (first.label, first.status, first.num_prompt, first.num_target) == ("first", "running", 40, 140)
    assert (waits.label, waits.status, waits.row, waits.num_blocks) == ("too long", "waiting", None, 0)
    assert seen.device is not None
    table = read(attachment, seq_id=second.seq_id).focus_table
    assert table is not None
    assert seen.device.fill[table].tolist() == [16, 16, 8]
    assert seen.device.ref_count[table].tolist() == [2, 2, 1]
    holders = read(attachment, block_id=int(table[0])).focus_block
    assert holders is not None
    assert holders.holders == ((first.seq_id, 0), (second.seq_id, 0))
    assert read(attachment, block_id=64).focus_block is None
    assert read(attachment, seq_id=99).focus_table is None


class Hybrid(BaseScheduler):
    """Layers in two groups: full attention in blocks of 16 tokens, a sliding window in blocks of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.window: dict[str, list[object]] = {}
        coordinator = self.kv_cache_manager.coordinator
        coordinator.single_type_managers += (SimpleNamespace(req_to_blocks=self.window),)
        spec = SimpleNamespace(block_size=32, page_size_bytes=4096)
        self.kv_cache_config.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=["c"]))


def test_groups_of_layers_share_the_pool(make: Make, attach: Callable[..., Attachment]) -> None:
    with imported("0.32.0"):
        sys.modules[MODULE].Scheduler = Hybrid  # type: ignore[attr-defined]
        plugin.register()
        scheduler = Hybrid()
    request_of(scheduler, "one", list(range(72)), max_tokens=100)
    scheduler.step()
    pool = scheduler.kv_cache_manager.block_pool
    # Of 72 tokens the window's first block is out of sight, the second is full, the third has eight.
    scheduler.window["one"] = [pool.null_block, *pool.get_new_blocks(2)]
    seen = read(attach(), seq_id=1)
    assert seen.device is not None
    assert (seen.snapshot.block_size, seen.snapshot.block_bytes) == (32, 4096)
    assert any("2 groups" in note for note in seen.snapshot.notes)
    assert seen.focus_table is not None
    assert seen.focus_table.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert seen.device.fill[1:8].tolist() == [32, 32, 32, 32, 16, 32, 8]
    assert set(seen.device.owner[1:8].tolist()) == {seen.snapshot.sequences[0].row}
    assert seen.device.owner[0] == NO_ROW
    scheduler.shutdown()


@pytest.mark.usefixtures("at_every_reading")
def test_totals_are_counted_and_the_rest_is_unknown(make: Make, attach: Callable[..., Attachment]) -> None:
    scheduler = make(num_blocks=9)
    attachment = attach()
    for i in range(4):
        request_of(scheduler, str(i), [i] * 48, max_tokens=40)
    for _ in range(200):
        scheduler.step()
    assert not scheduler.requests
    counters = read(attachment).snapshot.counters
    assert counters.submitted == 4
    assert counters.preemptions_recompute > 0
    assert counters.query_tokens >= 4 * 48
    assert counters.query_blocks == counters.query_tokens // 16
    assert counters.evictions > 0
    for name in ("finished", "allocated_blocks", "failures_capacity", "integrity_faults", "faults_by_law", "injected"):
        assert getattr(counters, name) is None


def test_every_panel_and_metric_takes_what_is_unknown(make: Make, attach: Callable[..., Attachment]) -> None:
    scheduler = make(events=False)
    request_of(scheduler, "one", list(range(40)))
    scheduler.step()
    attachment = attach()
    view = attachment.poll(TIMEOUT_S)
    for content in CONTENTS.values():
        assert content(view, Asked(selected=1))
    families = {family.name: family for family in ViewCollector(lambda: view).collect()}
    assert families["kvtop_requests_submitted"].samples[0].value == 1
    for name in ("kvtop_evictions", "kvtop_allocated_blocks", "kvtop_integrity_faults", "kvtop_injected_faults"):
        assert name not in families
    names = {family.name for family in VllmCollector(lambda: [view]).collect()}
    assert "vllm:kv_cache_usage_perc" in names
    assert "vllm:generation_tokens" not in names


@pytest.mark.usefixtures("at_every_reading")
def test_blocks_given_back_and_a_reset_are_seen(make: Make, attach: Callable[..., Attachment]) -> None:
    scheduler = make()
    attachment = attach()
    request_of(scheduler, "one", list(range(40)), max_tokens=2)
    scheduler.step()
    before = read(attachment)
    for _ in range(3):
        scheduler.step()
    after = read(attachment)
    assert before.device is not None
    assert after.device is not None
    assert after.snapshot.phase == "idle"
    cached = after.device.state == BlockState.CACHED
    assert cached.sum() == 2
    assert set(after.device.last_used[cached].tolist()) == {after.snapshot.step}
    assert scheduler.reset_prefix_cache()
    device = read(attachment).device
    assert device is not None
    assert (device.state[1:] == BlockState.FREE).all()


def test_nothing_can_be_done_from_here(make: Make) -> None:
    make()
    attachment = open_target("local:vllm", allow_operations=True)
    try:
        assert {"operations", "events", "host-tier"} == set(attachment.source.missing)
        plan = attachment.operations.plan(Resize(32))
        assert plan.refusal == attachment.source.missing["operations"]
        assert not attachment.operations.apply(Resize(32)).ok
    finally:
        attachment.close()


@pytest.mark.parametrize(("value", "rank", "name"), [("prod-7", None, "prod-7"), ("true", 1, "vllm-dp1")])
@pytest.mark.parametrize("release", RELEASES)
def test_the_name_is_the_one_asked_for_with_the_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch, release: str, value: str, rank: int | None, name: str
) -> None:
    monkeypatch.setenv("KVTOP_PUBLISH", value)
    make(release, rank=rank)
    assert is_listening(name)


def test_readings_are_as_rare_as_their_cost_demands(make: Make, attach: Callable[..., Attachment]) -> None:
    now_s, spent_s = 0.0, 0.0
    scheduler = make()
    publisher = publisher_of(scheduler)
    publisher._clock, publisher._thread_clock = lambda: now_s, lambda: spent_s
    publisher._read_s = publisher._began_s = 0.0
    attachment = attach()
    assert read(attachment).snapshot.num_running == 0
    publisher._cost_s = 0.1
    request_of(scheduler, "one", list(range(40)))
    scheduler.step()

    def running_at(seconds: float) -> int:
        nonlocal now_s
        now_s = seconds
        return read(attachment).snapshot.num_running

    assert running_at(9.9) == 0
    spent_s = 0.05  # sending that answer
    assert running_at(10.1) == 0
    assert running_at(14.9) == 0
    spent_s = 5.0  # answers to any number of consoles put a reading off by its own cost at most
    assert running_at(19.9) == 0
    assert running_at(20.1) == 1
    assert publisher._reading_due_s() >= 20.15


# ---- when it keeps away


@pytest.mark.parametrize("value", [None, "", "0", "off", "False"])
def test_it_is_off_unless_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("KVTOP_PUBLISH")
    else:
        monkeypatch.setenv("KVTOP_PUBLISH", value)
    assert not is_wrapped(make())
    assert not is_listening("vllm")


def test_importing_it_loads_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import kvtop.plugins.vllm as plugin; plugin.register();"
        "print(sorted(name.partition('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "textual", "numpy", "msgspec", "allocator", "zmq"} & set(eval(loaded))


@pytest.mark.parametrize("release", ["0.13.9", "0.34.0", "1.0", "dev", "0.x"])
def test_a_release_that_was_not_tried_is_left_alone(make: Make, caplog: pytest.LogCaptureFixture, release: str) -> None:
    scheduler = make(release)
    assert not is_wrapped(scheduler)
    assert not hasattr(type(scheduler).__init__, "_kvtop")
    assert not is_listening("vllm")
    (line,) = lines(caplog)
    assert release in line
    assert "0.14 to 0.33" in line


def test_a_pool_of_another_kind_is_left_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Elastic(BaseScheduler):
        def __init__(self) -> None:
            super().__init__()
            del self.kv_cache_manager.block_pool.free_block_queue

    with imported("0.32.0") as _:
        sys.modules[MODULE].Scheduler = Elastic  # type: ignore[attr-defined]
        plugin.register()
        scheduler = Elastic()
    assert not is_wrapped(scheduler)
    (line,) = lines(caplog)
    assert "of another kind" in line


def test_a_name_that_is_taken_costs_a_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make()
    second = make()
    assert not is_wrapped(second)
    assert "an engine of that name runs already" in lines(caplog)[-1]
    second.step()


def test_the_class_is_wrapped_when_it_is_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path
    for part in MODULE.split(".")[:-1]:
        package = package / part
        package.mkdir()
        (package / "__init__.py").write_text("__version__ = '0.32.0'\n")
    (package / "scheduler.py").write_text("from fake_vllm import scheduler_class\nScheduler = scheduler_class()\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    plugin.register()
    assert len(sys.meta_path) == len(finders) + 1
    try:
        module = __import__(MODULE, fromlist=["Scheduler"])
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert module.__spec__.loader is module.__loader__
        scheduler = module.Scheduler()
        assert is_wrapped(scheduler)
        scheduler.shutdown()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    assert sys.meta_path == finders


# ---- how it fails


def break_blocks(scheduler: BaseScheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler.kv_cache_manager.block_pool, "blocks", [object()] * 64)


def break_digest(scheduler: BaseScheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vllm_pool, "key64", lambda block_hash: 1 / 0)


def break_map(scheduler: BaseScheduler, patch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(BlockMapWriter, "publish", full)


@pytest.mark.parametrize("breaks", [break_blocks, break_digest, break_map])
@pytest.mark.parametrize("engine_steps", [False, True])
@pytest.mark.usefixtures("at_every_reading")
def test_a_failure_ends_the_publication_and_not_the_engine(
    make: Make,
    attach: Callable[..., Attachment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[BaseScheduler, pytest.MonkeyPatch], None],
    engine_steps: bool,
) -> None:
    scheduler = make()
    attachment = attach()
    assert attachment.poll(TIMEOUT_S).error is None
    request_of(scheduler, "long", list(range(40)), max_tokens=10**6)
    scheduler.step()
    with monkeypatch.context() as patch:
        breaks(scheduler, patch)
        with stepping(scheduler) if engine_steps else contextlib.nullcontext():
            view = attachment.poll(TIMEOUT_S)
    assert view.error is not None
    assert "the publication ended by itself" in view.error
    assert view.snapshot is not None
    until(lambda: not is_listening("vllm"))
    assert not is_wrapped(scheduler)
    assert "the engine is not affected" in lines(caplog)[-1]
    scheduler.step()
    assert scheduler.running


def test_what_is_counted_may_be_of_another_kind(
    make: Make, attach: Callable[..., Attachment], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make()
    manager = scheduler.kv_cache_manager
    manager.stats = object()  # type: ignore[assignment]
    scheduler.step()
    scheduler.step()
    assert len([line for line in lines(caplog) if "queries" in line]) == 1
    read(attach())


def test_the_end_of_the_engine_is_the_end_of_the_publication(make: Make, attach: Callable[..., Attachment]) -> None:
    scheduler = make()
    attachment = attach()
    read(attachment)
    scheduler.shutdown()
    assert scheduler.is_shut_down
    assert not is_listening("vllm")
    assert attachment.poll(TIMEOUT_S).error is not None


def test_an_engine_that_nobody_refers_to_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    with imported("0.32.0") as scheduler_class:
        plugin.register()
        scheduler = scheduler_class()
    assert is_listening("vllm")
    gone = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert gone() is None
    until(lambda: not is_listening("vllm"))


def test_an_engine_that_was_started_anew_is_attached_again(make: Make, attach: Callable[..., Attachment]) -> None:
    scheduler = make()
    attachment = attach()
    read(attachment)
    scheduler.shutdown()
    assert attachment.poll(TIMEOUT_S).error is not None
    request_of(make(num_blocks=32), "other", list(range(16)))
    view = attachment.poll(TIMEOUT_S)
    assert view.error is None
    assert view.device is not None
    assert view.device.numbers.total == 32
    assert [event.text for event in view.events if "anew" in event.text]


def test_a_link_that_was_closed_is_not_renewed(make: Make) -> None:
    make()
    link = NamedEngine("vllm")
    link.close()
    assert not link.renew()
    with pytest.raises(SourceError, match="closed"):
        _ = link.map_fd


# ---- helpers


class stepping:
    """Lets a scheduler take steps in a thread until the block ends."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(scheduler,), daemon=True)

    def _run(self, scheduler: BaseScheduler) -> None:
        try:
            while not self._stop.is_set():
                scheduler.step()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)
        assert self._error is None


@pytest.mark.usefixtures("at_every_reading")
def test_readings_of_an_engine_that_steps_are_of_the_ends_of_steps(
    make: Make, attach: Callable[..., Attachment]
) -> None:
    scheduler = make()
    attachment = attach()
    for i in range(3):
        request_of(scheduler, str(i), [i] * 40, max_tokens=10**6)
    del scheduler.kv_cache_manager.log_stats
    with stepping(scheduler):
        for _ in range(40):
            seen = read(attachment)
            assert seen.device is not None
            tables = sum(row.num_blocks for row in seen.snapshot.sequences)
            assert int(seen.device.ref_count.astype(np.int64).sum()) == tables


def is_wrapped(scheduler: BaseScheduler) -> bool:
    return any(name in vars(scheduler) for name in ("schedule", "update_from_output", "shutdown", "add_request"))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def publisher_of(scheduler: BaseScheduler) -> PoolPublisher:
    """Return what publishes a scheduler's pool."""
    found = [thing for thing in gc.get_objects() if type(thing) is PoolPublisher]
    (publisher,) = [thing for thing in found if thing._pool._scheduler() is scheduler]  # type: ignore[attr-defined]
    return publisher
