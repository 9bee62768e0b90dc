"""``kvtop replay``: a recording on the screen, as a report, beside another one, and run again."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

import msgspec

from kvtop.attachment import Attachment
from kvtop.console import ConsoleOptions, make_app, require_terminal
from kvtop.errors import EXIT_FAILED, EXIT_OK
from kvtop.headless import say, write_out
from kvtop.model.format import count
from kvtop.recording.compare import first_difference
from kvtop.recording.picture import to_html, to_svg
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.rerun import rerun
from kvtop.report import build_report, to_text
from kvtop.sources.recorded import RecordedOperations, RecordedSource

_INSTEAD: Final = "open the recording in a terminal, or use --report, --json or --export"


def show(path: str, look: ConsoleOptions, *, at: int | None, speed: float | None) -> int:
    """Open the console on a recording and return its exit code once it is closed.

    Args:
        path: The recording.
        look: The console.
        at: Step to begin at, paused; ``None`` plays from the beginning.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.

    Raises:
        UserError: There is no terminal to draw on.
        RecordingError: The recording cannot be read.
    """
    require_terminal(sys.stdin, sys.stdout, sys.stderr, os.environ, _INSTEAD)
    recording = Recording.open(path)
    source = RecordedSource(recording, name=os.path.basename(path), speed=speed, paused=at is not None)
    try:
        if at is not None:
            source.go_to(at)
        app = make_app(lambda: Attachment(source, RecordedOperations(source)), look, restart=False)
        app.run()
        return app.return_code or 0
    finally:
        source.close()


def tell(path: str, *, at: int | None, as_json: bool) -> int:
    """Print one moment of a recording, by default the last one.

    Raises:
        RecordingError: The recording cannot be read, or that moment is damaged.
    """
    recording = Recording.open(path)
    try:
        moment = recording.moment(recording.last if at is None else recording.at(at))
        if as_json:
            write_out(json.dumps(_as_object(recording, moment), allow_nan=False))
        else:
            write_out(to_text(_report(moment)))
            commands = "" if recording.damage is None else f"; incomplete: {recording.damage}"
            steps = f"steps {count(recording.first_step)} to {count(recording.last_step)}"
            say(f"{path}: step {count(moment.snapshot.step)} of {steps}{commands}")
        return EXIT_OK
    finally:
        recording.close()


def export(path: str, *, at: int | None, form: str) -> int:
    """Print a picture of one moment, by default the last one, as ``svg`` or as a page with its report (``html``).

    Raises:
        RecordingError: The recording cannot be read, or that moment is damaged.
    """
    recording = Recording.open(path)
    try:
        moment = recording.moment(recording.last if at is None else recording.at(at))
    finally:
        recording.close()
    name = os.path.basename(path)
    write_out(to_svg(moment, name) if form == "svg" else to_html(moment, name, to_text(_report(moment))))
    return EXIT_OK


def diff(left_path: str, right_path: str, *, as_json: bool) -> int:
    """Print the first step at which two recordings differ; exit code 1 when they do.

    Raises:
        RecordingError: One cannot be read.
    """
    left = Recording.open(left_path)
    try:
        right = Recording.open(right_path)
        try:
            found = first_difference(left, right)
            ends = (left.last_step, right.last_step)
        finally:
            right.close()
    finally:
        left.close()
    if as_json:
        write_out(msgspec.json.encode(found).decode())
    elif found.step is not None:
        since = "" if found.same_until is None else f"; the same until step {count(found.same_until)}"
        write_out("\n".join([f"they differ at step {count(found.step)}{since}", *(f"  {line}" for line in found.what)]))
    elif found.same_until is None:
        write_out("no step is in both recordings")
    else:
        tail = "" if ends[0] == ends[1] else f"; one ends at step {count(min(ends))}, the other at {count(max(ends))}"
        write_out(f"the same at every step that both have, until step {count(found.same_until)}{tail}")
    return EXIT_OK if found.step is None and found.same_until is not None else EXIT_FAILED


def verify(path: str, *, as_json: bool) -> int:
    """Run a recording's engine again and compare; exit code 1 at a difference.

    Raises:
        UserError: It cannot be run again, or read.
    """
    recording = Recording.open(path)
    try:
        done = rerun(recording)
        damage = recording.damage
    finally:
        recording.close()
    if as_json:
        write_out(msgspec.json.encode(done).decode())
    else:
        compared = f"{count(done.moments)} moments and {count(done.commands)} commands"
        if done.what:
            write_out(
                "\n".join([f"differs at step {count(done.step)}, after {compared}", *(f"  {w}" for w in done.what)])
            )
        else:
            write_out(f"the same run: {compared}, to step {count(done.step)}")
    if damage is not None:
        say(f"{path} is incomplete: {damage}")
    return EXIT_FAILED if done.what else EXIT_OK


def _as_object(recording: Recording, moment: Moment) -> dict[str, Any]:
    header = recording.header
    return {
        "recording": {
            "kvtop_version": header.kvtop_version,
            "options": msgspec.to_builtins(header.options),
            "every": header.every,
            "first_step": recording.first_step,
            "last_step": recording.last_step,
            "damage": recording.damage,
        },
        "report": _report(moment),
        "snapshot": msgspec.to_builtins(moment.snapshot),
    }


def _report(moment: Moment) -> dict[str, Any]:
    """Return the report as of one moment; the real time it took is not known."""
    return {**build_report(moment.snapshot, moment.device, 0.0, 0.0), "wall_s": None, "engine_s": None}
