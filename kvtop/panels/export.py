"""Export: what a panel shows as rows, written as JSON or CSV. Owns the files' names; never overwrites one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from allocator.ids import NO_ROW, BlockFlag, BlockState
from kvtop.errors import UserError
from kvtop.model.view import TierView, View
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked

Row = dict[str, Any]


def rows_of(panel: str, view: View, asked: Asked) -> Iterator[Row]:
    """Return what a panel shows: blocks for the map, sequences, events, or a panel's entries."""
    if panel == "map":
        for name, tier in (("device", view.device), ("host", view.host)):
            if tier is not None:
                yield from _blocks(name, tier, view)
    elif panel == "sequences":
        for row in view.snapshot.sequences if view.snapshot else ():
            yield {name: getattr(row, name) for name in row.__struct_fields__}
    elif panel == "events":
        for event in view.events:
            yield {name: getattr(event, name) for name in event.__struct_fields__}
    elif panel == "history":
        series = view.history.series
        for i in range(max(map(len, series.values()), default=0)):
            yield {name: values[i] for name, values in series.items()}
    else:
        for section in CONTENTS[panel](view, asked):
            for entry in section.entries:
                yield {"section": section.title, "label": entry.label, "value": entry.value, "note": entry.note}


def _blocks(name: str, tier: TierView, view: View) -> Iterator[Row]:
    arrays = tier.arrays
    owners = {s.row: s.seq_id for s in view.snapshot.sequences if s.row is not None} if view.snapshot else {}
    for block in range(arrays.num_blocks):
        row = int(arrays.owner[block])
        key = int(arrays.hash64[block])
        yield {
            "tier": name,
            "block": block,
            "state": BlockState(int(arrays.state[block])).name.lower(),
            "ref_count": int(arrays.ref_count[block]),
            "owner": owners.get(row) if name == "device" and row != NO_ROW else None,
            "fill": int(arrays.fill[block]),
            "last_used_step": int(arrays.last_used[block]),
            "hash64": f"{key:016x}" if key else None,
            "pinned": bool(int(arrays.flags[block]) & BlockFlag.PINNED),
            "copying": bool(int(arrays.flags[block]) & BlockFlag.FENCED),
        }


def new_file(panel: str, step: int | None, suffix: str, asked: str | None) -> Path:
    """Return where an export goes: the file asked for, else a new one in the working folder.

    Raises:
        UserError: The file exists.
    """
    if asked:
        path = Path(asked).expanduser()
        if path.exists():
            raise UserError(f"export {asked}: the file exists already")
        return path
    stem = f"kvtop-{panel}" + (f"-step{step}" if step is not None else "")
    for number in range(1000):
        path = Path(f"{stem}{f'-{number}' if number else ''}.{suffix}")
        if not path.exists():
            return path
    raise UserError(f"export {stem}.{suffix}: a thousand such files exist already")


def rows_text(kind: str, rows: Iterable[Row], step: int | None, source: str) -> tuple[str, int]:
    """Return rows as text of that kind, ``csv`` or ``json``, and how many there are."""
    found = list(rows)
    file = io.StringIO(newline="")
    if kind == "csv":
        writer = csv.DictWriter(file, fieldnames=list(found[0]) if found else ["nothing"])
        writer.writeheader()
        writer.writerows(found)
    else:
        json.dump({"schema_version": 1, "source": source, "step": step, "rows": found}, file, indent=1)
        file.write("\n")
    return file.getvalue(), len(found)


def write_rows(path: Path, rows: Iterable[Row], step: int | None, source: str) -> int:
    """Write rows as CSV or JSON, by the file's suffix, and return how many there were.

    Raises:
        UserError: It cannot be written.
    """
    text, number = rows_text(path.suffix.removeprefix("."), rows, step, source)
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"export {path}: {error.strerror}") from None
    return number
