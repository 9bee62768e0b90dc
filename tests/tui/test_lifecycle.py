"""Start and stop: the first frame, slow and failing engines, every way out, and the terminal left as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tui_fakes import FakeOperations, FocusedSource, StillClock, console, screen_text, scripted_observation, wait_until

from allocator.commands import Pause
from allocator.plans import Outcome
from kvtop.attachment import Attachment
from kvtop.errors import SourceError, UserError
from kvtop.model.reduce import MAX_EVENTS
from kvtop.tui.app import KvtopApp
from kvtop.tui.background import Background
from kvtop.tui.messages import CommandFinished, Connected

_CHILD = Path(__file__).with_name("console_child.py")
_LEAVE_ALTERNATE_SCREEN = b"\x1b[?1049l"


async def test_the_first_frame_does_not_wait_for_the_engine():
    ready = threading.Event()
    attachment = Attachment(FocusedSource([scripted_observation()]), FakeOperations(), StillClock())

    def connect() -> Attachment:
        assert ready.wait(30)
        return attachment

    app = KvtopApp(connect, auto_poll=False)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "starting engine…" in screen_text(app)
        assert "STARTING" in screen_text(app)
        assert "—" in screen_text(app)
        for key in ("S", "space", "R", "P", "enter", "g", "r", "z", "2", "down", "1", "end"):
            await pilot.press(key)
        assert app.attachment is None
        ready.set()
        await wait_until(pilot, lambda: app.attachment is attachment, "the attachment")


@pytest.mark.parametrize(
    ("error", "code"), [(SourceError("no engine"), 3), (UserError("--blocks 0"), 2), (OSError("no fork"), 1)]
)
async def test_an_engine_that_does_not_start_ends_the_console(error, code, capsys):
    def connect() -> Attachment:
        raise error

    app = KvtopApp(connect)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: not app.is_running, "the end")
    assert app.return_code == code
    assert str(error) in capsys.readouterr().err


async def test_the_console_polls_by_itself_and_stops():
    source = FocusedSource([scripted_observation(step=s, first_event=3 * s) for s in range(50)])
    app = KvtopApp(lambda: Attachment(source, FakeOperations()), refresh_hz=50)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: len(source.asked) > 10, "ten readings")
        await wait_until(pilot, lambda: app.view.snapshot is not None and app.view.snapshot.step > 5, "the view")
        assert "scripted" in screen_text(app)
    assert {focus.max_events for focus in source.asked} == {MAX_EVENTS}, "more would not be kept"
    assert source.closed
    assert not [t for t in threading.enumerate() if t.name.startswith("kvtop-")]


async def test_an_engine_that_another_takes_the_place_of_is_read_no_more():
    first = FocusedSource([scripted_observation()])
    second = FocusedSource([scripted_observation(step=7)])
    app = KvtopApp(lambda: Attachment(first, FakeOperations()), refresh_hz=50)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: bool(first.asked), "the first engine's reading")
        polling = app._polling
        app.post_message(Connected(Attachment(second, FakeOperations())))
        await wait_until(pilot, lambda: len(second.asked) > 3, "the second one's readings")
        assert polling is not None
        assert polling.is_set()
    assert second.closed
    first.close()


async def test_messages_that_come_after_the_panes_are_gone_are_let_go_of():
    app = KvtopApp(lambda: Attachment(FocusedSource([scripted_observation()]), FakeOperations()), auto_poll=False)
    late = FocusedSource([scripted_observation()])
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.attachment is not None, "the attachment")
    assert not app.screen_stack
    app.on_view_changed()
    app.on_command_finished(CommandFinished(Pause(), Outcome(ok=True, message="done")))
    app.on_connected(Connected(Attachment(late, FakeOperations())))
    app._tick()
    assert late.closed


async def test_an_engine_that_comes_after_the_end_is_closed():
    asked, ready, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(FocusedSource):
        def close(self) -> None:
            closed.set()

    def connect() -> Attachment:
        asked.set()
        assert ready.wait(30)
        return Attachment(Late([scripted_observation()]), FakeOperations())

    app = KvtopApp(connect)
    async with app.run_test() as pilot:
        await wait_until(pilot, asked.is_set, "the start")
    assert not closed.is_set()
    ready.set()
    assert closed.wait(5)


def test_background_tasks_run_in_order_and_faults_are_reported():
    faults: list[BaseException] = []
    done: list[int] = []
    finished = threading.Event()
    background = Background(faults.append)
    background.submit(lambda: done.append(1))
    background.submit(lambda: done.append(1 // 0))
    background.submit(lambda: (done.append(2), finished.set())[0])
    assert finished.wait(5)
    assert done == [1, 2]
    assert [type(fault) for fault in faults] == [ZeroDivisionError]
    assert background.stop(5)


def test_background_does_not_wait_for_what_hangs():
    release = threading.Event()
    background = Background(lambda error: None)
    background.start("hang", lambda: release.wait(30))
    assert not background.stop(0.05)
    release.set()
    assert background.stop(5)


def test_background_bounds_what_may_wait():
    release = threading.Event()
    background = Background(lambda error: None)
    taken = [background.submit(lambda: release.wait(30)) for _ in range(200)]
    assert taken[0]
    assert not taken[-1]
    release.set()
    background.stop(5)


async def test_ctrl_c_works_in_every_dialog():
    for keys in (["question_mark"], ["g"], ["R"]):
        async with console() as c:
            await c.press(*keys, "ctrl+c")
            await c.until(lambda c=c: not c.app.is_running, "the end")
        assert c.app.return_code == 130


# In a terminal of its own -------------------------------------------------------------------------------------------


class _Terminal:
    """A console in a child process on a pseudo terminal."""

    def __init__(self, mode: str, shell_script: str | None = None) -> None:
        """Start it alone in its session; or let a shell with job control run it, as ``$CONSOLE`` in a script."""
        command = [sys.executable, str(_CHILD), mode]
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.output = b""
        if shell_script is not None:
            # A leader without a terminal gets the one it opens for its own.
            opened = (
                f"exec <>{os.ttyname(self.slave)} >&0 2>&0; set -m; CONSOLE='{shlex.join(command)}'; {shell_script}"
            )
            command = ["sh", "-c", opened]
        self.process = subprocess.Popen(
            command,
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
        )  # fmt: skip

    def read_until(self, wanted: bytes, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while wanted not in self.output:
            left = deadline - time.monotonic()
            assert left > 0, f"waited in vain for {wanted!r}: {self.output[-2000:]!r}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.output += os.read(self.master, 65536)

    def let_it_fill(self) -> None:
        """Read nothing until the terminal's buffer has stopped growing."""
        sizes: list[int] = []
        deadline = time.monotonic() + 20
        while len(sizes) < 20 or len(set(sizes[-20:])) > 1:
            assert time.monotonic() < deadline, "the terminal's buffer never filled"
            select.select([], [], [], 0.05)
            waiting = fcntl.ioctl(self.master, termios.FIONREAD, b"\0" * 4)
            sizes.append(struct.unpack("i", waiting)[0])

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; fails when the console takes longer than ``timeout_s`` to end."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the console did not end in time"
            if select.select([self.master], [], [], 0.05)[0]:
                self.output += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 65536)
        return self.process.returncode

    def hang_up(self) -> None:
        """Take the terminal away. Nobody gets a signal, for it controls no session."""
        for end in (self.master, self.slave):
            os.close(end)
        self.master = self.slave = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.master >= 0:
            self.hang_up()


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[_Terminal]:
    child = _Terminal(request.param)
    yield child
    child.close()


