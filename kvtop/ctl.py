"""``kvtop ctl``: one subcommand for each command that an engine or a server takes, made from the command types.

A field without a default is an argument, and so is the first; any other is an option. A tuple takes several values,
and one of block ids takes ranges too.
A new command appears here by itself.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import click
import msgspec

from allocator.commands import Command, command_name
from kvtop.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, SourceError, UserError
from kvtop.panels.command_text import SHORT, block_ids, plain_reason
from kvtop.serving_commands import AnyCommand, ServingCommand

if TYPE_CHECKING:
    from allocator.plans import Plan
    from kvtop.attachment import Attachment

#: Other words for a command's name.
_ALIASES: Final = {"defrag": "compact"}
#: What one types for ``None`` where that is a choice, not an absence.
_NONE_WORDS: Final = {"speed": "max"}
#: Seconds an answer may take when nothing is said.
_DEFAULT_TIMEOUT_S: Final = 60.0
#: Seconds in which a server's buffered cache events are waited for, so that plans and outcomes can tell of them.
_SETTLE_S: Final = 3.0


class _Field(click.ParamType):
    """A value of one field of a command, converted and checked as the field's own type says."""

    def __init__(self, kind: Any, none_word: str | None) -> None:
        self._kind = kind
        self._none_word = none_word
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        word = "whole number" if kind is int else "number" if kind is float else "word"
        self._allowed = f"one of {', '.join(choices)}" if choices else f"a {word}"
        if none_word is not None:
            self._allowed += f", or {none_word}"
        self.name = "|".join(choices) if choices else "N" if kind is int else "X" if kind is float else "TEXT"
        if none_word is not None:
            self.name += f"|{none_word}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if value == self._none_word:
            return None
        try:
            if self._kind in (int, float) and ("_" in value or not value.isascii()):
                raise ValueError(value)
            return msgspec.convert(value.strip(), self._kind, strict=False)
        except (ValueError, msgspec.ValidationError):
            assert param is not None
            raise UserError(f"{_name_of(param)} {value or 'empty'}: {self._allowed}") from None


class _Ids(click.ParamType):
    """Words that name blocks; all of a line are read together, by ``block_ids``."""

    name = "N or N-N, such as 4 10-20"


