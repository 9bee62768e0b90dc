"""Doctor: looks at the terminal, Python, torch, GPUs, sockets and files, and says what to do about what is wrong.

Every look is bounded and none changes anything. torch is asked in a process of its own: a broken one may crash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import select
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from kvtop.errors import EXIT_FAILED, EXIT_OK, UserError
from kvtop.local_socket import runtime_dir
from kvtop.options_file import OptionsFile

#: ``missing`` is something kvtop works without; ``stale`` is left from what has ended, and in nobody's way;
#: ``problem`` is something to be put right.
State = Literal["good", "missing", "stale", "problem"]
_MIN_SIZE: Final = (60, 16)
_TORCH_BOUND_S: Final = 60.0
_ANSWER_BOUND_S: Final = 0.3
_TORCH: Final = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.__version__, [torch.cuda.get_device_name(i) for i in range(n)]]))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: What was looked at.
        state: How it is.
        found: What was found, or why it is missing.
        advice: What to do; empty where nothing need be done.
    """

    what: str
    state: State
    found: str
    advice: str = ""


def examine(read_file: Callable[[], OptionsFile]) -> Iterator[Finding]:
    """Yield every finding, as it is made.

    Args:
        read_file: Reads the configuration file and checks what is in it.
    """

    def configuration() -> Iterator[Finding]:
        yield file_finding(read_file)

    looks = (_terminal, _python, _torch, _gpu_driver, _listening, _memory_files, _namesakes, _stale_files)
    for look in (configuration, *looks):
        try:
            yield from look()
        except Exception as error:
            yield Finding(look.__name__.strip("_").replace("_", " "), "problem", f"{type(error).__name__}: {error}")


def run_doctor(*, as_json: bool, findings: Callable[[], Iterable[Finding]]) -> int:
    """Print the findings, as lines or as one JSON object, and return the exit code: 1 when something is wrong."""
    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            print(line(finding), flush=True)
    if as_json:
        print(json.dumps({"schema_version": 1, "findings": [asdict(f) for f in found]}, indent=1))
    return EXIT_FAILED if any(f.state == "problem" for f in found) else EXIT_OK


def line(finding: Finding) -> str:
    """Return a finding as one line."""
    text = f"{finding.state:<8} {finding.what:<16} {finding.found}"
    text += f"  → {finding.advice}" if finding.advice else ""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def file_finding(read_file: Callable[[], OptionsFile]) -> Finding:
    """Return which configuration file is in use, and what is wrong in it."""
    try:
        file = read_file()
    except UserError as error:
        return Finding("configuration", "problem", str(error), "put it right, or name another with --config")
    if not file.path.exists():
        return Finding("configuration", "missing", f"{file.path}: no such file", "kvtop export config prints one")
    tables = [f"[{name}]" for name, table in file.tables.items() if table]
    return Finding("configuration", "good", f"{file.path}: {len(file)} options {' '.join(tables)}".rstrip())


# Terminal ------------------------------------------------------------------------------------------------------------


def _terminal() -> Iterator[Finding]:
    yield from terminal_findings(
        os.environ,
        is_terminal=all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)),
        size=shutil.get_terminal_size((0, 0)),
        encoding=getattr(sys.stdout, "encoding", None) or "ascii",
    )
    yield _synchronised_output()


def terminal_findings(
    environment: Mapping[str, str], *, is_terminal: bool, size: tuple[int, int], encoding: str
) -> Iterator[Finding]:
    """Yield what is to be said of a terminal."""
    term = environment.get("TERM", "")
    if not is_terminal:
        yield Finding("terminal", "missing", "standard input or output is none", "kvtop --plain needs none")
    elif term in ("", "dumb", "unknown"):
        yield Finding("terminal", "problem", f"TERM={term or '(not set)'} cannot draw", "set TERM, or kvtop --plain")
    else:
        yield Finding("terminal", "good", f"TERM={term}")
    columns, lines = size
    if is_terminal and (columns < _MIN_SIZE[0] or lines < _MIN_SIZE[1]):
        yield Finding("size", "problem", f"{columns}x{lines}", f"make it at least {_MIN_SIZE[0]}x{_MIN_SIZE[1]}")
    elif is_terminal:
        roomy = columns >= 110 and lines >= 32
        yield Finding(
            "size", "good", f"{columns}x{lines}", "" if roomy else "from 110x32 on every pane is seen at once"
        )
    if environment.get("NO_COLOR"):
        yield Finding("colours", "good", "none, since NO_COLOR is set")
    elif environment.get("COLORTERM") in ("truecolor", "24bit"):
        yield Finding("colours", "good", "16 million")
    else:
        number = "256" if "256" in term else "16"
        yield Finding("colours", "good", number, "COLORTERM=truecolor gives more, if the terminal can")
    if encoding.lower().replace("-", "") == "utf8":
        yield Finding("characters", "good", "UTF-8")
    else:
        yield Finding("characters", "missing", f"{encoding}: drawn in ASCII", "a UTF-8 locale: LANG=C.UTF-8")
    inside = "tmux" if environment.get("TMUX") else "screen" if environment.get("STY") else ""
    yield Finding("multiplexer", "good", inside or "none")


