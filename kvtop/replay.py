"""``kvtop replay``: a recording on the screen, as a report, marked, cut, drawn, beside another one, and run again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvtop.attachment import Attachment
from kvtop.console import ConsoleOptions, make_app, require_terminal
from kvtop.errors import EXIT_FAILED, EXIT_OK, UserError
from kvtop.headless import say, write_out
from kvtop.log import LogFormat
from kvtop.metrics_address import MetricsAddress
from kvtop.model.format import count, size
from kvtop.panels.command_text import describe
from kvtop.pictures.heatmap import to_svg
from kvtop.recording.compare import first_difference
from kvtop.recording.cut import cut
from kvtop.recording.frames import Note, RecordedCommand
from kvtop.recording.framing import RecordingError
from kvtop.recording.notes import check_note
from kvtop.recording.reader import Moment, Recording
from kvtop.recording.rerun import rerun
from kvtop.report import build_report, to_text
from kvtop.sources.recorded import RecordedOperations, RecordedSource

_INSTEAD: Final = "open the recording in a terminal, or use --plain, --report, --json or --export"
_CUT_FIELDS: Final = ("source", "first_step", "last_step")
#: Pictures in a moving one when not asked for.
_FRAMES: Final = 60


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Recording]:
    recording = Recording.open(path)
    try:
        yield recording
    finally:
        recording.close()


def _attach(path: str, at: int | None, speed: float | None) -> Attachment:
    """Return the recording as an engine, playing from its beginning or standing at a step."""
    source = RecordedSource(Recording.open(path), name=os.path.basename(path), speed=speed, paused=at is not None)
    if at is not None:
        source.go_to(at)
    return Attachment(source, RecordedOperations(source))


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
    attachment = _attach(path, at, speed)
    try:
        app = make_app(lambda: attachment, look, restart=False)
        app.run()
        return app.return_code or 0
    finally:
        attachment.close()


def show_plain(path: str, *, at: int | None, speed: float | None, once: bool, every_s: float | None) -> int:
    """Print a recording's moments as lines of text as it plays, or one of them, and return the exit code.

    Raises:
        RecordingError: The recording cannot be read.
    """
    from kvtop.plain import print_views

    attachment = _attach(path, at, speed)
    try:
        return print_views(attachment, every_s=every_s or (0.0 if once else 2.0), once=once)
    finally:
        attachment.close()


def serve(
    path: str, *, at: int | None, speed: float | None, address: MetricsAddress, log_format: LogFormat = "text"
) -> int:
    """Serve the metrics of a recording as it plays, until a signal asks for the end; returns the exit code.

    Raises:
        UserError: The address cannot be served on.
        RecordingError: The recording cannot be read.
    """
    from kvtop.exporting import serve_metrics

    return serve_metrics(_attach(path, at, speed), address=address, log_format=log_format)


def tell(path: str, *, at: int | None, as_json: bool) -> int:
    """Print one moment of a recording, by default the last one.

    Raises:
        RecordingError: The recording cannot be read, or that moment is damaged.
    """
    with _opened(path) as recording:
        moment = _moment(recording, at)
        if as_json:
            write_out(json.dumps(_as_object(recording, moment), allow_nan=False))
        else:
            write_out(to_text(report_of(moment)))
            damage = "" if recording.damage is None else f"; incomplete: {recording.damage}"
            steps = f"steps {count(recording.first_step)} to {count(recording.last_step)}"
            say(f"{path}: step {count(moment.snapshot.step)} of {steps}{damage}")
    return EXIT_OK


def mark(path: str, at: int | None, text: str) -> int:
    """Set a mark at a step of a recording, by default the last one; what was recorded stays as it is.

    Raises:
        KvtopError: The text cannot be a mark's, or it cannot be kept.
    """
    kept = check_note(text)
    with _opened(path) as recording:
        number = recording.last if at is None else recording.at(at)
        step = recording.step_of(number)
        file = recording.add_notes([Note(step, kept, time.time())])
    say(f"marked step {count(step)}: {kept}" + ("" if str(file) == path else f"; kept in {file}"))
    return EXIT_OK


def list_marks(path: str, *, as_json: bool) -> int:
    """Print the marks of a recording, in order of steps.

    Raises:
        RecordingError: The recording cannot be read.
    """
    with _opened(path) as recording:
        notes, damage = recording.notes, recording.damage
    if as_json:
        write_out(msgspec.json.encode(notes).decode())
    else:
        width = max((len(count(note.step)) for note in notes), default=0)
        lines = [f"step {count(note.step):>{width}}  {note.text}" for note in notes]
        write_out("\n".join(lines) or "no marks")
    if damage is not None:
        say(f"{path} is incomplete: {damage}")
    return EXIT_OK


def cut_out(path: str, span: tuple[int, int], out: str) -> int:
    """Write a part of a recording to a new file.

    Raises:
        UserError: There is no such part, or the file is there already.
        RecordingError: The recording is damaged there, or before.
    """
    with _opened(path) as recording:
        moments = cut(recording, *span, out)
    say(f"{count(moments)} moments in {out}, {size(os.path.getsize(out))}; kvtop replay {out}")
    return EXIT_OK


def export(
    path: str, *, at: int | None, form: str, span: tuple[int, int] | None, frames: int | None, out: str | None
) -> int:
    """Write a picture of one moment or a moving one of several, or a page that reports on the run.

    Args:
        path: The recording.
        at: Step of the picture, or up to which the page goes; by default the last one.
        form: ``svg``, ``png``, ``gif`` or ``html``.
        span: The first and the last step of a moving picture or of a page; makes an SVG a moving one.
        frames: Pictures in a moving one.
        out: A new file; ``None`` is standard output.

    Raises:
        UserError: The file is there already, or the options do not go together.
        RecordingError: The recording cannot be read, or a moment is damaged.
    """
    if at is not None and span is not None:
        raise UserError("--at and --steps: one of the two, not both")
    is_moving = form == "gif" or (form == "svg" and span is not None)
    if form == "png" and span is not None:
        raise UserError("--steps: a png is of one step (--at); gif and svg move")
    if frames is not None and not is_moving:
        raise UserError("--frames: only with gif, or with svg and --steps")
    if out is None and form in ("png", "gif") and sys.stdout.isatty():
        raise UserError(f"--export {form}: --out FILE says where to")
    if out is not None and os.path.lexists(out):
        raise UserError(f"--out {out}: exists already; choose another name")
    name = os.path.basename(path)
    with _opened(path) as recording:
        if form == "html":
            from kvtop.pictures.page import to_page

            data = to_page(recording, name, span or (recording.first_step, recording.last_step if at is None else at))
        elif is_moving:
            data = _moving(recording, name, form, span, frames or _FRAMES)
        elif form == "png":
            from kvtop.pictures.raster import to_png

            data = to_png(_moment(recording, at), name)
        else:
            data = to_svg(_moment(recording, at), name).encode()
    return _write(data, out)


def diff(left_path: str, right_path: str, *, as_json: bool) -> int:
    """Print the first step at which two recordings differ; exit code 1 when they do.

    Raises:
        RecordingError: One cannot be read.
    """
    with _opened(left_path) as left, _opened(right_path) as right:
        found = first_difference(left, right)
        ends = (left.last_step, right.last_step)
        causes = () if found.step is None else _causes(left, right, found.step)
    if as_json:
        write_out(msgspec.json.encode({**msgspec.to_builtins(found), "causes": causes}).decode())
    elif found.step is not None:
        since = "" if found.same_until is None else f"; the same until step {count(found.same_until)}"
        lines = [f"they differ at step {count(found.step)}{since}", *(f"  {line}" for line in found.what)]
        write_out("\n".join([*lines, *causes]))
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
    with _opened(path) as recording:
        done = rerun(recording)
        damage = recording.damage
    if as_json:
        write_out(msgspec.json.encode(done).decode())
    else:
        compared = f"{count(done.moments)} moments and {count(done.commands)} commands"
        if done.what:
            lines = [f"differs at step {count(done.step)}, after {compared}", *(f"  {line}" for line in done.what)]
            write_out("\n".join([*lines, "in each line the recording comes first, then the run that was run again"]))
        else:
            write_out(f"the same run: {compared}, to step {count(done.step)}")
    if damage is not None:
        say(f"{path} is incomplete: {damage}")
    return EXIT_FAILED if done.what else EXIT_OK


def report_of(moment: Moment) -> dict[str, Any]:
    """Return the report as of one moment; the real time it took is not known."""
    num_host_blocks = 0 if moment.host is None else moment.host.num_blocks
    report = build_report(moment.snapshot, moment.device, 0.0, 0.0, num_host_blocks=num_host_blocks)
    return {**report, "wall_s": None, "engine_s": None}


def _moment(recording: Recording, at: int | None) -> Moment:
    return recording.moment(recording.last if at is None else recording.at(at))


def _moving(recording: Recording, name: str, form: str, span: tuple[int, int] | None, frames: int) -> bytes:
    first, last = span or (recording.first_step, recording.last_step)
    if first > recording.last_step or last < recording.first_step:
        raise UserError(
            f"--steps {first}..{last}: the recording has steps {recording.first_step} to {recording.last_step}"
        )
    numbers = recording.sample(first, last, frames)
    moments = (recording.moment(number) for number in numbers)
    if form == "gif":
        from kvtop.pictures.raster import to_gif

        return to_gif(moments, name)
    from kvtop.pictures.moving import to_moving_svg

    return to_moving_svg(list(moments), name).encode()


def _write(data: bytes, out: str | None) -> int:
    if out is None:
        if not data.endswith(b"\n") and data.startswith(b"<"):
            data += b"\n"
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say(f"the picture could not be written: {error.strerror}")
            return EXIT_FAILED
        return EXIT_OK
    try:
        with Path(out).open("xb") as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out}: {getattr(error, 'strerror', None) or error}") from None
    say(f"written: {out}, {size(len(data))}")
    return EXIT_OK


def _causes(left: Recording, right: Recording, step: int) -> tuple[str, ...]:
    """Return what was different to begin with: options, and the first command, up to the step of a difference."""
    ours, theirs = (msgspec.to_builtins(recording.header.options) for recording in (left, right))
    names = (name for name in ours if name != "speed" and ours[name] != theirs[name])
    found = [f"option {name.replace('_', ' ')}: {ours[name]} and {theirs[name]}" for name in names]
    for a, b in itertools.zip_longest(_commands(left, step), _commands(right, step)):
        if a is None or b is None or (a.step, a.command) != (b.step, b.command):
            told = ["nothing" if c is None else f"{describe(c.command)} at step {count(c.step)}" for c in (a, b)]
            found.append(f"the first other command: {' and '.join(told)}")
            break
    return tuple(found)


def _commands(recording: Recording, step: int) -> list[RecordedCommand]:
    cut_off = recording.header.cut.before if recording.header.cut else ()
    before = [item for item in cut_off if isinstance(item, RecordedCommand)]
    return [item for item in (*before, *recording.commands()) if item.step <= step]


def _told_commands(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield the commands as far as they can be read."""
    with contextlib.suppress(RecordingError):
        for done in recording.commands():
            outcome = done.outcome
            told = {"step": done.step, "command": describe(done.command), "ok": outcome.ok, "message": outcome.message}
            yield told


def _as_object(recording: Recording, moment: Moment) -> dict[str, Any]:
    header = recording.header
    cut_from = header.cut
    return {
        "recording": {
            "kvtop_version": header.kvtop_version,
            "options": msgspec.to_builtins(header.options),
            "every": header.every,
            "first_step": recording.first_step,
            "last_step": recording.last_step,
            "damage": recording.damage,
            "cut": None if cut_from is None else {name: getattr(cut_from, name) for name in _CUT_FIELDS},
            "marks": msgspec.to_builtins(recording.notes),
            "commands": [*_told_commands(recording)],
        },
        "report": report_of(moment),
        "snapshot": msgspec.to_builtins(moment.snapshot),
    }
