"""The engine in a child process, for real: started, asked, killed from either side, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import until

from allocator.commands import Compact, Pause, Resize, Step, VerifyContents
from kvtop.engine_process import EngineProcess
from kvtop.engine_setup import EngineOptions
from kvtop.errors import EXIT_USAGE, KvtopError, SourceError, UserError
from kvtop.model.observation import Focus
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.wire import Observed

TESTS = Path(__file__).resolve().parent.parent
FAKE_CHILD = (sys.executable, str(TESTS / "fake_engine_child.py"))
LOOK = Focus()
Start = Callable[..., EngineProcess]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def open_fds() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engine processes around a fake engine; afterwards none is left, nor a descriptor or thread."""
    fds, threads = open_fds(), threading.active_count()
    processes: list[EngineProcess] = []

    def start(
        workload: str = "plain", *, num_blocks: int = 8, speed: float | None = None, **how: object
    ) -> EngineProcess:
        options = EngineOptions(num_blocks=num_blocks, num_swap_blocks=4, workload=workload, speed=speed)
        processes.append(EngineProcess.start(options, command=FAKE_CHILD, **how))  # type: ignore[arg-type]
        return processes[-1]

    yield start
    for process in processes:
        process.close()
        assert not is_alive(process.pid)
    until(lambda: threading.active_count() <= threads)
    assert open_fds() <= fds


def test_an_engine_in_another_process_is_observed_and_commanded(start: Start) -> None:
    process = start()
    hello = process.wait_ready(30)
    assert (hello.pid, hello.engine, hello.notes) == (process.pid, "fake", ("built for a test",))
    source, operations = LocalSource(process), LocalOperations(process)
    first = source.read(LOOK, 5)
    assert first.snapshot.notes == ("built for a test",)
    assert operations.apply(Pause()).ok
    seen = source.read(Focus(1, 2, 0), 5)
    assert seen.snapshot.step > first.snapshot.step
    assert seen.device is not None
    assert set(seen.device.last_used.tolist()) == {seen.snapshot.step % 128}
    assert seen.host is not None
    assert seen.host.num_blocks == 4
    assert seen.focus_table is not None
    assert seen.focus_table.tolist() == [0, 1, 2]
    assert operations.plan(Compact()).summary == "would compact"
    assert operations.apply(Resize(100_000)).ok  # beyond the map's first size
    seen = source.read(LOOK, 5)
    assert seen.device is not None
    assert seen.device.num_blocks == 100_000
    source.close()


def test_arrays_and_snapshot_are_of_one_step(start: Start) -> None:
    source = LocalSource(start())
    for _ in range(10):
        seen = source.read(LOOK, 30)
        assert seen.device is not None
        assert set(seen.device.fill.tolist()) == {seen.snapshot.step % 128}


def test_a_reading_is_of_one_step_although_somebody_else_looked_meanwhile(start: Start) -> None:
    process = start()
    source = LocalSource(process)
    first, observe = source.read(LOOK, 30), process.observing.observe

    def overtaken(focus: Focus, timeout_s: float) -> Observed:
        mine = observe(focus, timeout_s)
        assert process.commanding.observe(LOOK, timeout_s).snapshot.step > mine.snapshot.step
        return mine

    process.observing.observe = overtaken  # type: ignore[method-assign]
    for _ in range(3):
        seen = source.read(LOOK, 30)
        assert seen.device is not None
        assert seen.snapshot.step > first.snapshot.step
        assert set(seen.device.fill.tolist()) == {seen.snapshot.step % 128}


def test_a_reading_waits_for_the_start(start: Start) -> None:
    source = LocalSource(start(paused=True))
    assert source.read(LOOK, 30).snapshot.phase == "paused"


def test_max_steps_and_paused_reach_the_runner(start: Start) -> None:
    process = start("skip", max_steps=1000)
    source = LocalSource(process)
    process.wait_ready(30)
    until(lambda: source.read(LOOK, 5).snapshot.phase == "done")
    assert source.read(LOOK, 5).snapshot.step == 1000


def test_a_long_command_holds_up_no_observer_for_good(start: Start) -> None:
    process = start(paused=True)
    source, operations = LocalSource(process), LocalOperations(process)
    source.read(LOOK, 30)
    thread = threading.Thread(target=operations.apply, args=(VerifyContents(), 10))
    thread.start()
    assert source.read(LOOK, 5).snapshot.phase == "paused"
    thread.join(10)


# ---- starting


def test_start_returns_before_the_engine_is_built(start: Start) -> None:
    began_s = time.monotonic()
    process = start("slow")
    assert time.monotonic() - began_s < 20  # it takes a minute to build
    with pytest.raises(SourceError, match=r"is not ready after 0\.2 s"):
        process.wait_ready(0.2)
    with pytest.raises(SourceError, match="still starting"):
        LocalSource(process).read(LOOK, 0.1)
    began_s = time.monotonic()
    process.close()
    assert time.monotonic() - began_s < 20


