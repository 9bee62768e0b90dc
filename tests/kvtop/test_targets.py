"""What ``kvtop attach`` may be given: words for what is wrong, the door that stays shut, and the one that opens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from published import ThreadedDaemon, own_directories
from recorded_runs import record

from allocator.commands import Pause
from kvtop.cli import run
from kvtop.errors import SourceError, UserError
from kvtop.targets import READ_ONLY, TARGET_KINDS, AttachOptions, open_target


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


@pytest.mark.parametrize("text", ["", "demo", "/run/x.sock", "LOCAL:a", "localhost:8000", "ftp://a"])
def test_what_is_no_target_is_told_what_one_is(text: str) -> None:
    with pytest.raises(UserError, match="local:NAME"):
        open_target(text)


def test_a_name_that_is_none() -> None:
    with pytest.raises(UserError, match="an engine's name is"):
        open_target("local:../x")


@pytest.mark.parametrize("text", ["local", "local:", "local:nobody"])
def test_nobody_there(text: str) -> None:
    with pytest.raises(SourceError, match="kvtop run --publish NAME starts one"):
        open_target(text)


def test_looking_is_free_and_acting_is_refused_at_the_door() -> None:
    daemon = ThreadedDaemon("t")
    attachment = open_target("local")
    view = attachment.poll(30)
    assert (view.error, view.source) == (None, "local:t")
    assert attachment.source.missing["operations"] == READ_ONLY
    assert attachment.operations.plan(Pause()).refusal == READ_ONLY
    assert not attachment.operations.apply(Pause()).ok
    attachment.close()
    attachment = open_target("local:t", allow_operations=True)
    assert attachment.poll(30).error is None
    assert "operations" not in attachment.source.missing
    assert attachment.operations.apply(Pause()).ok
    attachment.close()
    daemon.close()
    with pytest.raises(SourceError):
        open_target("local:t")


def test_several_engines_are_listed() -> None:
    daemons = [ThreadedDaemon(name) for name in ("b", "a")]
    with pytest.raises(UserError, match=r"local: several engines are published: a \(pid \d+\), b \(pid \d+\)"):
        open_target("local")
    for daemon in daemons:
        daemon.close()


def test_every_kind_is_told_apart_by_its_prefix() -> None:
    prefixes = [prefix for kind in TARGET_KINDS for prefix in kind.prefixes]
    assert not any(a != b and a.startswith(b) for a in prefixes for b in prefixes)


def test_a_recording_is_a_target(tmp_path: Path) -> None:
    path = tmp_path / "run.kvrec"
    path.write_bytes(record(100, every=10))
    attachment = open_target(f"recording:{path}")
    view = attachment.poll()
    assert (view.error, view.source) == (None, "run.kvrec")
    assert view.snapshot is not None
    attachment.close()
    with pytest.raises(UserError, match=r"missing\.kvrec: No such file"):
        open_target("recording:missing.kvrec")
    with pytest.raises(UserError, match="none is for a recording"):
        open_target(f"recording:{path}", options=AttachOptions(insecure=True))


def test_attach_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attach", "local:t"]) == 2
    assert "is not a terminal" in capsys.readouterr().err
