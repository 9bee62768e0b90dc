"""A real terminal for tests: a shell in a tmux of its own, whose screen and modes can be asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: Seconds until something is on the screen, and for tmux to answer.
_SEEN_S, _ANSWER_S = 60.0, 20.0
#: What a program may leave behind in its terminal, as tmux calls it, and how a shell finds it.
_MODES = {"alternate_on": "0", "mouse_any_flag": "0", "mouse_sgr_flag": "0", "cursor_flag": "1", "wrap_flag": "1"}


def has_tmux() -> bool:
    """Return whether there is a tmux."""
    return shutil.which("tmux") is not None


class TmuxTerminal:
    """A shell with job control in a window of that many columns and lines.

    Args:
        folder: For the socket; a short path.
        environment: Of the shell, besides this process's.
    """

    def __init__(
        self, folder: Path, size: tuple[int, int] = (120, 40), term: str = "tmux-256color", **environment: str
    ):
        self._socket = folder / "t"
        shell = ["env", "-i", f"PATH={os.environ['PATH']}", f"HOME={folder}", f"TERM={term}", "PS1=$ "]
        shell += [f"PYTHONPATH={os.environ.get('PYTHONPATH') or os.getcwd()}", "LANG=C.UTF-8"]
        shell += [f"{name}={value}" for name, value in environment.items()]
        size_words = ["-x", str(size[0]), "-y", str(size[1])]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size_words, *shell, "sh")
        self._tmux("set-option", "-g", "window-size", "manual")
        self.until("$")
        self.before = self.stty()

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-u", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_ANSWER_S).stdout

    def type(self, text: str) -> None:
        """Type text as it is."""
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Press keys, as tmux names them."""
        self._tmux("send-keys", *keys)

    def run(self, *arguments: str) -> None:
        """Start ``kvtop`` with these arguments; ``ended CODE`` follows it."""
        self.type(f"{sys.executable} -m kvtop {' '.join(arguments)}; echo ended $?")
        self.press("Enter")

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> str:
        """Return what is on the screen."""
        return self._tmux("capture-pane", "-p")

    def everything(self) -> str:
        """Return what is on the screen, and what has left it at its top."""
        return self._tmux("capture-pane", "-p", "-S", "-")

    def until(self, wanted: str | Callable[[str], bool]) -> str:
        """Wait until the screen shows these words, or is as it should; return it."""
        deadline = time.monotonic() + _SEEN_S
        while True:
            screen = self.screen()
            if wanted in screen if isinstance(wanted, str) else wanted(screen):
                return screen
            assert time.monotonic() < deadline, f"waited in vain for {wanted}:\n{screen}"
            time.sleep(0.05)

    def end(self) -> int:
        """Wait until the console has ended, and return its exit code."""
        screen = self.until(lambda screen: re.search(r"^ended \d+$", screen, re.M) is not None)
        return int(re.findall(r"^ended (\d+)$", screen, re.M)[-1])

    def modes(self) -> Mapping[str, str]:
        """Return the modes the terminal is in that a shell would not expect."""
        found = self._tmux("display-message", "-p", " ".join(f"#{{{name}}}" for name in _MODES)).split()
        return {name: value for (name, usual), value in zip(_MODES.items(), found, strict=True) if value != usual}

    def stty(self) -> str:
        """Return the settings of the terminal's line."""
        with open(self._tmux("display-message", "-p", "#{pane_tty}").strip()) as tty:
            return subprocess.run(["stty", "-a"], stdin=tty, capture_output=True, text=True, check=True).stdout.split(
                ";", 3
            )[3]

    def processes(self) -> list[tuple[int, str]]:
        """Return the processes the shell has started that live, with their command lines."""
        shell = self._tmux("display-message", "-p", "#{pane_pid}").strip()
        listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()]
        below = {shell}
        for _ in range(4):
            below |= {pid for pid, parent, *_ in rows if parent in below}
        return [(int(pid), args) for pid, _, *rest in rows if pid in below - {shell} for args in rest]

    def close(self) -> None:
        """End the terminal and what runs in it."""
        self._tmux("kill-server")
