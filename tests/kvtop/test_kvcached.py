"""A pool of kvcached: its numbers, its limit, and files that are none. The engine's side is played by the test."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path

import pytest

from allocator.commands import Pause
from kvtop.audit import AuditLog, audit_path
from kvtop.cli import run
from kvtop.errors import SourceError, UserError
from kvtop.model.observation import Focus
from kvtop.serving_commands import ResetPrefixCache, SetMemoryLimit
from kvtop.sources.kvcached import KvcachedOperations, KvcachedSource, PoolFile, pools
from kvtop.sources.remote.capabilities import READ_ONLY

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kvcached_vLLM_1").write_bytes(struct.pack("=3q", 4 * GIB, GIB, 64 << 20))
    return tmp_path


@pytest.fixture
def pool(folder: Path) -> PoolFile:
    return PoolFile("kvcached_vLLM_1", folder)


def numbers(folder: Path) -> tuple[int, ...]:
    return struct.unpack("=3q", (folder / "kvcached_vLLM_1").read_bytes())


def door(pool: PoolFile, folder: Path) -> KvcachedOperations:
    return KvcachedOperations(pool, AuditLog(folder / "audit.jsonl"))


def test_what_a_pool_tells(pool: PoolFile) -> None:
    facts = KvcachedSource(pool).read(Focus(), 1.0).facts
    (row,) = facts.rows
    assert (facts.kind, row.usage_ratio, row.limit_bytes) == ("kvcached", 0.25, 4 * GIB)
    assert (row.used_bytes, row.spare_bytes) == (GIB, 64 << 20)
    assert (row.running, row.total_blocks, row.hits) == (None, None, None)
    assert facts.refusal("set-memory-limit") == READ_ONLY
    assert KvcachedSource(pool, may_operate=True).read(Focus(), 1.0).facts.refusal("set-memory-limit") is None


def test_a_limit_is_planned_written_and_read_back(pool: PoolFile, folder: Path) -> None:
    operations = door(pool, folder)
    plan = operations.plan(SetMemoryLimit(2048))
    assert [(e.before, e.after) for e in plan.effects] == [(4 * GIB, 2 * GIB), (GIB, GIB), (64 << 20, None)]
    assert numbers(folder)[0] == 4 * GIB
    outcome = operations.apply(SetMemoryLimit(2048))
    assert (outcome.ok, outcome.is_seen) == (True, True)
    assert "the limit was 4.0 GiB and is 2.0 GiB" in outcome.message
    assert numbers(folder) == (2 * GIB, GIB, 64 << 20)
    (line,) = (folder / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["command"] == {"type": "SetMemoryLimit", "limit_mib": 2048}


def test_a_limit_below_what_is_used_says_what_that_means(pool: PoolFile, folder: Path) -> None:
    operations = door(pool, folder)
    assert "no new blocks until sequences end" in operations.plan(SetMemoryLimit(512)).summary
    outcome = operations.apply(SetMemoryLimit(512))
    assert (outcome.ok, outcome.is_seen) == (True, False)
    facts = KvcachedSource(pool).read(Focus(), 1.0).facts
    assert facts.rows[0].usage_ratio == 1.0
    assert any("no new blocks" in note for note in facts.notes)


def test_other_commands_are_refused(pool: PoolFile, folder: Path) -> None:
    for command in (ResetPrefixCache(), Pause()):
        assert door(pool, folder).plan(command).refusal == "not offered by this engine"
        assert not door(pool, folder).apply(command).ok
    assert numbers(folder)[0] == 4 * GIB


def test_a_pool_that_is_locked_is_waited_for_and_then_given_up(folder: Path) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    pool = PoolFile("kvcached_vLLM_1", folder, clock=lambda: now_s[0], sleep=sleep)
    fd = os.open(folder / "kvcached_vLLM_1", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert pool.read().used == GIB
        with pytest.raises(SourceError, match="keeps it locked"):
            door(pool, folder).apply(SetMemoryLimit(1))
        assert now_s[0] >= 1.0
        assert json.loads((folder / "audit.jsonl").read_text())["outcome"] is None
    finally:
        os.close(fd)
    assert numbers(folder)[0] == 4 * GIB


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 23,
        b"x" * 25,
        struct.pack("=3q", 0, 0, 0),
        struct.pack("=3q", -1, 0, 0),
        struct.pack("=3q", 5, -1, 0),
    ],
)
def test_a_file_that_is_no_pool_is_left_alone(folder: Path, content: bytes) -> None:
    (folder / "other").write_bytes(content)
    pool = PoolFile("other", folder)
    with pytest.raises(SourceError, match="no pool of kvcached"):
        pool.read()
    with pytest.raises(SourceError):
        pool.set_limit(GIB)
    assert (folder / "other").read_bytes() == content


def test_what_is_no_plain_file_is_not_opened(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "kvcached_vLLM_1")
    os.mkfifo(folder / "pipe")
    (folder / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(SourceError):
            PoolFile(name, folder).read()
    with pytest.raises(SourceError, match="there are kvcached_vLLM_1"):
        PoolFile("nowhere", folder).read()
    assert pools(folder) == ["kvcached_vLLM_1"]
    assert pools(folder / "nowhere") == []


@pytest.mark.parametrize("name", ["", "../passwd", "a/b", ".hidden", "a b", "x" * 81])
def test_names(name: str) -> None:
    with pytest.raises(UserError, match="NAME is that of a file"):
        PoolFile(name)


def test_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvtop.sources.kvcached.SHM", folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    to = ["ctl", "--to", "kvcached:kvcached_vLLM_1"]
    assert run([*to, "--dry-run", "set-memory-limit", "2048"]) == 0
    assert "would set the limit to 2.0 GiB" in capsys.readouterr().out
    assert run([*to, "--yes", "set-memory-limit", "2048"]) == 0
    assert "observed: the limit was 4.0 GiB and is 2.0 GiB" in capsys.readouterr().out
    assert numbers(folder)[0] == 2 * GIB
    assert len(audit_path().read_text().splitlines()) == 1
    assert run([*to, "set-memory-limit", "0"]) == 2
    assert "limit_mib: a whole number, at least 1" in capsys.readouterr().err
    assert run(["ctl", "--to", "kvcached:nowhere", "--yes", "set-memory-limit", "1"]) == 3
    assert "no pool nowhere" in capsys.readouterr().err
    assert run(["ctl", "--to", "kvcached:a/b", "--yes", "set-memory-limit", "1"]) == 2
    assert run([*to, "--token-file", "x", "--yes", "set-memory-limit", "1"]) == 2
    assert "are for http(s)://HOST:PORT" in capsys.readouterr().err
