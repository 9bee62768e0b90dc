"""``kvtop ctl``: a subcommand for every command, its arguments, what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import socket
import tempfile
import threading
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from published import ThreadedDaemon, own_directories
from scripted_http import ScriptedHttp, answer

from allocator.commands import (
    Annotate,
    Cancel,
    Command,
    Compact,
    EvictCached,
    InjectFault,
    Pause,
    Pin,
    Preempt,
    Resize,
    SetAutoCompaction,
    SetLoad,
    SetPolicy,
    SetSpeed,
    SetWatermark,
    Step,
    SubmitLoad,
    Unpin,
    VerifyContents,
    command_name,
)
from kvtop.audit import audit_path
from kvtop.cli import run
from kvtop.ctl import CtlGroup
from kvtop.serving_commands import (
    AnyCommand,
    EraseSlot,
    PauseGeneration,
    ReleaseMemory,
    ResetPrefixCache,
    SaveSlot,
    ServingCommand,
    SetMemoryLimit,
    Sleep,
    Wake,
)


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


@pytest.fixture
def daemon() -> Iterator[ThreadedDaemon]:
    d = ThreadedDaemon("t")
    yield d
    d.close()


def sent(line: str, monkeypatch: pytest.MonkeyPatch) -> AnyCommand:
    """Return the command that a command line makes."""
    commands: list[AnyCommand] = []
    monkeypatch.setattr("kvtop.ctl._send", lambda aim, command: commands.append(command) or 0)
    assert run(["ctl", *line.split()]) == 0
    return commands[0]


LINES: list[tuple[str, AnyCommand]] = [
    ("pause", Pause()),
    ("step", Step(1)),
    ("step 12", Step(12)),
    ("speed 2.5", SetSpeed(2.5)),
    ("speed max", SetSpeed(None)),
    ("submit 100 20", SubmitLoad(100, 20, 1)),
    ("submit 100 20 --count 3", SubmitLoad(100, 20, 3)),
    ("cancel 7", Cancel(7)),
    ("preempt 7 --mode recompute", Preempt(7, "recompute")),
    ("compact", Compact()),
    ("compact longest-run --run-blocks 9 --max-moves 4", Compact("longest-run", 9, 4)),
    ("defrag by-sequence", Compact("by-sequence")),
    ("resize 80", Resize(80)),
    ("evict", EvictCached(None)),
    ("evict 5", EvictCached(5)),
    ("pin 1 2 3", Pin((1, 2, 3))),
    ("pin 3 7-9", Pin((3, 7, 8, 9))),
    ("unpin 4-4", Unpin((4,))),
    ("set-load 2 --size-scale 0.5", SetLoad(2.0, 0.5)),
    ("set-load --size-scale 0.5", SetLoad(None, 0.5)),
    ("set-policy sjf", SetPolicy("sjf")),
    ("set-watermark 0.2", SetWatermark(0.2)),
    ("set-auto-compaction auto --threshold-ratio 0.3", SetAutoCompaction("auto", 0.3)),
    ("verify", VerifyContents()),
    ("annotate slow", Annotate("slow")),
    ("inject-fault slow-copy --count 2 --seconds 0.5", InjectFault("slow-copy", 2, 0.5)),
    ("reset-prefix-cache", ResetPrefixCache()),
    ("reset-prefix-cache --running", ResetPrefixCache(True)),
    ("sleep", Sleep()),
    ("sleep 2 --mode abort", Sleep(2, "abort")),
    ("wake", Wake()),
    ("wake weights kv_cache", Wake(("weights", "kv_cache"))),
    ("pause-generation retract", PauseGeneration("retract")),
    ("release-memory", ReleaseMemory()),
    ("release-memory kv_cache weights", ReleaseMemory(("kv_cache", "weights"))),
    ("erase-slot 3", EraseSlot(3)),
    ("save-slot 3 a_1.bin", SaveSlot(3, "a_1.bin")),
    ("set-memory-limit 2048", SetMemoryLimit(2048)),
]


@pytest.mark.parametrize(("line", "command"), LINES, ids=[line for line, _ in LINES])
def test_a_line_makes_its_command(line: str, command: AnyCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(line, monkeypatch) == command


def test_every_command_has_a_subcommand_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    group = CtlGroup("ctl")
    names = group.list_commands(click.Context(group))
    assert len(names) == len(set(names)) == len(typing.get_args(Command)) + len(typing.get_args(ServingCommand)) + 1
    for name in [*names, "defrag"]:
        assert run(["ctl", name, "--help"]) == 0
        out = capsys.readouterr().out
        assert "Usage: kvtop ctl " + name in out
        assert "``" not in out


BAD = [
    ("reboot", "ctl reboot: no such command; one of pause, resume"),
    ("step 1.5", "steps 1.5: a whole number"),
    ("step 1_0", "steps 1_0: a whole number"),
    ("speed fast", "speed fast: a number, or max"),
    ("compact sideways", "goal sideways: one of pack-low, longest-run, by-sequence"),
    ("compact --max-moves x", "--max-moves x: a whole number"),
    ("inject-fault earthquake", "kind earthquake: one of failing-copy"),
    ("cancel", "missing argument 'SEQ_ID'"),
    ("pin", "missing argument 'BLOCK_IDS...'"),
    ("pin 3 x", "pin x: block ids, such as 4 10-20"),
    ("pin 3 7-", "pin 7-: block ids, such as 4 10-20"),
    ("pin -- -5", "pin -5: block ids, such as 4 10-20"),
    ("pin 1_0", "pin 1_0: block ids"),
    ("unpin 12-7", "unpin 12-7: a range begins with its lower end, such as 7-12"),
    ("pin 0-99999", "pin 0-99999: at most 10000 blocks"),
    ("pause now", "got unexpected extra argument (now)"),
    ("", "missing command"),
    ("--to t", "missing command"),
    ("--timeout 0 pause", "--timeout 0: a number of seconds above 0"),
    ("--to a/b pause", "--to a/b: an engine's name is 1 to 40"),
    ("--to ../../etc/passwd pause", "--to ../../etc/passwd: an engine's name"),
    ("sleep 7", "sleep: level: a whole number, at most 2"),
    ("sleep deep", "level deep: a whole number"),
    ("pause-generation softly", "mode softly: one of keep, wait, abort, retract"),
    ("wake up", "tags up: one of weights, kv_cache, scheduling"),
    ("save-slot 1 ../a", "save-slot: filename: letters and digits, with . _ - between them"),
    ("erase-slot -- -1", "erase-slot: slot_id: a whole number, at least 0"),
    ("--yes pause", "--yes, --token-file, --ca-file and --insecure: with --to http(s)://HOST:PORT only"),
    ("--insecure --to t pause", "--yes, --token-file, --ca-file and --insecure: with --to"),
    ("--to http:// wake", "http://: an address is http(s)://HOST:PORT"),
    ("--to http://h:1 --token-file /nowhere wake", "--token-file /nowhere: cannot be read"),
    ("--to https://h:1 --ca-file /nowhere wake", "--ca-file /nowhere: cannot be used"),
]


@pytest.mark.parametrize(("line", "text"), BAD, ids=[line or "nothing" for line, _ in BAD])
def test_a_wrong_request_is_one_line_and_exit_code_2(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ctl", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {text}")
    assert err.count("\n") == 1


def test_without_an_engine_the_exit_code_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("pause", "--to t pause", "--to local:t pause", "snapshot"):
        assert run(["ctl", *line.split()]) == 3
        assert "kvtop run --publish NAME starts one" in capsys.readouterr().err


def test_a_dry_run_changes_nothing(daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ctl", "pause"]) == 0
    assert run(["ctl", "--dry-run", "resize", "80"]) == 0
    assert "would grow from 64 to 80 blocks" in capsys.readouterr().out
    assert daemon.engine.manager.device.num_blocks == 64
    assert run(["ctl", "--json", "--dry-run", "resize", "80"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["engine"], told["outcome"], told["plan"]["refusal"]) == ("t", None, None)
    assert len(audit_path().read_text().splitlines()) == 1  # the pause


def test_evicting_without_a_number_says_that_it_is_all(
    daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ctl", "evict", "--help"]) == 0
    assert "without a number, all cached blocks" in " ".join(capsys.readouterr().out.split())
    assert run(["ctl", "pause"]) == 0
    cached = daemon.engine.manager.device.num_cached
    capsys.readouterr()
    assert run(["ctl", "--dry-run", "evict"]) == 0
    assert f"would evict all cached blocks ({cached})" in capsys.readouterr().out
    assert run(["ctl", "evict"]) == 0
    assert capsys.readouterr().out == f"all cached blocks ({cached}) evicted\n"
    assert run(["ctl", "--dry-run", "evict", "1"]) == 0
    assert "would evict 0 cached blocks" in capsys.readouterr().out


def test_done_refused_and_failed_have_their_codes(daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ctl", "--to", "local:t", "resize", "80"]) == 0
    assert capsys.readouterr().out.startswith("pool grown from 64 to 80 blocks")
    assert run(["ctl", "cancel", "99999"]) == 2
    assert capsys.readouterr().err == "kvtop: cancel: no sequence 99999\n"
    assert run(["ctl", "--json", "cancel", "99999"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == {"type": "Cancel", "seq_id": 99999}
    assert (told["plan"]["refusal"], told["outcome"]) == ("no sequence 99999", None)
    assert run(["ctl", "inject-fault", "leaked-reference"]) == 0
    capsys.readouterr()
    assert run(["ctl", "verify"]) == 1
    assert "law" in capsys.readouterr().err


def test_the_audit_log_tells_who_did_what(daemon: ThreadedDaemon) -> None:
    assert run(["ctl", "evict", "1"]) in (0, 1, 2)
    assert run(["ctl", "pause"]) == 0
    entry = json.loads(audit_path().read_text().splitlines()[-1])
    assert set(entry) == {"time", "engine", "pid", "uid", "command", "plan", "outcome", "error", "program"}
    assert (entry["command"], entry["plan"]["summary"]) == ({"type": "Pause"}, "stop stepping")
    assert audit_path().stat().st_mode & 0o077 == 0


def test_a_snapshot_for_people_and_for_scripts(daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ctl", "snapshot"]) == 0
    assert "device: 64 blocks" in capsys.readouterr().out
    assert run(["ctl", "--json", "snapshot"]) == 0
    told = json.loads(capsys.readouterr().out)
    numbers = told["tiers"]["device"]
    assert numbers["free"] + numbers["cached"] + numbers["active"] + numbers["reserved"] == numbers["total"] == 64
    assert told["snapshot"]["counters"]["integrity_faults"] == 0


def test_the_engine_must_be_named_where_there_are_several(
    daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ThreadedDaemon("u")
    assert run(["ctl", "pause"]) == 2
    assert "--to: several engines are published: t (pid" in capsys.readouterr().err
    assert run(["ctl", "--to", "u", "pause"]) == 0
    other.close()


def test_command_names_are_those_of_the_types() -> None:
    assert command_name(SetAutoCompaction) == command_name(SetAutoCompaction("off")) == "set-auto-compaction"


# A server that is not ours ------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Iterator[ScriptedHttp]:
    """A llama.cpp server with a slot that holds something until it is erased."""

    def erase(connection: socket.socket, over: threading.Event) -> None:
        server.answers["/slots"] = answer('[{"id":0,"n_ctx":100,"is_processing":false,"n_prompt_tokens":0}]')
        connection.sendall(answer('{"id_slot":0,"n_erased":42}'))

    server = ScriptedHttp(
        {
            "/metrics": answer("llamacpp:requests_processing 0\n"),
            "/slots": answer('[{"id":0,"n_ctx":100,"is_processing":false,"n_prompt_tokens":42}]'),
            "/slots/0?action=none": answer("Invalid action", status="400 Bad Request"),
            "/slots/0?action=erase": erase,
        }
    )
    yield server
    server.close()


def test_a_server_is_changed_only_when_somebody_said_yes(
    llama: ScriptedHttp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ["ctl", "--to", llama.url]
    assert run([*to, "--dry-run", "erase-slot", "0"]) == 0
    assert capsys.readouterr().out == "would erase slot 0\n  tokens in the slot: 42 → 0\n"
    assert run([*to, "erase-slot", "0"]) == 2
    assert "--yes is missing" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert run([*to, "erase-slot", "0"]) == 2
    said = capsys.readouterr().err
    assert "would erase slot 0" in said
    assert "erase-slot: left undone" in said
    assert "/slots/0?action=erase" not in llama.paths()
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run([*to, "erase-slot", "0"]) == 0
    assert capsys.readouterr().out == "observed: slot 0: 42 → 0 tokens; the server says: 42 tokens erased\n"
    (entry,) = [json.loads(line) for line in audit_path().read_text().splitlines()]
    assert (entry["engine"], entry["command"]["type"]) == (llama.url.removeprefix("http://"), "EraseSlot")


def test_a_server_is_told_of_in_json(llama: ScriptedHttp, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["ctl", "--to", llama.url, "--yes", "--json"]
    assert run([*to, "erase-slot", "0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"]["ok"], told["outcome"]["is_seen"]) == (True, True)
    assert run([*to, "erase-slot", "9"]) == 2
    assert json.loads(capsys.readouterr().out)["plan"]["refusal"] == "there is no slot 9: its slots are 0 to 0"
    assert run([*to, "compact"]) == 2
    assert json.loads(capsys.readouterr().out)["plan"]["refusal"] == "not offered by this engine"


def test_a_server_that_is_not_there_has_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run(["ctl", "--to", f"http://127.0.0.1:{port}", "--yes", "wake"]) == 3
    assert "nothing listens there" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True
