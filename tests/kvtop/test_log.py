"""Lines for people and for machines, how many complaints are written, and the audit log's file."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from fake_engine import ManualClock

from allocator.commands import Pause, Pin
from allocator.plans import Outcome, Plan
from kvtop import audit
from kvtop.audit import AuditLog, AuditTail
from kvtop.cli import run
from kvtop.log import Log


def test_a_line_for_people() -> None:
    stream = io.StringIO()
    Log(stream=stream).info("metrics on http://127.0.0.1:1", port=1)
    assert stream.getvalue() == "kvtop: metrics on http://127.0.0.1:1\n"


def test_a_line_for_machines() -> None:
    stream = io.StringIO()
    log = Log("json", stream, now=lambda: 0.25)
    log.warning("überholt", step=3)
    log.error('a "quoted" text')
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [
        {"time": "1970-01-01T00:00:00.250+00:00", "level": "warning", "text": "überholt", "step": 3},
        {"time": "1970-01-01T00:00:00.250+00:00", "level": "error", "text": 'a "quoted" text'},
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_told_cannot_steer_a_terminal_or_start_a_line(form: str) -> None:
    stream = io.StringIO()
    Log(form, stream).warning("evil\nkvtop: all is well\x1b[2J\r\u202e")  # type: ignore[arg-type]
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().rstrip("\n").isprintable()


def test_complaints_are_bounded_and_counted() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log = Log(stream=stream, clock=clock)
    for number in range(1000):
        log.complain(f"bad connection {number}")
    assert len(stream.getvalue().splitlines()) == 20
    clock.now_s += 61
    log.complain("one more")
    assert stream.getvalue().splitlines()[20:] == [
        "kvtop: 980 more complaints about connections were left out",
        "kvtop: one more",
    ]


def test_a_reader_that_is_gone_is_no_failure() -> None:
    stream = io.StringIO()
    stream.close()
    Log(stream=stream).info("nobody listens")


def test_audit_lines_are_whole_and_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audit.jsonl"
    log = AuditLog(path, now=lambda: 0.0)
    log.write("t", (12, 34), Pin((1, 2)), Plan("pin"), Outcome(True, "2 blocks pinned"))
    log.write("t", (None, None), Pause(), None, None, "no answer")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["command"] == {"type": "Pin", "block_ids": [1, 2]}
    assert (lines[0]["pid"], lines[0]["uid"], lines[0]["outcome"]["message"]) == (12, 34, "2 blocks pinned")
    assert (lines[1]["plan"], lines[1]["outcome"], lines[1]["error"]) == (None, None, "no answer")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_audit_log_keeps_one_file_before_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 1000)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for _ in range(50):
        log.write("t", (1, 1), Pause(), Plan("stop stepping"), Outcome(True, "paused"))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    assert all(found.stat().st_size <= 1000 for found in tmp_path.iterdir())


def test_an_audit_log_that_cannot_be_written_is_told_and_no_link_is_followed(tmp_path: Path) -> None:
    said: list[str] = []
    victim = tmp_path / "victim"
    victim.touch()
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "file").touch()
    for path in (tmp_path / "link", tmp_path / "file" / "audit.jsonl"):
        AuditLog(path, said.append).write("t", (1, 1), Pause(), None, None)
    assert len(said) == 2
    assert all("cannot be written" in text for text in said)
    assert os.path.getsize(victim) == 0


@pytest.mark.parametrize(
    "args",
    [
        ["run", "--blocks", "x", "--log-format", "json"],
        ["run", "--log-format=json", "--trace", "nowhere.csv"],
        ["check", "--log-format", "json", "--watermark", "7"],
        ["attach", "nonsense://x", "--log-format", "json", "--headless", "--metrics-port", "0"],
    ],
)
def test_what_is_wrong_with_the_command_line_is_told_in_the_form_asked_for(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert said["level"] == "error"
    assert said["text"]


def test_a_reader_follows_the_audit_log_over_its_change_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    tail, log = AuditTail(path), AuditLog(path)
    tail.read()
    assert tail.entries == ()
    log.write("t", (os.getpid(), 1), Pause(), None, None)
    tail.read()
    assert [entry.engine for entry in tail.entries] == ["t"]
    assert tail.entries[0].program
    with path.open("ab") as file:
        file.write(b'{"broken": \n\xff\n{"time": "half')
    tail.read()
    assert (len(tail.entries), tail.num_bad) == (1, 2)
    path.rename(tmp_path / "audit.jsonl.1")
    log.write("u", (None, None), Pause(), None, None, "gone")
    tail.read()
    assert [entry.engine for entry in tail.entries] == ["t", "u"]


def test_a_reader_begins_near_the_end_and_keeps_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "TAIL_BYTES", 2000)
    monkeypatch.setattr(audit, "MAX_KEPT", 5)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for number in range(100):
        log.write(str(number), (1, 1), Pause(), None, None)
    tail = AuditTail(path)
    tail.read()
    assert tail.num_bad == 0
    assert [entry.engine for entry in tail.entries] == ["95", "96", "97", "98", "99"]


def test_a_log_that_may_not_be_read_has_no_lines(tmp_path: Path) -> None:
    tail = AuditTail(tmp_path)
    tail.read()
    assert tail.entries == ()
