"""Cuts a piece out of a recording: a recording of its own, which can be run again wherever the whole one can."""

from __future__ import annotations

import os

import msgspec

from kvtop.errors import KvtopError, UserError
from kvtop.recording.frames import Cut, RecordedCommand
from kvtop.recording.framing import Mark
from kvtop.recording.reader import Recording
from kvtop.recording.writer import RecordingWriter


def cut(recording: Recording, first_step: int, last_step: int, path: str) -> int:
    """Write the moments from ``first_step`` to ``last_step`` to a new file, and return how many there are.

    The piece begins with the last moment at or before ``first_step``, whole; its commands and marks go with it. What
    was done before it, without which the run cannot be repeated, is kept in its head.

    Args:
        recording: What to cut from.
        first_step, last_step: Steps.
        path: A file that is not there yet.

    Raises:
        UserError: It is there already, or the recording has no such steps.
        RecordingError: The recording is damaged in the piece, or before it.
        KvtopError: The piece cannot be written.
    """
    span = f"{recording.first_step} to {recording.last_step}"
    if first_step > recording.last_step or last_step < recording.first_step:
        raise UserError(f"--cut {first_step}..{last_step}: the recording has steps {span}")
    first, last = recording.at(first_step), recording.at(last_step)
    before = recording.before(first)
    source = os.path.basename(recording.name)
    header = msgspec.structs.replace(recording.header, cut=Cut(source, first_step, last_step, before))
    try:
        file = open(path, "xb", buffering=0)  # noqa: SIM115 - the writer closes it
    except (OSError, ValueError) as error:
        raise UserError(f"--out {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        writer = RecordingWriter(file, header)
        moments = _copy(recording, first, last, writer)
        writer.close()
    except BaseException as error:
        file.close()
        os.unlink(path)
        if isinstance(error, OSError):
            raise KvtopError(f"--out {path}: {error.strerror}") from None
        raise
    notes = [note for note in recording.added if recording.step_of(first) <= note.step <= last_step]
    if notes:
        piece = Recording.open(path)
        try:
            piece.add_notes(notes)
        finally:
            piece.close()
    return moments


def _copy(recording: Recording, first: int, last: int, writer: RecordingWriter) -> int:
    moments = 0
    for number, item in recording.stretch(first, last):
        if isinstance(item, RecordedCommand):
            writer.add_command(item)
        else:
            frame, marks = recording.frame(number)
            # What led to the first moment lies before it.
            writer.add_moment(item.snapshot.step, frame, marks if moments else Mark.NONE)
            moments += 1
    return moments
