"""The doctor's findings, of machines made up for the purpose."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvtop.cli.root import _read_file
from kvtop.doctor import Finding, file_finding, line, namesake_findings, run_doctor, stale_findings, terminal_findings


def _terminal(environment=None, *, is_terminal=True, size=(120, 40), encoding="utf-8"):
    environment = {"TERM": "xterm-256color"} if environment is None else environment
    found = terminal_findings(environment, is_terminal=is_terminal, size=size, encoding=encoding)
    return {f.what: f for f in found}


def test_a_good_terminal():
    found = _terminal({"TERM": "xterm-256color", "COLORTERM": "truecolor", "TMUX": "x"})
    assert {f.state for f in found.values()} == {"good"}
    assert found["colours"].found == "16 million"
    assert found["multiplexer"].found == "tmux"


@pytest.mark.parametrize(
    ("given", "what", "state", "words"),
    [
        ({"environment": {"TERM": "dumb"}}, "terminal", "problem", "TERM=dumb cannot draw"),
        ({"environment": {}}, "terminal", "problem", "(not set)"),
        ({"is_terminal": False}, "terminal", "missing", "none"),
        ({"size": (50, 12)}, "size", "problem", "50x12"),
        ({"encoding": "ascii"}, "characters", "missing", "drawn in ASCII"),
        ({"environment": {"TERM": "xterm"}}, "colours", "good", "16"),
        ({"environment": {"TERM": "xterm", "NO_COLOR": "1"}}, "colours", "good", "NO_COLOR"),
    ],
)
def test_a_terminal_with_something_missing(given, what, state, words):
    finding = _terminal(**given)[what]
    assert finding.state == state
    assert words in finding.found
    assert finding.advice or state == "good"


def _command(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "kvtop"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return folder


def test_another_command_of_the_same_name_is_found(tmp_path):
    ours, other = _command(tmp_path / "ours"), _command(tmp_path / "other")
    (finding,) = namesake_findings([str(other), str(ours)], ours)
    assert finding.state == "problem"
    assert str(other / "kvtop") in finding.found
    assert "kvtop-console" in finding.advice
    (finding,) = namesake_findings([str(ours), str(other)], ours)
    assert finding.state == "good"
    assert "before 1 other" in finding.found
    (finding,) = namesake_findings([str(tmp_path)], ours)
    assert finding.state == "missing"


def test_sockets_that_nobody_answers_on_are_found(tmp_path):
    assert next(stale_findings(tmp_path / "none")).state == "good"
    alive = socket.socket(socket.AF_UNIX)
    alive.bind(str(tmp_path / "alive.sock"))
    alive.listen()
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "ended.sock"))
    for name in ("alive", "killed"):
        (tmp_path / f"{name}.map").touch()
    try:
        (finding,) = stale_findings(tmp_path)
        assert finding.state == "stale"
        assert finding.found == "left by engines that have ended: ended, killed"
        assert finding.advice.startswith(f"rm {tmp_path / 'ended.sock'} {tmp_path / 'killed.map'}; ")
        assert run_doctor(as_json=False, findings=lambda: [finding]) == 0
    finally:
        alive.close()


def test_an_engine_too_busy_to_answer_is_not_dead(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtop.doctor._ANSWER_BOUND_S", 0.01)
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(tmp_path / "busy.sock"))
        busy.listen(0)
        first.connect(str(tmp_path / "busy.sock"))  # fills the queue
        (finding,) = stale_findings(tmp_path)
    assert (finding.state, finding.found) == ("good", "none is stale; 1 published engine")


def test_the_exit_code_tells_whether_something_is_wrong(capsys):
    good, bad = Finding("a", "good", "x"), Finding("b", "problem", "y\x1b", "do z")
    assert run_doctor(as_json=False, findings=lambda: [good, Finding("c", "missing", "w")]) == 0
    assert run_doctor(as_json=False, findings=lambda: [good, bad]) == 1
    assert all(row.isprintable() for row in capsys.readouterr().out.splitlines())
    assert line(bad).endswith("→ do z")
    assert run_doctor(as_json=True, findings=lambda: [bad]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["state"] == "problem"


def test_which_configuration_file_is_in_use(tmp_path):
    there, bad = tmp_path / "kvtop.toml", tmp_path / "bad.toml"
    there.write_text('blocks = 64\ntheme = "light"\n[keys]\ncompact = "f9"\n')
    found = file_finding(lambda: _read_file(str(there)))
    assert (found.state, found.found) == ("good", f"{there}: 2 options [keys]")
    bad.write_text('[keys]\ncompakt = "K"\n')
    found = file_finding(lambda: _read_file(str(bad)))
    assert found.state == "problem"
    assert found.found == f"{bad}:2: keys.compakt: no such action; did you mean compact?"
    bad.write_text("blocks = 0\n")
    assert file_finding(lambda: _read_file(str(bad))).found.startswith(f"{bad}:1: blocks 0: a whole number")


def test_no_configuration_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = file_finding(lambda: _read_file(None))
    assert found.state == "missing"
    assert str(tmp_path / "kvtop" / "kvtop.toml") in found.found
