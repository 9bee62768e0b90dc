"""Workload files: a load written down as TOML, with the parameters of each component. Every complaint is one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from kvtop.errors import UserError
from kvtop.workloads.catalog import Workload, find_workload
from kvtop.workloads.load import MAX_COMPONENTS, MAX_WEIGHT, Component

#: No load needs more to be written down.
MAX_BYTES: Final = 1 << 20
_TABLE: Final = "component"
_RATE: Final = "rate_per_s"


def read_load(path: str) -> tuple[Component, ...]:
    """Return the components that a workload file describes.

    Each ``[[component]]`` names its ``workload``, and may have a ``weight`` or a ``rate_per_s``, and the workload's own
    parameters.

    Raises:
        UserError: The file cannot be read, is not TOML, or asks for what there is not.
    """
    where = f"--workload-file {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{where}: at most {MAX_BYTES:,} bytes")
    try:
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not TOML: {error}") from None
    for key in document:
        if key != _TABLE:
            raise UserError(f"{where}: {key}: unknown; only [[{_TABLE}]] tables")
    tables = document.get(_TABLE, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{where}: {_TABLE}: written as [[{_TABLE}]]")
    if not 1 <= len(tables) <= MAX_COMPONENTS:
        raise UserError(f"{where}: {len(tables)} components; from 1 to {MAX_COMPONENTS} [[{_TABLE}]] tables")
    return tuple(_component(f"{where}: component {i}", table) for i, table in enumerate(tables, start=1))


def _component(where: str, table: dict[str, Any]) -> Component:
    values = dict(table)
    name = values.pop("workload", None)
    if not isinstance(name, str):
        raise UserError(f"{where}: workload: the name of one, as a string")
    workload = find_workload(name, f"{where}: workload")
    where = f"{where} ({name})"
    weight = values.pop("weight", None)
    if weight is not None:
        if not (isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight <= MAX_WEIGHT):
            raise UserError(f"{where}: weight {_shown(weight)}: a number above 0, at most {MAX_WEIGHT:g}")
        if _RATE in values:
            raise UserError(f"{where}: weight and {_RATE}: one of the two, not both")
    _check_parameters(where, workload, values)
    return Component(workload, None if _RATE in values else weight or 1.0, values)


def _check_parameters(where: str, workload: Workload, values: dict[str, Any]) -> None:
    by_name = {parameter.name: parameter for parameter in workload.parameters}
    for key, value in values.items():
        if key not in by_name:
            raise UserError(f"{where}: {key}: unknown; workload, weight, {', '.join(by_name)}")
        if not by_name[key].accepts(value):
            raise UserError(f"{where}: {key} {_shown(value)}: {by_name[key].allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
