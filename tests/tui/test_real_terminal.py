"""The whole program in real terminals: every way out leaves the terminal as it was, the right code, and no process."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tmux_terminal import TmuxTerminal, has_tmux

pytestmark = pytest.mark.skipif(not has_tmux(), reason="no tmux is installed")

_ENGINE = ("--blocks", "256", "--geometry", "none")


@pytest.fixture
def make_terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TmuxTerminal]]:
    made: list[TmuxTerminal] = []

    def make(**how: object) -> TmuxTerminal:
        made.append(TmuxTerminal(tmp_path_factory.mktemp("t"), **how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for terminal in made:
        terminal.close()


def _console(terminal: TmuxTerminal) -> int:
    """Return the console's process."""
    return next(pid for pid, args in terminal.processes() if "-m kvtop --" in args and "ended" not in args)


def _engine(terminal: TmuxTerminal) -> int:
    """Return the engine's process."""
    return next(pid for pid, args in terminal.processes() if "kvtop.engine_process" in args)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _left_as_it_was(terminal: TmuxTerminal) -> None:
    """Check what a shell finds after the console has ended."""
    assert terminal.modes() == {}
    assert terminal.stty() == terminal.before
    assert "Traceback" not in terminal.everything()
    terminal.until(lambda screen: screen.rstrip().endswith("\n$"))
    terminal.type("echo usable")
    terminal.press("Enter")
    terminal.until(lambda screen: re.search(r"^usable$", screen, re.M) is not None)
    assert [args for _, args in terminal.processes() if "kvtop" in args] == []


def _press_q(terminal: TmuxTerminal) -> None:
    terminal.press("q")


def _press_ctrl_c(terminal: TmuxTerminal) -> None:
    terminal.press("C-c")


def _signal(*numbers: signal.Signals) -> Callable[[TmuxTerminal], None]:
    def send(terminal: TmuxTerminal) -> None:
        process = _console(terminal)
        for number in numbers:
            os.kill(process, number)

    return send


_ENDS = {
    "q": (_press_q, 0),
    "Ctrl-C": (_press_ctrl_c, 130),
    "SIGTERM": (_signal(signal.SIGTERM), 130),
    "SIGHUP": (_signal(signal.SIGHUP), 130),
    "twice": (_signal(signal.SIGTERM, signal.SIGHUP), 130),
}


@pytest.mark.parametrize("end", _ENDS)
def test_every_way_out(end, make_terminal):
    terminal = make_terminal()
    act, code = _ENDS[end]
    terminal.run(*_ENGINE)
    terminal.until("RUNNING")
    assert terminal.modes() != {}
    engine = _engine(terminal)
    act(terminal)
    assert terminal.end() == code
    _left_as_it_was(terminal)
    assert _is_gone(engine)


def test_use_resize_and_stop_and_go_on(make_terminal):
    terminal = make_terminal()
    terminal.run(*_ENGINE)
    terminal.until("RUNNING")
    terminal.type("?")
    terminal.until("Esc closes")
    terminal.press("Escape")
    terminal.until(lambda screen: "Esc closes" not in screen)
    for size in ((80, 24), (240, 70), (30, 10), (61, 16), (100, 30), (200, 50), (20, 5), (120, 40)):
        terminal.resize(*size)
    screen = terminal.until(lambda screen: "Sequences" in screen and " q quit" in screen)
    assert screen.splitlines()[0].startswith(" kvtop")
    terminal.resize(30, 10)
    terminal.until("kvtop needs")
    terminal.resize(80, 24)
    terminal.until("RUNNING")
    for by_key in (True, False):
        if by_key:
            terminal.press("C-z")
        else:
            os.kill(_console(terminal), signal.SIGTSTP)
        terminal.until(lambda screen: "Stopped" in screen and screen.rstrip().endswith("\n$"))
        deadline = time.monotonic() + 20
        while terminal.modes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert terminal.modes() == {}
        assert terminal.stty() == terminal.before
        terminal.type("clear; fg")
        terminal.press("Enter")
        terminal.until("RUNNING")
    terminal.press("q")
    terminal.until(lambda screen: "RUNNING" not in screen)
    _left_as_it_was(terminal)


def test_an_engine_that_is_killed_is_told_and_started_anew(make_terminal):
    terminal = make_terminal()
    terminal.run(*_ENGINE)
    terminal.until("RUNNING")
    first = _engine(terminal)
    os.kill(first, signal.SIGKILL)
    terminal.until("engine lost")
    terminal.type("2")
    terminal.until("RUNS")
    terminal.type("r")
    terminal.until("a new engine runs")
    second = _engine(terminal)
    assert second != first
    os.kill(second, signal.SIGKILL)
    terminal.until("engine lost")
    terminal.press("q")
    assert terminal.end() == 0
    _left_as_it_was(terminal)


def test_a_console_killed_outright_leaves_no_engine(make_terminal):
    terminal = make_terminal()
    terminal.run(*_ENGINE)
    terminal.until("RUNNING")
    engine = _engine(terminal)
    os.kill(_console(terminal), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not _is_gone(engine):
        assert time.monotonic() < deadline, "the engine outlived its console"
        time.sleep(0.05)


def test_a_terminal_that_is_closed_leaves_no_process(make_terminal):
    terminal = make_terminal()
    terminal.run(*_ENGINE)
    terminal.until("RUNNING")
    processes = [pid for pid, args in terminal.processes() if "kvtop" in args]
    assert len(processes) == 2
    terminal._tmux("respawn-pane", "-k", "sh")
    deadline = time.monotonic() + 20
    while not all(map(_is_gone, processes)):
        assert time.monotonic() < deadline, "a process outlived its terminal"
        time.sleep(0.05)


_SLOW = [pytest.param(term, marks=pytest.mark.slow) for term in ("xterm-256color", "screen", "vt100")]


@pytest.mark.parametrize("term", ["xterm", "screen-256color", *_SLOW])
def test_other_terminals(term, make_terminal):
    terminal = make_terminal(term=term, size=(100, 30))
    terminal.run(*_ENGINE)
    terminal.until(lambda screen: "RUNNING" in screen and "USED" in screen)
    terminal.press("q")
    assert terminal.end() == 0
    _left_as_it_was(terminal)


def test_without_utf8_all_is_ascii(make_terminal):
    terminal = make_terminal(LANG="C", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    terminal.run(*_ENGINE)
    assert terminal.until("RUNNING").isascii()
    terminal.type("?")
    assert terminal.until("Esc closes").isascii()
    terminal.press("Escape", "C-c")
    assert terminal.end() == 130
    _left_as_it_was(terminal)


_NO_SCREEN = {
    "TERM=dumb": ("TERM=dumb", "", "TERM=dumb cannot draw a screen"),
    "stdout": ("", "> /dev/null", "standard output is not a terminal"),
    "stdin": ("", "< /dev/null", "standard input is not a terminal"),
}


def test_where_no_screen_can_be_drawn_it_says_so_in_one_line(make_terminal, tmp_path: Path):
    terminal = make_terminal(size=(160, 40))
    for name, (before, after, said) in _NO_SCREEN.items():
        terminal.type(f"clear; {before} ")
        terminal.run(*_ENGINE, after)
        assert terminal.end() == 2, name
        (line,) = [line for line in terminal.screen().splitlines() if line.startswith("kvtop: ")]
        assert said in line
        assert "kvtop run" in line
        _left_as_it_was(terminal)
