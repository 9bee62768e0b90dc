"""One suite for every way to attach: in the engine's process, and over its socket."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fake_engine import until

import kvtop
from allocator.clients import MAX_CALL_TOKENS, MAX_CLIENT_SEQUENCES, MAX_CLIENTS
from allocator.commands import Cancel, Compact, Fork, Resize, SwapOut
from allocator.config import EngineConfig
from allocator.engine import Engine
from allocator.errors import AllocatorError
from allocator.geometry import GEOMETRIES
from allocator.plans import CopyJob
from allocator.torch_storage import TorchStorage
from kvtop.client import Client, OutOfBlocks, Refused, SequenceGone, SourceError, StorageError
from kvtop.runner import EngineRunner
from kvtop.server import PublishedEngine

SIZE = 4


class Fragile(TorchStorage):
    """Fails to copy when told to."""

    fails = False

    def copy(self, job: CopyJob) -> int:
        if self.fails:
            raise StorageError("told to fail")
        return super().copy(job)


@dataclass
class Harness:
    """An engine of 32 blocks of 4 tokens, and a way to attach to it."""

    engine: Engine
    storage: Fragile
    attach: Callable[..., Client]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture(params=["engine", "runner", "name", "path"])
def harness(request: pytest.FixtureRequest, runtime: Path) -> Iterator[Harness]:
    storage = Fragile(GEOMETRIES["tiny"], SIZE, "cpu", 32)
    config = EngineConfig(num_blocks=32, block_size=SIZE, num_swap_blocks=8, stamp=True, device="cpu")
    engine = Engine(config, storage=storage)
    published = None
    target: object = engine
    if request.param == "runner":
        target = EngineRunner(engine)
    elif request.param in ("name", "path"):
        published = PublishedEngine("test", engine.clients)
        target = "local:test" if request.param == "name" else published.path
    opened: list[Client] = []

    def attach(**settings: object) -> Client:
        client = kvtop.attach(target, **{"name": "tester", "timeout_s": 0.0, **settings})  # type: ignore[arg-type]
        opened.append(client)
        return client

    yield Harness(engine, storage, attach)
    for client in opened:
        client.close()
    if published is not None:
        published.close()
    engine.check()
    assert engine.manager.device.num_active == 0
    engine.close()


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 31, count).tolist()


def test_a_sequence_from_prompt_to_release(harness: Harness) -> None:
    with harness.attach().sequence(tokens(1, 10)) as s:
        assert (s.num_tokens, s.hit_tokens, len(s.table())) == (10, 0, 3)
        s.append(tokens(2, 7))
        assert (s.num_tokens, len(s.table())) == (17, 5)
        s.append([])
        assert s.num_tokens == 17
        harness.engine.check()
        assert harness.engine.manager.device.num_active == 5
    assert harness.engine.manager.device.num_active == 0
    counters = harness.engine.counters
    assert (counters.submitted, counters.finished, counters.prompt_tokens, counters.generated_tokens) == (1, 1, 10, 7)
    assert counters.peak_active == 5


def test_prefixes_are_shared_between_clients(harness: Harness) -> None:
    first, second = harness.attach(), harness.attach()
    prompt = tokens(1, 10)
    a = first.sequence(prompt)
    a.append(tokens(2, 2))  # fills the third block
    b = second.sequence(prompt)
    assert b.hit_tokens == 8
    assert b.table()[:2].tolist() == a.table()[:2].tolist()
    # What one client generated another finds in its prompt; the last token is always computed.
    c = second.sequence(prompt + tokens(2, 2))
    assert c.hit_tokens == 8
    assert c.table().tolist() == a.table().tolist()
    assert second.sequence([*prompt, *tokens(2, 2), 5]).hit_tokens == 12
    counters = harness.engine.counters
    assert (counters.query_blocks, counters.hit_blocks) == (2 + 2 + 3 + 3, 0 + 2 + 2 + 3)
    harness.engine.check()


def test_a_salt_keeps_tenants_apart(harness: Harness) -> None:
    client = harness.attach()
    client.sequence(tokens(1, 8)).release()
    assert client.sequence([*tokens(1, 8), 1], salt=b"mine").hit_tokens == 0
    assert client.sequence([*tokens(1, 8), 1]).hit_tokens == 8


def test_a_fork_shares_until_it_is_written(harness: Harness) -> None:
    client = harness.attach()
    parent = client.sequence(tokens(1, 10))
    child = parent.fork(label="second thought")
    assert child.seq_id != parent.seq_id
    assert (child.num_tokens, child.table().tolist()) == (10, parent.table().tolist())
    assert harness.engine.manager.device.num_active == 3
    child.append(tokens(2, 3))
    parent.append(tokens(3, 1))
    assert child.table()[:2].tolist() == parent.table()[:2].tolist()
    assert child.table()[2] != parent.table()[2]
    assert harness.engine.counters.copy_on_write_blocks == 1
    harness.engine.check()  # contents too: each reads back its own
    parent.release()
    child.append(tokens(4, 6))
    harness.engine.check()


def test_a_failed_copy_changes_nothing(harness: Harness) -> None:
    client = harness.attach()
    parent = client.sequence(tokens(1, 10))
    child = parent.fork()
    harness.storage.fails = True
    with pytest.raises(StorageError):
        child.append([1, 2, 3])
    harness.storage.fails = False
    child.refresh()
    assert (child.num_tokens, child.table().tolist()) == (10, parent.table().tolist())
    harness.engine.check()


def test_too_few_blocks_are_said_with_numbers(harness: Harness) -> None:
    client = harness.attach()
    s = client.sequence(tokens(1, 30 * SIZE))
    with pytest.raises(OutOfBlocks) as refused:
        s.append(tokens(2, 3 * SIZE))
    assert (refused.value.needed, refused.value.allocatable) == (3, 2)
    s.refresh()
    assert s.num_tokens == 30 * SIZE
    with pytest.raises(OutOfBlocks):
        client.sequence(tokens(3, 3 * SIZE))
    assert harness.engine.counters.failures_capacity == 1  # one shortage, however often it is tried
    s.append(tokens(2, 2 * SIZE))
    harness.engine.check()


def test_who_waits_gets_on_when_blocks_come_back(harness: Harness) -> None:
    client = harness.attach()
    holder = client.sequence(tokens(1, 30 * SIZE))
    taken: list[int] = []
    waiter = threading.Thread(target=lambda: taken.append(client.sequence(tokens(2, 20), timeout_s=30).num_tokens))
    waiter.start()
    until(lambda: harness.engine.clients.counts.failures_capacity == 1)
    holder.release()
    waiter.join(30)
    assert taken == [20]


def test_a_new_sequence_leaves_the_watermark(harness: Harness) -> None:
    harness.engine.watermark_ratio = 0.25
    client = harness.attach()
    s = client.sequence(tokens(1, 20 * SIZE))  # alone: waived
    with pytest.raises(OutOfBlocks):
        client.sequence(tokens(2, 5 * SIZE))
    client.sequence(tokens(2, 4 * SIZE))
    s.append(tokens(3, 8 * SIZE))


def test_it_is_shown_as_a_source_of_its_own(harness: Harness) -> None:
    s = harness.attach().sequence(tokens(1, 10), label="job 7")
    harness.engine.advance(1)
    snapshot = harness.engine.snapshot(phase="running", speed=None, steps_per_s=None)
    (row,) = snapshot.sequences
    assert snapshot.num_running == 1
    assert (row.seq_id, row.label, row.status) == (s.seq_id, f"client:{os.getpid()} tester job 7", "running")
    assert (row.num_prompt, row.num_tokens, row.num_target, row.num_blocks, row.runs) == (10, 10, None, 3, 1)
    arrays = harness.engine.arrays("device")
    assert arrays is not None
    assert (arrays.owner[s.table()] == row.row).all()
    assert harness.engine.holders(int(s.table()[1])) == (((s.seq_id, 1),), 1)
    table = harness.engine.table(s.seq_id)
    assert table is not None
    assert table.tolist() == s.table().tolist()
    assert [event.kind for event in snapshot.events] == ["note", "admit"]


def test_an_operator_cancels_and_nothing_else(harness: Harness) -> None:
    s = harness.attach().sequence(tokens(1, 10))
    engine = harness.engine
    for command in (Fork(s.seq_id), SwapOut(s.seq_id)):
        assert "an attached program's" in engine.apply(command).message
    assert engine.plan(Cancel(s.seq_id)).summary == (
        f"cancel sequence {s.seq_id} of client:{os.getpid()} tester: 3 blocks released"
    )
    assert engine.apply(Cancel(s.seq_id)).ok
    assert not engine.apply(Cancel(s.seq_id)).ok
    for use in (lambda: s.append([1]), s.fork, s.table, s.refresh):
        with pytest.raises(SequenceGone, match="cancelled by the operator"):
            use()
    s.release()  # the end of its `with` block raises nothing
    assert (engine.counters.cancelled, engine.counters.finished) == (1, 0)


def test_operators_move_blocks_under_it(harness: Harness) -> None:
    client = harness.attach()
    low, s = client.sequence(tokens(1, 6 * SIZE)), client.sequence(tokens(2, 4 * SIZE + 1))
    low.release()
    before = s.table().tolist()
    plan = harness.engine.plan(Compact("pack-low", None, None))
    assert plan.sequences == (s.seq_id,)
    assert harness.engine.apply(Compact("pack-low", None, None)).ok
    assert s.table().tolist() != before
    assert harness.engine.apply(Resize(10)).ok
    s.append(tokens(3, 3))
    harness.engine.check()


def test_the_last_reference_is_the_end(harness: Harness) -> None:
    client = harness.attach()
    kept = client.sequence(tokens(1, 10))
    client.sequence(tokens(2, 10))
    gc.collect()
    until(lambda: harness.engine.clients.num_sequences == 1)
    assert kept.num_tokens == 10


def test_a_thread_that_ends_leaves_nothing(harness: Harness) -> None:
    def work() -> None:
        s = harness.attach(name="worker").sequence(tokens(1, 10))
        s.append([1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    gc.collect()
    until(lambda: harness.engine.clients.num_sequences == 0)


def test_close_releases_everything(harness: Harness) -> None:
    with harness.attach() as client:
        s = client.sequence(tokens(1, 10))
        s.fork()
    until(lambda: harness.engine.clients.num_clients == 0)
    assert harness.engine.clients.num_sequences == 0
    client.close()
    s.release()
    with pytest.raises(Refused, match="closed"):
        client.sequence([1])
    with pytest.raises(Refused, match="closed"):
        s.append([1])


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "0 tokens: from 1"),
        ([-1], {}, "from 0 to 2147483647"),
        ([1 << 31], {}, "from 0 to 2147483647"),
        ([1.5], {}, "whole numbers"),
        (["a"], {}, "whole numbers"),
        ([[1], [2]], {}, "one row"),
        ([[1], [2, 3]], {}, "whole numbers"),
        (7, {}, "one row"),
        (np.zeros(MAX_CALL_TOKENS + 1, np.int32), {}, "250001 tokens"),
        ([1], {"label": "a\x1b[2J"}, "printable"),
        ([1], {"label": "x" * 81}, "at most 80"),
        ([1], {"salt": b"x" * 257}, "257 bytes"),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    harness: Harness, prompt: object, settings: dict[str, object], words: str
) -> None:
    client = harness.attach()
    with pytest.raises(Refused, match=words):
        client.sequence(prompt, **settings)  # type: ignore[arg-type]
    assert client.sequence([1]).num_tokens == 1  # and it goes on


def test_clients_and_sequences_are_bounded(harness: Harness) -> None:
    client = harness.attach()
    s = client.sequence([1])
    forks = [s.fork() for _ in range(MAX_CLIENT_SEQUENCES - 1)]
    with pytest.raises(Refused, match="1024 sequences"):
        s.fork()
    with pytest.raises(Refused, match="1024 sequences"):
        client.sequence([2])
    forks.pop().release()
    s.fork()
    others = [harness.attach() for _ in range(MAX_CLIENTS - 1)]
    with pytest.raises(Refused, match="64 programs"):
        harness.attach()
    others[0].close()
    until(lambda: harness.engine.clients.num_clients == MAX_CLIENTS - 1)
    harness.attach()


def test_one_client_cannot_touch_anothers(harness: Harness) -> None:
    s = harness.attach().sequence([1, 2, 3])
    stranger = harness.attach().sequence([4])
    stranger.seq_id = s.seq_id
    with pytest.raises(AllocatorError, match="no sequence"):
        stranger.append([5])
    assert s.num_tokens == 3


def test_the_engine_ends(harness: Harness) -> None:
    client = harness.attach()
    s = client.sequence([1])
    harness.engine.close()
    with pytest.raises((SequenceGone, SourceError)):
        s.append([2])
    with pytest.raises((Refused, SourceError)):
        client.sequence([3])