def test_wrong_options_are_the_users_error(start: Start) -> None:
    process = start("refuse", num_blocks=10)
    for _ in range(2):
        with pytest.raises(UserError, match="--blocks 10: a whole number from 1 to 9") as caught:
            process.wait_ready(30)
        assert caught.value.exit_code == EXIT_USAGE
    with pytest.raises(SourceError, match="--blocks 10"):
        LocalSource(process).read(LOOK, 5)
    until(lambda: not is_alive(process.pid))


def test_an_engine_that_cannot_be_built(start: Start) -> None:
    with pytest.raises(KvtopError, match="the engine could not be built: ZeroDivisionError: by zero"):
        start("raise").wait_ready(30)


def test_an_engine_that_dies_while_starting(start: Start) -> None:
    process = start("die")
    with pytest.raises(SourceError, match="ended with exit code 3: cannot find the thing"):
        process.wait_ready(30)


def test_a_program_that_does_not_exist() -> None:
    fds = open_fds()
    with pytest.raises(KvtopError, match="cannot be started"):
        EngineProcess.start(EngineOptions(), command=("/nowhere/python",))
    assert open_fds() == fds


def test_what_the_child_prints_is_kept_within_bounds(start: Start) -> None:
    process = start("chatter")
    process.wait_ready(30)
    until(lambda: len(process.output) == 20)
    assert max(map(len, process.output)) <= 500


# ---- ends


def hang_in(process: EngineProcess) -> tuple[threading.Thread, list[str]]:
    """Send a command that the ``hang`` engine does not come back from; its error comes in the list."""
    errors: list[str] = []

    def hang() -> None:
        try:
            LocalOperations(process).apply(VerifyContents(), 60)
        except SourceError as error:
            errors.append(str(error))

    thread = threading.Thread(target=hang)
    thread.start()
    until(lambda: process.commanding._number == 1)
    return thread, errors


def read_on(source: LocalSource, timeout_s: float) -> None:
    """Read until it fails: one answer may have been on its way."""
    while True:
        source.read(LOOK, timeout_s)


def test_close_ends_the_child_quickly(start: Start) -> None:
    process = start()
    process.wait_ready(30)
    began_s = time.monotonic()
    process.close()
    assert time.monotonic() - began_s < 10
    assert not is_alive(process.pid)
    process.close()
    with pytest.raises(SourceError, match="the engine was closed"):
        LocalSource(process).read(LOOK, 1)


def test_close_ends_a_child_that_hangs(start: Start) -> None:
    process = start("hang", paused=True)
    process.wait_ready(30)
    thread, errors = hang_in(process)
    began_s = time.monotonic()
    process.close()
    assert time.monotonic() - began_s < 15
    thread.join(5)
    assert errors == ["the engine was closed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_engine_is_told_promptly(start: Start, number: signal.Signals) -> None:
    process = start()
    source, operations = LocalSource(process), LocalOperations(process)
    source.read(LOOK, 30)
    os.kill(process.pid, number)
    text = rf"the engine process \(pid {process.pid}\) was killed by signal {int(number)} \({number.name}\)"
    with pytest.raises(SourceError, match=text):
        read_on(source, 5)
    with pytest.raises(SourceError, match=text):
        operations.apply(Compact())
    with pytest.raises(SourceError, match=text):
        source.read(LOOK, 5)


def test_a_reading_in_progress_ends_with_the_engine(start: Start) -> None:
    process = start("hang", paused=True)
    process.wait_ready(30)
    thread, errors = hang_in(process)
    os.kill(process.pid, signal.SIGKILL)
    thread.join(5)
    assert len(errors) == 1
    assert "was killed by signal 9" in errors[0]


def test_a_stopped_engine_is_told_with_its_age(start: Start) -> None:
    process = start()
    source = LocalSource(process)
    source.read(LOOK, 30)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SourceError, match=r"no answer in 0.3 s; the engine's last sign of life is \d\.\d s old"):
            read_on(source, 0.3)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert source.read(LOOK, 10).snapshot.step > 0  # and it goes on where it was


def test_interrupts_do_not_reach_the_engine(start: Start) -> None:
    process = start()
    source = LocalSource(process)
    source.read(LOOK, 30)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGUSR1)
    for _ in range(3):
        source.read(LOOK, 5)
    assert os.getpgid(process.pid) != os.getpgid(0)


def test_the_engine_outlives_the_thread_that_started_it(start: Start) -> None:
    """Linux sends the parent-death signal when the starting thread ends, not the process."""
    started: list[EngineProcess] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join(30)
    source = LocalSource(started[0])
    for _ in range(3):
        source.read(LOOK, 30)


