"""``kvtop run`` and ``kvtop check``: the engine without a screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kvtop.cli.asked import Params, engine_options, metrics_address, record_order
from kvtop.cli.file import Command, with_file
from kvtop.cli.options import BOUND_OPTIONS, ENGINE_OPTIONS, with_options
from kvtop.cli.values import whole
from kvtop.errors import UserError

if TYPE_CHECKING:
    from kvtop.engine_setup import EngineOptions


@click.command("run", cls=Command)
@with_options(ENGINE_OPTIONS)
@with_options(BOUND_OPTIONS)
@click.pass_context
def run_command(ctx: click.Context, /, **params: Any) -> int:
    """Run the engine without a screen and print a report.

    Progress goes to stderr, the report to stdout. Exit code 0: fine; 1: a law was broken or the work
    failed; 2: the request was wrong; 130: interrupted, after the report of what was done.
    """
    return _run_headless(ctx, is_check=False)


@click.command("check", cls=Command)
@with_options(ENGINE_OPTIONS)
@with_options(BOUND_OPTIONS)
@click.option("--threads", type=whole(1, 64), metavar="N", help="Drive the allocator from N threads instead.")
@click.pass_context
def check_command(ctx: click.Context, /, threads: int | None, **params: Any) -> int:
    """Run with every law checked after every step; exit code 1 on a fault.

    With storage, every slot carries a stamp and is read back too (--stamp is implied; with a model, --verify is). Of
    the faults that --inject lets strike, most must be survived: every law holds and the requests get on. A flipped
    bit or a leaked reference must be caught: the check fails, exit code 1, and names the law.

    With --threads, N client threads and an operator use the allocator at random in place of the engine, --steps
    operations in all.
    """
    if threads is None:
        return _run_headless(ctx, is_check=True)
    ctx = with_file(ctx)
    params = ctx.params
    for name in ("trace", "duration", "until_done", "metrics_port", "inject", "publish", "verify", "record"):
        if params[name]:
            raise UserError(f"--{name.replace('_', '-')}: not together with --threads, which runs no engine")
    from kvtop.headless import run_threads

    options = engine_options(ctx, params, speed=None)
    return run_threads(options, threads=threads, operations=params["steps"], as_json=params["as_json"])


def _run_headless(ctx: click.Context, *, is_check: bool) -> int:
    started_s = time.perf_counter()
    from kvtop.driving import Bounds
    from kvtop.headless import run_headless

    def read() -> tuple[Params, EngineOptions]:
        fresh = with_file(ctx)
        options = engine_options(fresh, fresh.params, speed=None)
        return fresh.params, options.with_all_checks() if is_check else options

    params, options = read()
    return run_headless(
        options,
        Bounds(params["steps"], params["duration"], params["until_done"]),
        metrics=metrics_address(params),
        publish=params["publish"],
        record=record_order(params),
        as_json=params["as_json"],
        is_check=is_check,
        started_s=started_s,
        log_format=params["log_format"],
        reload=lambda: read()[1],
    )
