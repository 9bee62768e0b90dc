"""``kvtop attach`` and ``ctl``: engines that others started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from kvtop.cli.asked import Params, asks_for_plain, console_options, metrics_address
from kvtop.cli.file import Command, with_look
from kvtop.cli.options import CONFIG_OPTION, CONSOLE_OPTIONS, LOG_OPTION, with_options
from kvtop.cli.values import SECONDS, WORD, whole
from kvtop.ctl import CtlGroup, aim
from kvtop.errors import UserError

if TYPE_CHECKING:
    from kvtop.targets import AttachOptions


TARGET_OPTIONS: Final = (
    click.option("--events", multiple=True, metavar="ADDR", help="Its cache events: tcp://HOST:5557; one a rank."),
    click.option("--replay", multiple=True, metavar="ADDR", help="Where it replays them, such as tcp://HOST:5558."),
    click.option("--topic", default="", metavar="T", help="Topic of its cache events (all)."),
    click.option("--token-file", metavar="FILE", help="Send the first line of this file as a bearer token."),
    click.option("--ca-file", metavar="FILE", help="Trust these certificates instead of the system's."),
    click.option("--insecure", is_flag=True, help="Trust any certificate."),
)


def attach_options(params: Params) -> AttachOptions:
    """Return how to attach."""
    from kvtop.targets import AttachOptions

    return AttachOptions(
        params["allow_operations"],
        params["token_file"],
        params["ca_file"],
        params["insecure"],
        params["events"],
        params["replay"],
        params["topic"],
    )


@click.command("attach", cls=Command)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "--allow-operations",
    is_flag=True,
    help="Let the capitals act on it, not only look; they ask first.",
)
@with_options(TARGET_OPTIONS)
@click.option("--headless", is_flag=True, help="No screen: serve its metrics until stopped (--metrics-port).")
@click.option("--metrics-port", type=whole(0, 65535), help="Where to serve them; 0 takes a free port.")
@click.option("--metrics-host", metavar="H", help="Address to serve them on (127.0.0.1).")
@click.option("--metrics-tls-cert", metavar="FILE", help="Serve them over TLS with this certificate chain, in PEM.")
@click.option("--metrics-tls-key", metavar="FILE", help="Its key, in PEM, without a passphrase.")
@click.option("--metrics-auth", metavar="FILE", help="Ask for a user and a password: lines of USER:PASSWORD.")
@LOG_OPTION
@with_options(CONSOLE_OPTIONS)
@CONFIG_OPTION
@click.pass_context
def attach_command(ctx: click.Context, /, targets: tuple[str, ...], headless: bool, **params: Any) -> int:
    """Open the console on a running engine, which goes on when the console is closed.

    TARGET is local:NAME, an engine that was published by that name, local for the only one there is, or
    http(s)://HOST:PORT, a server of vLLM, SGLang, llama.cpp, TensorRT-LLM, TGI, or a kvtop exporter, or
    prometheus+http(s)://HOST:PORT, all engines that a Prometheus, Thanos, Mimir or VictoriaMetrics scrapes, or
    kvcached:NAME, a pool of kvcached here, or recording:FILE. Without it, this machine is looked at: published engines,
    and the ports that engines usually take. Several are one table.
    """
    options = attach_options(params)
    address = metrics_address({**params, "compat": None})
    if headless != (address is not None):
        raise UserError("--headless and --metrics-port N: only together")
    if headless and options.allow_operations:
        raise UserError("--allow-operations: not with --headless, where nobody could be asked")
    ctx = with_look(ctx)
    is_plain = asks_for_plain(ctx, ctx.params)
    if is_plain and options.allow_operations:
        raise UserError("--allow-operations: not with --plain, where nobody could be asked")
    look = console_options(ctx)
    if not targets:
        from kvtop.discovery import choose, discover

        can_ask = not headless and sys.stdin is not None and sys.stdin.isatty()
        ask = (lambda text: click.prompt(text, prompt_suffix="", err=True)) if can_ask else None
        targets = (choose(discover(), ask),)
    if address is not None:
        from kvtop.exporting import run_exporting

        return run_exporting(targets, options, address=address, log_format=params["log_format"])
    from kvtop.console import run_attached, run_attached_plain

    if is_plain:
        every_s = params["refresh_s"] or 2.0
        return run_attached_plain(targets, options, every_s=every_s, once=params["once"], panels=params["panels"])
    return run_attached(targets, options, look)


@click.group("ctl", cls=CtlGroup, no_args_is_help=False)
@click.option("--to", metavar="TARGET", type=WORD, help="NAME, or http(s)://HOST:PORT (the only published engine).")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show the plan and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: command, plan and outcome.")
@click.option("--timeout", "timeout_s", type=SECONDS, metavar="S", help="Seconds the answer may take (60).")
@click.option("--yes", "is_sure", is_flag=True, help="A server: do not ask before it is changed.")
@click.option("--token-file", metavar="FILE", help="A server: send the first line of this file as a bearer token.")
@click.option("--ca-file", metavar="FILE", help="A server: trust these certificates instead of the system's.")
@click.option("--insecure", is_flag=True, help="A server: trust any certificate.")
@click.pass_context
def ctl_group(ctx: click.Context, /, **params: Any) -> None:
    """Drive a running kvtop that was published by a name, or a server of vLLM, SGLang or llama.cpp by its address.

    A server's commands begin with reset-prefix-cache. They are asked for once, and what came of them is looked up.

    Exit code 0: done; 1: it failed; 2: it was refused, nothing changed; 3: the engine could not be reached.
    """
    aim(ctx, **params)
