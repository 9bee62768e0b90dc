"""Commands whose options may also stand in the configuration file."""

from __future__ import annotations

from typing import Any

import click

from kvtop.cli.options import BOUND_OPTIONS, CONFIG, ENGINE_OPTIONS, LOOK_OPTIONS, with_options
from kvtop.options_file import read_options_file


@click.command()
@with_options(ENGINE_OPTIONS)
@with_options(BOUND_OPTIONS)
@with_options(LOOK_OPTIONS)
def _allowed(**_params: Any) -> None:
    """Carries the options that a file may hold."""


class Command(click.Command):
    """A command that remembers its arguments, to be read again with a file's values in place of defaults."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[f"{__name__}.{ctx.info_name}"] = tuple(args)
        return super().parse_args(ctx, args)


class Group(Command, click.Group):
    """The same for a group."""


@click.command()
@with_options(LOOK_OPTIONS)
def _look(**_params: Any) -> None:
    """Carries the options of every console."""


def with_look(ctx: click.Context) -> click.Context:
    """Do the same as ``with_file`` for how a console looks alone: of the rest, the file speaks of another engine."""
    return with_file(ctx, frozenset(str(p.name) for p in _look.params))


def with_file(ctx: click.Context, wanted: frozenset[str] | None = None) -> click.Context:
    """Return the context of the same command line with the values of the configuration file as defaults.

    Args:
        ctx: The context as it was first made.
        wanted: Names of the parameters that the file may set; ``None`` is all that the command has.

    Raises:
        UserError: The file cannot be used, or a value in it is not allowed.
    """
    options = [p for p in _allowed.params if isinstance(p, click.Option) and p.envvar and p.opts[0] != CONFIG]
    here = {p.name for p in ctx.command.params} if wanted is None else wanted
    values = read_options_file(
        ctx.params["config"],
        {p.opts[0].lstrip("-"): str(p.name) for p in options},
        frozenset(p.opts[0].lstrip("-") for p in options if p.multiple),
    )
    for name in set(values) - here:
        del values[name]  # an option of another command
    args = list(ctx.meta[f"{__name__}.{ctx.info_name}"])
    return ctx.command.make_context(ctx.info_name, args, parent=ctx.parent, default_map=values)