CONSOLE = textwrap.dedent(
    """
    import os, signal, sys, threading, time
    sys.path[:0] = [{tests!r}, {root!r}]
    from allocator.commands import VerifyContents
    from kvtop.engine_process import EngineProcess
    from kvtop.engine_setup import EngineOptions
    from kvtop.model.observation import Focus
    from kvtop.sources.local import LocalOperations, LocalSource

    WORKLOADS = {{"starting": "slow", "hanging": "hang"}}

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without
        how = sys.argv[1]
        options = EngineOptions(num_swap_blocks=4, workload=WORKLOADS.get(how, "plain"), speed=None)
        process = EngineProcess.start(options, command=({python!r}, {child!r}))
        if how != "starting":
            LocalSource(process).read(Focus(), 30)
        if how == "forked" and os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(60)
            os._exit(0)
        if how == "hanging":
            threading.Thread(target=LocalOperations(process).apply, args=(VerifyContents(),), daemon=True).start()
            while process.commanding._number == 0:
                time.sleep(0.01)
        os.write(1, b"%d\\n" % process.pid)
        if how == "exit":
            sys.exit(0)
        if how == "crash":
            raise RuntimeError("a bug in the console")
        for _ in range(60):  # a signal that comes just before a sleep does not cut it short
            time.sleep(1)
    """
)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("wait", signal.SIGKILL),
        ("wait", signal.SIGTERM),
        ("wait", signal.SIGINT),
        ("wait", signal.SIGHUP),
        ("starting", signal.SIGKILL),
        ("hanging", signal.SIGKILL),
        ("exit", None),
        ("crash", None),
    ],
)
def test_the_engine_ends_with_its_console(tmp_path: Path, how: str, number: signal.Signals | None) -> None:
    pid = run_console(tmp_path, how, number)[-1]
    until(lambda: not is_alive(pid), 10)
    assert left_in(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent-death signal is Linux's")
def test_the_engine_ends_with_its_console_though_a_copy_of_it_lives(tmp_path: Path) -> None:
    """A fork of the console holds the pipe open; the parent-death signal still tells the engine."""
    copy, pid = sorted(run_console(tmp_path, "forked", signal.SIGKILL))
    try:
        # Which is which does not matter: the copy sleeps on, the engine ends.
        until(lambda: is_alive(copy) != is_alive(pid), 10)
    finally:
        for each in (copy, pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def run_console(tmp_path: Path, how: str, number: signal.Signals | None) -> list[int]:
    """Run a console that starts an engine, end it, and return the pids it printed."""
    script = tmp_path / "console.py"
    root = str(TESTS.parent)
    script.write_text(CONSOLE.format(tests=str(TESTS), root=root, python=sys.executable, child=FAKE_CHILD[1]))
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "tmp")}
    console = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    with console:
        assert console.stdout is not None
        try:
            pids = [int(console.stdout.readline()) for _ in range(2 if how == "forked" else 1)]
            if number is not None:
                assert all(is_alive(pid) for pid in pids)
                os.kill(console.pid, number)
            console.wait(30)
        finally:
            console.kill()
    return pids


def left_in(tmp_path: Path) -> list[str]:
    return sorted(str(path) for path in (tmp_path / "tmp").rglob("*"))


def test_the_parent_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "import kvtop.engine_process, kvtop.sources.local, kvtop.sources.in_process\n"
        "print([m for m in ('torch', 'textual') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=TESTS.parent)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_step_over_the_wire_is_exact(start: Start) -> None:
    process = start(paused=True)
    process.wait_ready(30)
    source, operations = LocalSource(process), LocalOperations(process)
    assert operations.apply(Step(77)).message == "77 steps"
    assert source.read(LOOK, 5).snapshot.step == 77


def test_the_real_engine_loads_torch_in_the_child_alone() -> None:
    code = (
        "import sys\n"
        "from kvtop.engine_process import EngineProcess\n"
        "from kvtop.engine_setup import EngineOptions\n"
        "from kvtop.model.observation import Focus\n"
        "from kvtop.sources.local import LocalSource\n"
        "process = EngineProcess.start(EngineOptions(num_blocks=64, geometry='tiny', device='cpu', speed=None))\n"
        "source = LocalSource(process)\n"
        "seen = source.read(Focus(), 60)\n"
        "maps = open(f'/proc/{process.pid}/maps').read()\n"
        "print(seen.device.num_blocks, seen.snapshot.block_bytes > 0, 'libtorch' in maps, 'torch' in sys.modules)\n"
        "source.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=TESTS.parent)
    assert (done.stdout, done.stderr) == ("64 True True False\n", "")