def _synchronised_output() -> Finding:
    """Ask the terminal whether it draws whole frames at once (mode 2026); one that does not answer does not."""
    import termios
    import tty

    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        return Finding("whole frames", "missing", "no terminal to ask")
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    answer = b""
    try:
        tty.setcbreak(fd)
        sys.stdout.write("\x1b[?2026$p")
        sys.stdout.flush()
        deadline_s = time.monotonic() + _ANSWER_BOUND_S
        while b"y" not in answer and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([fd], [], [], left_s)[0]:
                answer += os.read(fd, 64)
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)
    found = re.search(rb"\x1b\[\?2026;([0-4])\$y", answer)
    if found and found[1] in b"123":
        return Finding("whole frames", "good", "the terminal draws them at once")
    return Finding("whole frames", "missing", "not offered: large changes may be seen half drawn")


# Python and devices --------------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    state: State = "good" if sys.version_info >= (3, 11) else "problem"
    yield Finding("python", state, f"{version} at {sys.executable}", "" if state == "good" else "3.11 or newer")
    for name in ("textual", "rich", "numpy", "msgspec"):
        try:
            yield Finding(name, "good", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "problem", "not installed", "install kvtop again")


def _torch() -> Iterator[Finding]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_BOUND_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("torch", "problem", f"did not load in {_TORCH_BOUND_S:g} s", "--geometry none works without")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        yield Finding("torch", "problem", last, "install kvtop again; --geometry none works without")
        return
    version, names = json.loads(done.stdout.splitlines()[-1])
    yield Finding("torch", "good", version)
    if names:
        yield Finding("devices", "good", f"cpu, {', '.join(f'cuda:{i} {name}' for i, name in enumerate(names))}")
    else:
        yield Finding("devices", "missing", "cpu only: torch finds no GPU")


def _gpu_driver() -> Iterator[Finding]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding("nvml", "missing", f"{error}: no GPU numbers")
        return
    try:
        yield Finding(
            "nvml", "good", f"{pynvml.nvmlDeviceGetCount()} GPUs, driver {pynvml.nvmlSystemGetDriverVersion()}"
        )
    finally:
        pynvml.nvmlShutdown()


# Machine -------------------------------------------------------------------------------------------------------------


def _listening() -> Iterator[Finding]:
    with contextlib.closing(socket.socket()) as sock:
        try:
            sock.bind(("127.0.0.1", 0))
        except OSError as error:
            yield Finding("metrics port", "problem", f"127.0.0.1: {error.strerror}", "run without --metrics-port")
            return
        yield Finding("metrics port", "good", "127.0.0.1 can be listened on")


def _memory_files() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("kvtop-doctor"))
    except (OSError, AttributeError) as error:
        yield Finding("shared memory", "problem", f"{error}", "kvtop --in-process works without")
        return
    yield Finding("shared memory", "good", "block maps can be shared")


def _namesakes() -> Iterator[Finding]:
    yield from namesake_findings(os.environ.get("PATH", "").split(os.pathsep), Path(sys.executable).parent)
    providers = importlib.metadata.packages_distributions().get("kvtop", [])
    others = sorted({name for name in providers if name != "kvtop-console"})
    if others:
        advice = f"pip uninstall {' '.join(others)}, then install kvtop-console again"
        yield Finding("package kvtop", "problem", f"also installed by {', '.join(others)}", advice)


def namesake_findings(folders: Iterable[str], ours: Path) -> Iterator[Finding]:
    """Yield which ``kvtop`` a shell would run, and whether it is the one in ``ours``."""
    found = [p for f in folders if f and (p := Path(f) / "kvtop").is_file() and os.access(p, os.X_OK)]
    if not found:
        yield Finding("command kvtop", "missing", "not in PATH", f"add {ours} to PATH, or python -m kvtop")
    elif found[0].parent.resolve() == ours.resolve():
        rest = len({p.resolve() for p in found}) - 1
        yield Finding("command kvtop", "good", f"{found[0]}" + (f", before {rest} other" if rest else ""))
    else:
        advice = f"run {ours / 'kvtop-console'}, or put {ours} first in PATH"
        yield Finding("command kvtop", "problem", f"{found[0]} is another one", advice)


def _stale_files() -> Iterator[Finding]:
    yield from stale_findings(runtime_dir())


def stale_findings(folder: Path) -> Iterator[Finding]:
    """Yield whether engines that have ended left sockets or block maps in ``folder``."""
    sockets, maps = [], []
    if folder.is_dir():
        sockets = sorted(p for p in folder.glob("*.sock") if stat.S_ISSOCK(p.lstat().st_mode))
        maps = sorted(p for p in folder.glob("*.map") if stat.S_ISREG(p.lstat().st_mode))
    alive = {path.stem for path in sockets if not _is_dead(path)}
    left = [path for path in (*sockets, *maps) if path.stem not in alive]
    if left:
        names = ", ".join(sorted({path.stem for path in left}))
        advice = f"rm {shlex.join(map(str, left))}; or leave them: the next engine of that name clears them away"
        yield Finding("engine files", "stale", f"left by engines that have ended: {names}", advice)
    else:
        yield Finding("engine files", "good", f"none is stale; {_published(len(alive))}")


def _published(number: int) -> str:
    return f"{number} published {'engine' if number == 1 else 'engines'}"


def _is_dead(path: Path) -> bool:
    """Whether nobody listens there any more; an engine that is too busy to answer is alive."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(_ANSWER_BOUND_S)
        try:
            sock.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
        return False
