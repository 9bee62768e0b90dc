"""What was asked on the command line, as orders: for the engine, its metrics, its recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

import kvtop
from kvtop.errors import UserError
from kvtop.options_file import OptionsFile

if TYPE_CHECKING:
    from kvtop.console import ConsoleOptions
    from kvtop.engine_setup import EngineOptions
    from kvtop.metrics_address import MetricsAddress
    from kvtop.recording.writer import RecordOrder

Params = dict[str, Any]

#: Where a value may come from, the weakest first.
_STRENGTH: Final = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)


def engine_options(ctx: click.Context, params: Params, *, speed: float | None) -> EngineOptions:
    """Return what was asked of the engine; ``speed`` is the pace when none was asked for.

    Raises:
        UserError: Two options contradict each other.
    """
    from kvtop.engine_setup import ATTACHED, EngineOptions

    _refuse_both(ctx, params, "num_swap_blocks", "swap_ratio")
    for first, second in (("workload", "trace"), ("workload_file", "trace"), ("workload", "workload_file")):
        _refuse_both(ctx, params, first, second)
    if params["workload"] == ATTACHED and params["publish"] is None:
        raise UserError(f"--workload {ATTACHED}: only together with --publish NAME, by which programs attach")
    if params["trace"] is not None:
        for name, option in (("num_requests", "--requests"), ("rate_scale", "--rate"), ("size_scale", "--size")):
            if params[name] is not None:
                raise UserError(f"{option} {params[name]:g}: only for a synthetic workload, not together with --trace")
    if params["trace"] is None and (params["trace_format"] is not None or params["skip_bad"]):
        option = "--skip-bad" if params["trace_format"] is None else f"--trace-format {params['trace_format']}"
        raise UserError(f"{option}: only together with --trace FILE")
    asked = {
        name: value
        for name, value in params.items()
        if name in EngineOptions.__struct_fields__ and name != "speed" and value is not None
    }
    if ctx.get_parameter_source("speed") is not ParameterSource.DEFAULT:
        speed = params["speed"]
    return EngineOptions(
        **asked,
        prefix_cache=not params["no_prefix_cache"],
        reuse_distances=not params["no_reuse_distances"],
        speed=speed,
    )


def _refuse_both(ctx: click.Context, params: Params, first: str, second: str) -> None:
    """Refuse two options that contradict each other; the command line beats the environment, and that the file."""
    if params[first] is None or params[second] is None:
        return
    strengths = {name: _STRENGTH.index(ctx.get_parameter_source(name)) for name in (first, second)}
    if strengths[first] == strengths[second]:
        by_name = {p.name: p.opts[0] for p in ctx.command.params}
        raise UserError(
            f"{by_name[first]} {params[first]} and {by_name[second]} {params[second]}: one of the two, not both"
        )
    params[min(strengths, key=strengths.__getitem__)] = None


def metrics_address(params: Params) -> MetricsAddress | None:
    if params["metrics_port"] is None:
        for name in ("metrics_host", "metrics_tls_cert", "metrics_tls_key", "metrics_auth", "compat"):
            if params[name] is not None:
                raise UserError(f"--{name.replace('_', '-')} {params[name]}: only together with --metrics-port N")
        return None
    if (params["metrics_tls_cert"] is None) != (params["metrics_tls_key"] is None):
        given, missing = ("cert", "key") if params["metrics_tls_key"] is None else ("key", "cert")
        raise UserError(
            f"--metrics-tls-{given} {params[f'metrics_tls_{given}']}: only together with --metrics-tls-{missing} FILE"
        )
    from kvtop.metrics_address import MetricsAddress

    return MetricsAddress(
        params["metrics_host"] or "127.0.0.1",
        params["metrics_port"],
        params["metrics_tls_cert"],
        params["metrics_tls_key"],
        params["metrics_auth"],
        params["compat"],
    )


def record_order(params: Params) -> RecordOrder | None:
    if params["record"] is None:
        if params["record_every"] is not None:
            raise UserError(f"--record-every {params['record_every']}: only together with --record FILE")
        return None
    from kvtop.recording.writer import RecordOrder

    return RecordOrder(params["record"], params["record_every"], kvtop.__version__)


def asks_for_plain(ctx: click.Context, params: Params) -> bool:
    """Return whether lines of text are wanted instead of a screen.

    Raises:
        UserError: An option was given that belongs to the other.
    """
    for name, option in (("once", "--once"), ("panels", "--panel")):
        if params[name] and not params["plain"]:
            raise UserError(f"{option}: only together with --plain")
    if params["plain"]:
        for name, option in (("theme", "--theme"), ("ascii_only", "--ascii"), ("metrics_port", "--metrics-port")):
            if params[name] and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UserError(f"{option}: not together with --plain")
    return bool(params["plain"])


def console_options(ctx: click.Context) -> ConsoleOptions:
    """Return how the console is to look and behave, of a context made by ``with_file`` or ``with_look``."""
    from kvtop.console import ConsoleOptions

    params = ctx.params
    return ConsoleOptions(
        theme=params["theme"],
        ascii_only=params["ascii_only"],
        refresh_hz=1 / (params["refresh_s"] or 0.1),
        remember=not params["no_remember"],
        tables=ctx.default_map.tables if isinstance(ctx.default_map, OptionsFile) else {},
    )
