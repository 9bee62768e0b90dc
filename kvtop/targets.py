"""Targets: what ``kvtop attach`` may be given, and how each becomes an attachment. One line for each kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvtop.attachment import Attachment
from kvtop.audit import AuditLog, audit_path
from kvtop.errors import SourceError, UserError
from kvtop.local_socket import listeners, socket_path
from kvtop.operations import Operations, ReadOnly
from kvtop.recording.reader import Recording
from kvtop.sources.kvcached import KvcachedOperations, KvcachedSource, PoolFile
from kvtop.sources.local import LocalOperations, LocalSource
from kvtop.sources.member import ONE_OF_SEVERAL, LocalMember
from kvtop.sources.named import NamedEngine
from kvtop.sources.recorded import RecordedOperations, RecordedSource
from kvtop.sources.remote.fleet import Fleet
from kvtop.sources.remote.operations import RemoteOperations
from kvtop.sources.remote.prometheus import SCHEME, PrometheusFleet
from kvtop.sources.remote.source import EventOptions, RemoteSource

KVCACHED: Final = "kvcached:"
_HTTP: Final = ("http://", "https://")
_LOCAL: Final = "local:"
READ_ONLY: Final = "attached to look only; --allow-operations lets you act"


class AttachOptions(msgspec.Struct, frozen=True):
    """How to attach, besides to what.

    Attributes:
        allow_operations: Let commands through; without it, the door refuses them.
        token_file, ca_file, insecure: For engines over HTTP; see ``kvtop.sources.remote.fetch.Remote``.
        events: Streams of cache events, for engines over HTTP that do not tell of theirs.
    """

    allow_operations: bool = False
    token_file: str | None = None
    ca_file: str | None = None
    insecure: bool = False
    events: tuple[str, ...] = ()
    replays: tuple[str, ...] = ()
    topic: str = ""


#: Opens a target of one kind.
Opener = Callable[[str, AttachOptions], Attachment]


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


def open_target(text: str, *, allow_operations: bool = False, options: AttachOptions | None = None) -> Attachment:
    """Return an attachment to the engine that ``text`` names.

    Args:
        text: The target as the user wrote it.
        allow_operations: Let commands through; without it, the door refuses them.
        options: How to attach; instead of ``allow_operations``.

    Raises:
        UserError: It is no target, or it names several engines.
        SourceError: The engine cannot be reached.
    """
    options = options or AttachOptions(allow_operations)
    for kind in TARGET_KINDS:
        if text.startswith(kind.prefixes):
            return kind.open(text, options)
    forms = ", ".join(kind.form for kind in TARGET_KINDS)
    raise UserError(f"{text or 'an empty target'}: a target is one of {forms}")


def open_targets(texts: Sequence[str], options: AttachOptions) -> Attachment:
    """Return an attachment to one engine, or to several, over the network and on this machine, as one fleet.

    Raises:
        UserError: One of several is neither, is named twice, or options for a single one are given.
        SourceError: The engine cannot be reached.
    """
    if len(texts) == 1:
        return open_target(texts[0], options=options)
    if options.events or options.replays or options.allow_operations:
        raise UserError("--events, --replay and --allow-operations: with one target only")
    for text in texts:
        if not text.startswith((*_HTTP, _LOCAL)):
            raise UserError(f"{text}: of several targets each is local:NAME or http(s)://HOST:PORT")
        if texts.count(text) > 1:
            raise UserError(f"{text}: named twice")
    sources: list[RemoteSource | LocalMember] = []
    try:
        for text in texts:
            sources.append(_member(text, options))
        if len({source.name for source in sources}) < len(sources):
            raise UserError("two of the targets are the same server")
    except UserError:
        for source in sources:
            source.close()
        raise
    return Attachment(Fleet(sources), ReadOnly(ONE_OF_SEVERAL))


def _member(text: str, options: AttachOptions) -> RemoteSource | LocalMember:
    """Return one of several: an engine on this machine is waited for, as a server is."""
    if not text.startswith(_LOCAL):
        return RemoteSource(text, token_file=options.token_file, ca_file=options.ca_file, insecure=options.insecure)
    name = text.removeprefix(_LOCAL)
    socket_path(name)  # whether it is a name is told at once

    def connect() -> LocalSource:
        link = NamedEngine(name)
        return LocalSource(link, text, missing=link.missing, renew=link.renew)

    return LocalMember(text, connect)


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


def _open_local(text: str, options: AttachOptions) -> Attachment:
    """Open ``local:NAME``, or ``local``: the only published engine."""
    word, _, name = text.partition(":")
    if word != "local":
        raise UserError(f"{text}: local:NAME, or local for the only published engine")
    if options.events or options.replays or options.token_file or options.ca_file or options.insecure:
        raise UserError(
            f"{text}: --events, --replay, --token-file, --ca-file and --insecure are for http(s)://HOST:PORT"
        )
    link = NamedEngine(name or only_engine(text))
    operations: Operations = LocalOperations(link) if options.allow_operations else ReadOnly(READ_ONLY)
    missing = {**({} if options.allow_operations else {"operations": READ_ONLY}), **link.missing}
    return Attachment(LocalSource(link, f"local:{link.name}", missing=missing, renew=link.renew), operations)


def _open_http(text: str, options: AttachOptions) -> Attachment:
    source = RemoteSource(
        text,
        token_file=options.token_file,
        ca_file=options.ca_file,
        insecure=options.insecure,
        events=EventOptions(options.events, options.replays, options.topic).endpoints(),
        may_operate=options.allow_operations,
    )
    if not options.allow_operations:
        return Attachment(source, ReadOnly(source.missing["operations"]))
    return Attachment(source, RemoteOperations(source, AuditLog(audit_path())))


def _open_prometheus(text: str, options: AttachOptions) -> Attachment:
    if options.allow_operations:
        raise UserError(f"--allow-operations: {text} can only be looked at; local:NAME can be acted on")
    if options.events or options.replays:
        raise UserError(f"{text}: --events and --replay are for an engine's own address, http(s)://HOST:PORT")
    source = PrometheusFleet(
        text.removeprefix(SCHEME),
        token_file=options.token_file,
        ca_file=options.ca_file,
        insecure=options.insecure,
    )
    return Attachment(source, ReadOnly(source.missing["operations"]))


def _open_recording(text: str, options: AttachOptions) -> Attachment:
    """Open ``recording:FILE``, played at the pace at which the engine's time went by."""
    if options != AttachOptions(options.allow_operations):
        raise UserError(f"{text}: of the options to attach, none is for a recording")
    path = text.removeprefix("recording:")
    source = RecordedSource(Recording.open(path), name=os.path.basename(path))
    return Attachment(source, RecordedOperations(source))


def _open_kvcached(text: str, options: AttachOptions) -> Attachment:
    if options.events or options.replays or options.token_file or options.ca_file or options.insecure:
        raise UserError(
            f"{text}: --events, --replay, --token-file, --ca-file and --insecure are for http(s)://HOST:PORT"
        )
    pool = PoolFile(text.removeprefix(KVCACHED))
    source = KvcachedSource(pool, may_operate=options.allow_operations)
    if not options.allow_operations:
        return Attachment(source, ReadOnly(source.missing["operations"]))
    return Attachment(source, KvcachedOperations(pool, AuditLog(audit_path())))


#: Every kind of target; the first whose prefix fits is taken.
TARGET_KINDS: Final = (
    TargetKind("local:NAME or local", ("local",), _open_local),
    TargetKind("http(s)://HOST:PORT", _HTTP, _open_http),
    TargetKind("kvcached:NAME", (KVCACHED,), _open_kvcached),
    TargetKind(f"{SCHEME}http(s)://HOST:PORT[/PATH]", (SCHEME,), _open_prometheus),
    TargetKind("recording:FILE", ("recording:",), _open_recording),
)
