"""Targets: what ``kvtop attach`` may be given, and how each becomes an attachment. One line for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtop.attachment import Attachment
from kvtop.errors import SourceError, UserError
from kvtop.local_socket import listeners
from kvtop.operations import Operations, ReadOnly
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.named import NamedEngine

READ_ONLY: Final = "attached to look only; --allow-operations lets you act"

#: Opens a target of one kind: the text behind the kind's word, and whether operations are allowed.
Opener = Callable[[str, bool], Attachment]


@dataclass(frozen=True, slots=True)
class TargetKind:
    """One kind of target.

    Attributes:
        form: How it is written.
        prefixes: What a target of this kind begins with.
        open: Returns an attachment to it.
    """

    form: str
    prefixes: tuple[str, ...]
    open: Opener


def open_target(text: str, *, allow_operations: bool = False) -> Attachment:
    """Return an attachment to the engine that ``text`` names.

    Args:
        text: The target as the user wrote it.
        allow_operations: Let commands through; without it, the door refuses them.

    Raises:
        UserError: It is no target, or it names several engines.
        SourceError: The engine cannot be reached.
    """
    for kind in TARGET_KINDS:
        if text.startswith(kind.prefixes):
            return kind.open(text, allow_operations)
    forms = ", ".join(kind.form for kind in TARGET_KINDS)
    raise UserError(f"{text or 'an empty target'}: a target is one of {forms}")


def only_engine(option: str) -> str:
    """Return the name of the only published engine; ``option`` is what a choice among several would be given to.

    Raises:
        UserError: There are several; names them.
        SourceError: There is none.
    """
    found = listeners()
    if not found:
        raise SourceError("no engine is published on this machine; kvtop run --publish NAME starts one")
    if len(found) > 1:
        raise UserError(f"{option}: several engines are published: {', '.join(map(str, found))}; name one")
    return found[0].name


def engine_name(text: str) -> str:
    """Return the engine's name in ``NAME`` or ``local:NAME``."""
    return text.removeprefix("local:")


def _open_local(text: str, allow_operations: bool) -> Attachment:
    """Open ``local:NAME``, or ``local``: the only published engine."""
    word, _, name = text.partition(":")
    if word != "local":
        raise UserError(f"{text}: local:NAME, or local for the only published engine")
    link = NamedEngine(name or only_engine(text))
    operations: Operations = LocalOperations(link) if allow_operations else ReadOnly(READ_ONLY)
    missing = {} if allow_operations else {"operations": READ_ONLY}
    return Attachment(LocalSource(link, f"local:{link.name}", missing=missing), operations)


def _open_http(text: str, allow_operations: bool) -> Attachment:
    raise UserError(f"{text}: engines over HTTP cannot be attached to by this version of kvtop; local:NAME can")


#: Every kind of target; the first whose prefix fits is taken.
TARGET_KINDS: Final = (
    TargetKind("local:NAME or local", ("local",), _open_local),
    TargetKind("http(s)://HOST:PORT", ("http://", "https://"), _open_http),
)