def _modes_left_on(output: bytes) -> set[int]:
    """Return the terminal's private modes that are on after this output, mouse and bracketed paste among them."""
    on = {7, 25}
    for numbers, sign in re.findall(rb"\x1b\[\?([\d;]+)([hl])", output):
        modes = {int(number) for number in numbers.split(b";")}
        on = on | modes if sign == b"h" else on - modes
    return on


_ENDS = [
    ("run", b"q", 0),
    ("run", b"\x03", 130),
    ("run", signal.SIGINT, 130),
    ("run", signal.SIGTERM, 130),
    ("run", signal.SIGHUP, 130),
    ("hang", b"q", 0),
    ("hang", signal.SIGTERM, 130),
    ("close-hang", b"q", 0),
    ("slow", b"q", 0),
]


@pytest.mark.parametrize(
    ("terminal", "end", "code"), _ENDS, ids=[f"{m}-{e!r}" for m, e, _ in _ENDS], indirect=["terminal"]
)
def test_every_way_out_leaves_the_terminal_as_it_was(terminal, end, code):
    terminal.read_until(b"RUNNING" if terminal.process.args[-1] != "slow" else b"starting engine")
    if isinstance(end, bytes):
        terminal.type(end)
    else:
        os.kill(terminal.process.pid, end)
    # Two seconds for the console itself, the rest for the interpreter on a busy machine.
    assert terminal.wait(2.0 + 3.0) == code
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert terminal.output.rfind(_LEAVE_ALTERNATE_SCREEN) > terminal.output.rfind(b"\x1b[?1049h")
    assert _modes_left_on(terminal.output) == {7, 25}  # wrapping lines, and showing the cursor
    assert b"torch loaded: False" in terminal.output


def test_ctrl_z_gives_the_terminal_back_until_fg():
    child = _Terminal("run", '$CONSOLE; echo "stopped $?"; read answer; fg; echo "ended $?"')
    try:
        child.read_until(b"RUNNING")
        child.type(b"R\x1a")
        child.read_until(b"stopped 147")  # 128 + SIGSTOP
        assert termios.tcgetattr(child.slave) == child.before
        assert child.output.rfind(_LEAVE_ALTERNATE_SCREEN) > child.output.rfind(b"\x1b[?1049h")
        child.output = b""
        child.type(b"\n")
        child.read_until(b"RUNNING")
        child.type(b"\x03")
        child.read_until(b"ended 130")
        assert termios.tcgetattr(child.slave) == child.before
    finally:
        child.close()


@pytest.mark.parametrize("terminal", ["run"], indirect=True)
def test_ctrl_z_without_a_shell_to_go_back_to_changes_nothing(terminal):
    terminal.read_until(b"RUNNING")
    terminal.type(b"\x1a")
    terminal.read_until(b"no shell to go back to")
    terminal.type(b"q")
    assert terminal.wait(5.0) == 0


@pytest.mark.parametrize("terminal", ["run"], indirect=True)
def test_a_console_whose_terminal_vanishes_ends(terminal):
    terminal.read_until(b"RUNNING")
    terminal.hang_up()
    assert terminal.process.wait(30) == 130


@pytest.mark.parametrize("terminal", ["fault", "screen-fault"], indirect=True)
def test_a_fault_leaves_the_terminal_as_it_was(terminal):
    assert terminal.wait(20) == 1
    assert termios.tcgetattr(terminal.slave) == terminal.before
    left = terminal.output.rfind(_LEAVE_ALTERNATE_SCREEN)
    assert left >= 0
    assert b"a fault in the" in terminal.output[left:]


@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["flood"], indirect=True)
def test_a_terminal_that_takes_no_output_does_not_hold_up_the_end(terminal):
    terminal.read_until(b"RUNNING")
    terminal.let_it_fill()
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.process.wait(15) == 130
    assert termios.tcgetattr(terminal.slave) == terminal.before
