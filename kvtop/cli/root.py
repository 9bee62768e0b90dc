"""``kvtop`` itself: the console, when no command is given."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

import kvtop
from kvtop.cli.asked import asks_for_plain, console_options, engine_options, metrics_address, record_order
from kvtop.cli.benches import bench_group
from kvtop.cli.exports import export_group
from kvtop.cli.file import Group, with_file
from kvtop.cli.learning import learn_command
from kvtop.cli.options import BOUND_OPTIONS, CONFIG_OPTION, CONSOLE_OPTIONS, ENGINE_OPTIONS, with_options
from kvtop.cli.replaying import replay_command
from kvtop.cli.running import check_command, run_command
from kvtop.cli.serving import serve_command
from kvtop.cli.watching import attach_command, ctl_group
from kvtop.errors import EXIT_OK, UserError
from kvtop.options_file import OptionsFile


@click.group(
    cls=Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every option can also be set as KVTOP_…, such as KVTOP_BLOCKS=8192, or in kvtop.toml (--config).",
)
@with_options(ENGINE_OPTIONS)
@with_options(BOUND_OPTIONS[:1])
@with_options(CONSOLE_OPTIONS)
@click.option("--in-process", is_flag=True, help="Run the engine in the console's own process, for tests.")
@click.version_option(kvtop.__version__, "--version", prog_name="kvtop", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, /, in_process: bool, **params: Any) -> int:
    """See a paged KV cache live, block by block, and act on it.

    Without a command: the console on the embedded engine.
    """
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
                raise UserError(
                    f"{param.opts[0]}: options go after the command: kvtop {ctx.invoked_subcommand} {param.opts[0]} …"
                )
        return EXIT_OK
    ctx = with_file(ctx)
    params = {**params, **ctx.params}
    if asks_for_plain(ctx, params):
        from kvtop.console import run_plain

        return run_plain(
            engine_options(ctx, params, speed=1.0),
            max_steps=params["steps"],
            in_process=in_process,
            publish=params["publish"],
            every_s=params["refresh_s"] or 2.0,
            once=params["once"],
            panels=params["panels"],
        )
    from kvtop.console import run_console

    return run_console(
        engine_options(ctx, params, speed=1.0),
        console_options(ctx),
        publish=params["publish"],
        max_steps=params["steps"],
        metrics=metrics_address(params),
        in_process=in_process,
        record=record_order(params),
    )


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@CONFIG_OPTION
def doctor_command(as_json: bool, config: str | None) -> int:
    """Look at the terminal, Python, torch, GPUs and files.

    Each line is good, missing (kvtop works without it), stale (left by what has ended) or a problem, with what to do.
    Exit code 1 on a problem, else 0.
    """
    from kvtop.doctor import examine, run_doctor

    return run_doctor(as_json=as_json, findings=lambda: examine(lambda: _read_file(config)))


def _read_file(path: str | None) -> OptionsFile:
    """Return the configuration file with all in it checked, as the console would."""
    from kvtop.tui.settings import read_settings

    file = with_file(cli.make_context("kvtop", [] if path is None else ["--config", path])).default_map
    assert isinstance(file, OptionsFile)
    read_settings(file.tables)
    return file


for _command in (
    run_command,
    check_command,
    replay_command,
    learn_command,
    attach_command,
    serve_command,
    ctl_group,
    doctor_command,
    bench_group,
    export_group,
):
    cli.add_command(_command)
