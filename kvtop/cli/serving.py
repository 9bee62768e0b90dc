"""``kvtop serve``: the console in a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from kvtop.cli.asked import console_options, engine_options, metrics_address, record_order
from kvtop.cli.file import Command, with_file, with_look
from kvtop.cli.options import BOUND_OPTIONS, ENGINE_OPTIONS, LOG_OPTION, LOOK_OPTIONS, with_options
from kvtop.cli.values import whole
from kvtop.cli.watching import TARGET_OPTIONS, attach_options
from kvtop.errors import UserError


@click.command("serve", cls=Command)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("--host", metavar="H", default="127.0.0.1", help="Address to serve on (127.0.0.1).")
@click.option("--port", type=whole(0, 65535), metavar="N", default="8000", help="Port; 0 takes a free one (8000).")
@click.option("--public-url", metavar="URL", help="Where a proxy in front of it is reached, as https://HOST.")
@click.option("--allow-operations", is_flag=True, help="Let browsers act on the engine, not only look.")
@with_options(LOOK_OPTIONS)
@with_options(TARGET_OPTIONS)
@with_options(ENGINE_OPTIONS)
@with_options(BOUND_OPTIONS[:1])
@LOG_OPTION
@click.pass_context
def serve_command(ctx: click.Context, /, targets: tuple[str, ...], **params: Any) -> int:
    """Show the console in browsers, on http://127.0.0.1:8000/, until stopped.

    Without TARGET it shows an engine of its own, with the options of kvtop; with one, a running engine, with the
    options of kvtop attach. Every tab has a console of its own, and all of them show the same engine.

    Browsers may look, not act, unless --allow-operations says so. There is no password: on any --host but this
    machine's own, put a proxy that asks for one in front.
    """
    _refuse_the_others(ctx, with_target=bool(targets))
    ctx = with_look(ctx) if targets else with_file(ctx)
    params = {**params, **ctx.params}
    from kvtop.browser.serving import ServeOptions, serve_engine, serve_targets

    serve = ServeOptions(
        params["host"],
        params["port"],
        params["public_url"],
        params["allow_operations"],
        console_options(ctx),
        params["log_format"],
    )
    if targets:
        return serve_targets(targets, attach_options(params), serve)
    return serve_engine(
        engine_options(ctx, params, speed=1.0),
        serve,
        max_steps=params["steps"],
        publish=params["publish"],
        record=record_order(params),
        metrics=metrics_address(params),
    )


def _refuse_the_others(ctx: click.Context, *, with_target: bool) -> None:
    """Refuse an option of the engine beside a target, and one of attaching without a target."""
    wrong = _names((*ENGINE_OPTIONS, *BOUND_OPTIONS[:1])) - {"config"} if with_target else _names(TARGET_OPTIONS)
    for param in ctx.command.params:
        if param.name in wrong and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise UserError(f"{param.opts[0]}: only {'without' if with_target else 'together with a'} TARGET")


def _names(options: Sequence[Callable[[Any], Any]]) -> set[str]:
    """Return the parameters that options are given as."""

    @click.command()
    @with_options(options)
    def carrier(**_params: Any) -> None:
        """Carries them."""

    return {str(param.name) for param in carrier.params}