def _name_of(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else str(param.human_readable_name).lower()


class CtlGroup(click.Group):
    """The group of all commands, made when it is first asked for one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_commands(), "snapshot"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _ALIASES.get(cmd_name, cmd_name)
        if name == "snapshot":
            return click.Command("snapshot", callback=_take_snapshot, help=_take_snapshot.__doc__)
        kind = _commands().get(SHORT.get(name, name))
        return None if kind is None else _make_command(cmd_name, kind)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UserError(f"ctl {args[0]}: no such command; one of {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _commands() -> dict[str, type[AnyCommand]]:
    """Return every command's type by the name one types, ours first, each in the order of its module."""
    found = {}
    for kind in (*typing.get_args(Command), *typing.get_args(ServingCommand)):
        name = command_name(kind)
        found[SHORT.get(name, name)] = kind
    return found


def _make_command(name: str, kind: type[AnyCommand]) -> click.Command:
    """Return the subcommand that sends commands of ``kind``."""
    hints = typing.get_type_hints(kind)
    params: list[click.Parameter] = []
    ids_of = ""
    for index, field in enumerate(msgspec.structs.fields(kind)):
        inner, is_optional, is_many = _unfold(hints[field.name])
        is_required = field.default is msgspec.NODEFAULT
        if is_required or index == 0:
            is_ids = is_many and inner is int
            ids_of = field.name if is_ids else ids_of
            value_type = _Ids() if is_ids else _Field(inner, _NONE_WORDS.get(field.name) if is_optional else None)
            settings: dict[str, Any] = {"required": True} if is_required else {"default": field.default}
            if is_many:
                settings["nargs"] = -1
            if inner is bool:
                settings = {"is_flag": True, "default": field.default}
                params.append(click.Option(["--" + field.name, field.name], **settings))
                continue
            params.append(click.Argument([field.name], type=value_type, **settings))
        else:
            option = "--" + field.name.replace("_", "-")
            shown = "" if field.default is None else f"({field.default})"
            value_type = _Field(inner, None)
            params.append(
                click.Option(
                    [option, field.name],
                    type=value_type,
                    metavar=value_type.name,
                    default=field.default,
                    help=shown,
                )
            )

    def callback(**values: Any) -> int:
        if ids_of:
            values[ids_of] = block_ids(name, values[ids_of])
        try:
            command = msgspec.convert({**values, "type": kind.__name__}, kind)
        except msgspec.ValidationError as error:
            raise UserError(f"{name}: {plain_reason(error, kind)}") from None
        return _send(click.get_current_context().find_object(_Aim) or _Aim(), command)

    text = " ".join((kind.__doc__ or "").replace("``", "").partition("\n\n")[0].split())
    arguments = [p for p in params if isinstance(p, click.Argument)]
    epilog = "; ".join(f"{_name_of(p)}: {p.type.name}" for p in arguments)
    return click.Command(name, params=params, callback=callback, help=text, epilog=epilog)


def _unfold(hint: Any) -> tuple[Any, bool, bool]:
    """Return the type of one value of a field, whether it may be ``None``, and whether there are several."""
    is_optional = is_many = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        is_optional = True
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        is_many, hint = True, typing.get_args(hint)[0]
    return hint, is_optional, is_many


class _Aim(msgspec.Struct):
    """Where a command goes, and how its outcome is told.

    Attributes:
        to: The engine's name, or the address of a server; ``None`` is the only engine that is published.
        as_json: Print one JSON object instead of a line.
        is_dry: Only plan.
        timeout_s: Seconds the answer may take. [s]
        is_sure: Do not ask before a server is changed.
        token_file, ca_file, insecure: How to reach a server; see ``kvtop.sources.remote.fetch.Remote``.
    """

    to: str | None = None
    as_json: bool = False
    is_dry: bool = False
    timeout_s: float = _DEFAULT_TIMEOUT_S
    is_sure: bool = False
    token_file: str | None = None
    ca_file: str | None = None
    insecure: bool = False


def aim(ctx: click.Context, timeout_s: float | None, **options: Any) -> None:
    """Keep the group's options for the subcommand that follows."""
    ctx.obj = _Aim(timeout_s=_DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s, **options)


def _send(aim: _Aim, command: AnyCommand) -> int:
    """Plan ``command`` and, unless only that is wanted, do it. Print what came of it and return the exit code."""
    door = _open(aim)
    try:
        plan = door.operations.plan(command, aim.timeout_s)
        is_wanted = not aim.is_dry and plan.refusal is None and (not door.asks or _confirm(aim, plan))
        outcome = door.operations.apply(command, aim.timeout_s) if is_wanted else None
    finally:
        door.close()
    if aim.as_json:
        told = {"engine": door.name, "command": command, "plan": plan, "outcome": outcome}
        _print(msgspec.json.encode(told).decode())
    if plan.refusal is not None:
        return _refuse(f"{command_name(command)}: {plan.refusal}", EXIT_USAGE)
    if outcome is not None and not outcome.ok:
        return _refuse(outcome.message, EXIT_FAILED)
    if outcome is None and not aim.is_dry:
        return _refuse(f"{command_name(command)}: left undone", EXIT_USAGE)
    if not aim.as_json:
        _print("\n".join(_plan_lines(plan)) if outcome is None else outcome.message)
    return EXIT_OK


class _Door(msgspec.Struct):
    """Where commands go.

    Attributes:
        name: The engine's name, or the server's address.
        operations: The door.
        close: Lets go of it.
        asks: Whether a person has to say yes.
    """

    name: str
    operations: Any
    close: Callable[[], None]
    asks: bool = False


def _open(aim: _Aim) -> _Door:
    from kvtop.sources.local import LocalOperations

    if aim.to is not None and aim.to.startswith(("http://", "https://", "kvcached:")):
        attachment = _attach(aim)
        return _Door(attachment.source.name, attachment.operations, attachment.close, asks=True)
    if aim.is_sure or aim.token_file is not None or aim.ca_file is not None or aim.insecure:
        raise UserError("--yes, --token-file, --ca-file and --insecure: with --to http(s)://HOST:PORT only")
    link = _connect(aim)
    return _Door(link.name, LocalOperations(link), link.close)


def _attach(aim: _Aim) -> Attachment:
    """Return an attachment to the server that is aimed at, once what it has buffered is known."""
    from kvtop.sources.remote.source import RemoteSource
    from kvtop.targets import AttachOptions, open_target

    assert aim.to is not None
    options = AttachOptions(True, aim.token_file, aim.ca_file, aim.insecure)
    attachment = open_target(aim.to, options=options)
    try:
        if isinstance(attachment.source, RemoteSource):
            attachment.source.settle(min(aim.timeout_s, _SETTLE_S))
    except SourceError as error:
        attachment.close()
        raise SourceError(f"{aim.to}: {error}") from None
    return attachment


def _confirm(aim: _Aim, plan: Plan) -> bool:
    """Ask a person whether a server is to be changed."""
    if aim.is_sure:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("--yes is missing: without a terminal nobody can be asked; --dry-run shows the plan")
    click.echo("\n".join(_plan_lines(plan)), err=True)
    return click.confirm("do it?", err=True)


def _take_snapshot() -> int:
    """Print what the engine is like at this moment."""
    from kvtop.model.format import count, percent
    from kvtop.model.observation import Focus
    from kvtop.sources.local import LocalSource

    aim = click.get_current_context().find_object(_Aim) or _Aim()
    link = _connect(aim)
    source = LocalSource(link)
    try:
        seen = source.read(Focus(), aim.timeout_s)
    finally:
        source.close()
    from allocator.metrics import tier_numbers

    snapshot, tiers = seen.snapshot, {}
    for tier, arrays in (("device", seen.device), ("host", seen.host)):
        if arrays is not None:
            tiers[tier] = tier_numbers(arrays, snapshot.block_size, snapshot.slab_size)
    if aim.as_json:
        _print(msgspec.json.encode({"engine": link.name, "snapshot": snapshot, "tiers": tiers}).decode())
        return EXIT_OK
    lines = [
        f"{link.name} (pid {link.pid}): {snapshot.phase} at step {count(snapshot.step)}",
        f"{count(snapshot.num_running)} running, {count(snapshot.num_waiting)} waiting, "
        f"{count(snapshot.num_swapped)} swapped",
    ]
    for tier, n in tiers.items():
        lines.append(
            f"{tier}: {count(n.total)} blocks, {count(n.free)} free, {count(n.cached)} cached, "
            f"{count(n.active)} active, {count(n.reserved)} reserved; "
            f"external fragmentation {percent(n.external_ratio)}"
        )
    _print("\n".join(lines))
    return EXIT_OK


def _connect(aim: _Aim) -> Any:
    from kvtop.sources.named import NamedEngine
    from kvtop.targets import engine_name, only_engine

    try:
        return NamedEngine(only_engine("--to") if aim.to is None else engine_name(aim.to))
    except UserError as error:
        text = str(error)
        raise UserError(text if aim.to is None else f"--to {text}") from None


def _plan_lines(plan: Plan) -> Sequence[str]:
    facts = [
        f"{number:,} {what}"
        for number, what in (
            (plan.moved_bytes, "bytes copied"),
            (plan.evicted_blocks, "cached blocks evicted"),
        )
        if number
    ]
    lines = [f"would {plan.summary}" + (f": {', '.join(facts)}" if facts else "")]
    for effect in plan.effects:
        lines.append(f"  {effect.name}: {_number(effect.before)} → {_number(effect.after)}")
    return lines


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.4g}" if value % 1 else f"{int(value):,}"


def _refuse(text: str, code: int) -> int:
    from kvtop.log import Log

    Log().error(text)
    return code


def _print(text: str) -> None:
    print(text, flush=True)
