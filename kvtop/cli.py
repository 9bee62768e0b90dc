"""The command line: options, exit codes, and one clear line for whatever is wrong. Everything heavy is imported late.

Every failure ends here: a ``KvtopError`` carries its exit code, the allocator's errors map to
"wrong request" or "failed", and click's own messages are rewritten to the same one-line form.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click
from click.core import ParameterSource

import kvtop
from allocator.config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_LOAD_SCALE, MAX_PREFILL_TOKENS, MIN_LOAD_SCALE
from allocator.errors import EMPTY, AllocatorError, ConfigError
from allocator.fault_kinds import DEFAULT_RATE, FAULT_KINDS, FAULTS, parse_rate
from allocator.geometry import GEOMETRY_NAMES
from kvtop.ctl import CtlGroup, aim
from kvtop.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, KvtopError, UserError
from kvtop.log import LOG_FORMATS, LogFormat
from kvtop.options_file import OptionsFile, read_options_file

if TYPE_CHECKING:
    from kvtop.engine_setup import EngineOptions
    from kvtop.metrics_address import MetricsAddress
    from kvtop.recording.writer import RecordOrder

Params = dict[str, Any]
_F = TypeVar("_F", bound=Callable[..., Any])

MAX_SPEED: Final = 1_000_000.0
#: Where a value may come from, the weakest first.
_STRENGTH: Final = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)


class _Value(click.ParamType):
    """A value with one sentence that says what is allowed; a bad one is a ``UserError`` naming option and value."""

    def __init__(self, name: str, allowed: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.allowed = allowed
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value.strip())
        except ValueError:
            raise UserError(f"{_given_as(param, ctx)} {value.strip() or EMPTY}: {self.allowed}") from None


class _Flag(click.types.BoolParamType):
    """A flag; from the environment also a word for yes or no, and a bad one is a ``UserError`` as any bad value is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            allowed = "1, true, yes or on; 0, false, no or off"
            raise UserError(f"{_given_as(param, ctx)} {value}: {allowed}") from None


def _given_as(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Return how the user gave a value: the option's name, its environment variable's, or its line in the file."""
    assert param is not None
    source = ctx.get_parameter_source(param.name) if ctx is not None and param.name else None
    if source is ParameterSource.ENVIRONMENT:
        return str(param.envvar)
    if source is ParameterSource.DEFAULT_MAP and ctx is not None and isinstance(ctx.default_map, OptionsFile):
        return f"{ctx.default_map.path}: {param.opts[0].lstrip('-')}"
    return param.opts[0]


def _whole(low: int, high: int) -> _Value:
    def parse(text: str) -> int:
        number = int(_plain(text))
        if not low <= number <= high:
            raise ValueError
        return number

    return _Value("N", f"a whole number from {low} to {high}", parse)


def _real(low: float, high: float, allowed: str, *, also: str | None = None) -> _Value:
    """A finite number from ``low`` to ``high``, or the word ``also``, which becomes ``None``."""

    def parse(text: str) -> float | None:
        if text == also:
            return None
        number = float(_plain(text))
        if not (math.isfinite(number) and low <= number <= high):
            raise ValueError
        return number

    return _Value("X", allowed, parse)


def _plain(text: str) -> str:
    """Return a number's text unless only Python takes it for one: with underscores, or in another script's digits."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _one_of(*names: str) -> _Value:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return _Value("|".join(names), f"one of {', '.join(names)}" if len(names) > 1 else f"only {names[0]}", parse)


def _some_of(*names: str) -> _Value:
    """Several of ``names``, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(name.strip() for name in text.split(","))
        if not set(chosen) <= set(names):
            raise ValueError
        return chosen

    return _Value("A,B", f"some of {', '.join(names)}, with commas between them", parse)


_WORD: Final = _Value("TEXT", "needs a value", _word)
_FAULT: Final = _Value(
    "KIND[:RATE]",
    f"KIND or KIND:RATE, KIND one of {', '.join(FAULT_KINDS)}, RATE above 0 and at most 1",
    parse_rate,
)
_RATIO: Final = _real(0, 1, "a number from 0 to 1")
_SPEED: Final = _real(1e-6, MAX_SPEED, "a number above 0 and at most 1000000, or max", also="max")
_SCALE: Final = _real(MIN_LOAD_SCALE, MAX_LOAD_SCALE, f"a number from {MIN_LOAD_SCALE:g} to {MAX_LOAD_SCALE:g}")
_SECONDS: Final = _real(1e-3, 1e9, "a number of seconds above 0")


def _list_workloads(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:
    """Print one line a workload and end the command."""
    if not is_asked or ctx.resilient_parsing:
        return
    from kvtop.workloads.catalog import workload_lines

    click.echo("\n".join(workload_lines()))
    ctx.exit(EXIT_OK)


def _duration(text: str) -> str:
    """A duration as Prometheus writes it."""
    if not re.fullmatch(r"(?=[0-9])([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?", text):
        raise ValueError(text)
    return text


def _hold(text: str) -> tuple[str | None, str]:
    name, equals, duration = text.rpartition("=")
    if equals and not name:
        raise ValueError(text)
    return name or None, _duration(duration)


def _threshold(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    if not name or not math.isfinite(value := float(_plain(number))):
        raise ValueError(text)
    return name, value


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+", host) or not 0 < int(_plain(port)) < 65536:
        raise ValueError(text)
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z_.:/-]+", text):
        raise ValueError(text)
    return text


_DURATION: Final = _Value("D", "a duration such as 30s, 5m or 1h30m", _duration)
_HOLD: Final = _Value("[ALERT=]D", "a duration such as 30s, 5m or 1h30m, or ALERT=DURATION", _hold)
_THRESHOLD: Final = _Value("ALERT=X", "ALERT=NUMBER", _threshold)
_HOST_PORT: Final = _Value("HOST:PORT", "HOST:PORT", _host_port)
_LABEL: Final = _Value("NAME", "letters, digits, and any of _ . : / -", _label)


def _option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """A click option that is also read from ``KVTOP_…``, without a default: absent stays absent."""
    settings.setdefault("envvar", "KVTOP_" + names[0].lstrip("-").replace("-", "_").upper())
    if not settings.get("is_flag"):
        settings.setdefault("type", _WORD)
        settings.setdefault("metavar", settings["type"].name)
    if settings.get("is_flag"):
        settings |= {"default": False, "type": _Flag()}
    return click.option(*names, **settings)


_CONFIG: Final = "--config"

_ENGINE_OPTIONS: Final = (
    _option("--blocks", "num_blocks", type=_whole(1, MAX_BLOCKS), help="Device pool size (4096)."),
    _option(
        "--block-size", type=_whole(1, MAX_BLOCK_SIZE), help="Tokens a block (16, or what the trace's block ids need)."
    ),
    _option(
        "--geometry",
        type=_one_of(*GEOMETRY_NAMES),
        metavar="NAME",
        help=f"Bytes of a token: {', '.join(GEOMETRY_NAMES)} (tiny, or model's own); none keeps books only.",
    ),
    _option("--device", metavar="auto|cpu|cuda[:I]", help="Where the device pool lies (auto)."),
    _option("--swap-blocks", "num_swap_blocks", type=_whole(0, MAX_BLOCKS), help="Host pool size; 0 is none."),
    _option("--swap-ratio", type=_real(0, 64, "a number from 0 to 64"), help="Host ÷ device pool size (0.5)."),
    _option("--slab-blocks", type=_whole(1, MAX_BLOCKS), help="Blocks a storage slab (the whole first pool)."),
    _option(
        "--workload",
        metavar="NAME[:W][+…]",
        help="Synthetic workloads with their weights: chat, or chat:3+rag (chat); --list-workloads names them.",
    ),
    _option("--workload-file", metavar="FILE", help="Synthetic workloads with parameters, as TOML."),
    _option("--verify", is_flag=True, help="Compare all that model computes with a contiguous cache."),
    _option("--requests", "num_requests", type=_whole(1, 2**53), help="End a synthetic workload after N requests."),
    _option("--rate", "rate_scale", type=_SCALE, metavar="R", help="Requests come R times as fast (1)."),
    _option("--size", "size_scale", type=_SCALE, metavar="R", help="Requests are R times as long (1)."),
    click.option(
        "--list-workloads",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_workloads,
        help="Say what the synthetic workloads are, and exit.",
    ),
    _option("--trace", metavar="FILE", help="Replay the requests of a trace instead."),
    _option("--trace-format", metavar="NAME", help="Format of the trace (auto)."),
    _option("--skip-bad", is_flag=True, help="Leave out the trace's bad rows, and count them."),
    _option("--speed", type=_SPEED, metavar="X|max", help="Virtual seconds a real second (console 1; run, check max)."),
    _option("--serial", is_flag=True, help="Each request alone, in file order."),
    _option("--seed", type=_whole(0, 2**63 - 1), help="Seed of everything random (0)."),
    _option("--policy", type=_one_of("fcfs", "priority", "sjf"), help="Who is admitted first (fcfs)."),
    _option(
        "--prefill-tokens",
        type=_whole(0, MAX_PREFILL_TOKENS),
        help="Prompt tokens computed a step, at most (8192); 0 is no limit.",
    ),
    _option("--preempt", type=_one_of("swap", "recompute"), help="How a running sequence gives way (swap)."),
    _option("--eviction", type=_one_of("lru", "fifo", "lfu"), help="Which cached block goes first (lru)."),
    _option("--no-prefix-cache", is_flag=True, help="Keep no block for reuse."),
    _option("--no-reuse-distances", is_flag=True, help="Do not predict the hits at other pool sizes."),
    _option("--watermark", "watermark_ratio", type=_RATIO, help="Share of the pool kept when admitting (0.01)."),
    _option("--compact", type=_one_of("off", "manual", "auto"), help="When blocks are moved together (manual)."),
    _option(
        "--compact-threshold",
        "compact_threshold_ratio",
        type=_RATIO,
        help="External fragmentation at which auto compacts (0.5).",
    ),
    _option("--compact-budget", type=_whole(1, MAX_BLOCKS), help="Blocks that auto moves a step, at most (256)."),
    _option(
        "--copy-bandwidth",
        "copy_gb_per_s",
        type=_real(1e-6, 1e6, "a number of GB/s from 0.000001 to 1000000"),
        metavar="GB/s",
        help="Speed of copies in virtual time (16).",
    ),
    _option(
        "--executor", type=_one_of("thread", "inline"), help="Copies in a thread of their own, or at once (thread)."
    ),
    _option("--max-running", type=_whole(1, 65536), help="Sequences that may run at once (256)."),
    _option("--stamp", is_flag=True, help="Write a pattern into every slot and read it back."),
    _option(
        "--inject",
        type=_FAULT,
        multiple=True,
        help=f"Let a fault strike each step or copy with probability RATE ({DEFAULT_RATE:g}); repeatable. "
        f"To be survived: {', '.join(k for k in FAULT_KINDS if FAULTS[k].caught_by is None)}. "
        f"To be caught, so that check fails: {', '.join(k for k in FAULT_KINDS if FAULTS[k].caught_by)}.",
    ),
    _option("--publish", metavar="NAME", help="Let others watch and drive it, and programs attach, by this name."),
    _option("--record", metavar="FILE", help="Record the run in a new file, for kvtop replay."),
    _option(
        "--record-every",
        type=_whole(1, 1 << 40),
        help="Steps between two recorded moments (paced runs 1; at full speed 40; more for large pools).",
    ),
    _option("--metrics-port", type=_whole(0, 65535), help="Serve Prometheus metrics; 0 takes a free port."),
    _option("--metrics-host", metavar="H", help="Address to serve them on (127.0.0.1)."),
    _option("--metrics-tls-cert", metavar="FILE", help="Serve them over TLS with this certificate chain, in PEM."),
    _option("--metrics-tls-key", metavar="FILE", help="Its key, in PEM, without a passphrase."),
    _option("--metrics-auth", metavar="FILE", help="Ask for a user and a password: lines of USER:PASSWORD."),
    _option("--compat", type=_one_of("vllm"), help="Tell the same facts under vLLM's metric names too."),
    _option(_CONFIG, metavar="FILE", help="Take options that are given nowhere else from this file (kvtop.toml)."),
)

_BOUND_OPTIONS: Final = (
    _option("--steps", type=_whole(1, 2**53), help="Stop after N engine steps."),
    _option("--duration", type=_SECONDS, metavar="S", help="Stop after S real seconds."),
    _option("--until-done", is_flag=True, help="Stop when every request has ended (a trace does so anyway)."),
    _option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
    _option("--log-format", type=_one_of(*LOG_FORMATS), help="Form of the messages on stderr (text)."),
)


#: As in ``kvtop.tui.themes.THEMES``, which is not imported for help alone.
THEME_NAMES: Final = ("dark", "light", "contrast", "colour-blind")

_CONSOLE_OPTIONS: Final = (
    _option("--theme", type=_one_of(*THEME_NAMES), metavar="NAME", help=f"Colours: {', '.join(THEME_NAMES)} (dark)."),
    _option("--ascii", "ascii_only", is_flag=True, help="Write ASCII characters only."),
    _option(
        "--refresh",
        "refresh_s",
        type=_real(0.02, 60, "a number of seconds from 0.02 to 60"),
        metavar="S",
        help="Seconds between two readings (0.1; with --plain 2).",
    ),
    _option("--plain", is_flag=True, help="Print lines of text instead of a screen, for pipes and screen readers."),
    click.option("--once", is_flag=True, help="With --plain: print one reading, after --refresh, and end."),
)

_BENCH_OPTIONS: Final = (
    click.option("--rounds", type=_whole(1, 100), metavar="N", default="3", help="Times everything is measured (3)."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
)

#: What ``kvtop bench allocator`` can measure; ``kvtop.bench.suites`` has the same names.
BENCH_GROUPS: Final = ("pairs", "decode", "prefix", "scaling", "threads", "copies", "statistics")


def _with(options: Sequence[Callable[[_F], _F]]) -> Callable[[_F], _F]:
    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class _Command(click.Command):
    """A command that remembers its arguments, to be read again with a file's values in place of defaults."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[f"{__name__}.{ctx.info_name}"] = tuple(args)
        return super().parse_args(ctx, args)


class _Group(_Command, click.Group):
    """The same for a group."""


def with_file(ctx: click.Context) -> click.Context:
    """Return the context of the same command line with the values of the configuration file as defaults.

    Raises:
        UserError: The file cannot be used, or a value in it is not allowed.
    """
    options = [p for p in run_command.params if isinstance(p, click.Option) and p.envvar and p.opts[0] != _CONFIG]
    here = {p.name for p in ctx.command.params}
    values = read_options_file(
        ctx.params["config"],
        {p.opts[0].lstrip("-"): str(p.name) for p in options},
        frozenset(p.opts[0].lstrip("-") for p in options if p.multiple),
    )
    for name in set(values) - here:
        del values[name]  # an option of another command
    args = list(ctx.meta[f"{__name__}.{ctx.info_name}"])
    return ctx.command.make_context(ctx.info_name, args, parent=ctx.parent, default_map=values)


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every option can also be set as KVTOP_…, such as KVTOP_BLOCKS=8192, or in kvtop.toml (--config).",
)
@_with(_ENGINE_OPTIONS)
@_with(_BOUND_OPTIONS[:1])
@_with(_CONSOLE_OPTIONS)
@click.option("--in-process", is_flag=True, help="Run the engine in the console's own process, for tests.")
@click.version_option(kvtop.__version__, "--version", prog_name="kvtop", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, /, in_process: bool, plain: bool, once: bool, **params: Any) -> int:
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
    if once and not plain:
        raise UserError("--once: only together with --plain")
    if plain:
        for name, option in (("theme", "--theme"), ("ascii_only", "--ascii"), ("metrics_port", "--metrics-port")):
            if params[name] and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UserError(f"{option}: not together with --plain")
        from kvtop.console import run_plain

        return run_plain(
            engine_options(ctx, params, speed=1.0),
            max_steps=params["steps"],
            in_process=in_process,
            publish=params["publish"],
            every_s=params["refresh_s"] or 2.0,
            once=once,
        )
    from kvtop.console import run_console

    ctx = with_file(ctx)
    params = {**params, **ctx.params}
    return run_console(
        engine_options(ctx, params, speed=1.0),
        theme=params["theme"] or THEME_NAMES[0],
        ascii_only=params["ascii_only"],
        refresh_hz=1 / (params["refresh_s"] or 0.1),
        publish=params["publish"],
        max_steps=params["steps"],
        metrics=_metrics(params),
        in_process=in_process,
        record=_record(params),
    )


@cli.command("run", cls=_Command)
@_with(_ENGINE_OPTIONS)
@_with(_BOUND_OPTIONS)
@click.pass_context
def run_command(ctx: click.Context, /, **params: Any) -> int:
    """Run the engine without a screen and print a report.

    Progress goes to stderr, the report to stdout. Exit code 0: fine; 1: a law was broken or the work
    failed; 2: the request was wrong; 130: interrupted, after the report of what was done.
    """
    return _run_headless(ctx, is_check=False)


@cli.command("check", cls=_Command)
@_with(_ENGINE_OPTIONS)
@_with(_BOUND_OPTIONS)
@click.option("--threads", type=_whole(1, 64), metavar="N", help="Drive the allocator from N threads instead.")
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


@cli.command("replay")
@click.argument("files", metavar="FILE", nargs=-1, required=True)
@click.option("--at", type=_whole(0, 2**63 - 1), metavar="STEP", help="Begin there, or print that step (the last one).")
@click.option("--speed", type=_SPEED, metavar="X|max", default="1", help="Virtual seconds a real second (1).")
@click.option("--report", "as_text", is_flag=True, help="Print the report as of a step instead of the screen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen.")
@click.option(
    "--export", "form", type=_one_of("svg", "html"), help="Print a picture of a step, or a page with its report."
)
@click.option("--diff", "is_diff", is_flag=True, help="Print the first step at which two recordings differ.")
@click.option("--verify", "is_verify", is_flag=True, help="Run it again, and compare moment for moment.")
def replay_command(
    files: tuple[str, ...],
    at: int | None,
    speed: float | None,
    as_text: bool,
    as_json: bool,
    form: str | None,
    is_diff: bool,
    is_verify: bool,
) -> int:
    """Open a recording in the console, to be played, stopped and wound back.

    space stops and goes on, [ and ] go a second back and on, comma and full stop a moment; n and b go to the next and
    the last preemption, eviction, fault or command, of the kind that i chooses.

    Exit code 1: --diff or --verify found a difference.
    """
    if is_diff and is_verify:
        raise UserError("--diff and --verify: one of the two, not both")
    if len(files) != (2 if is_diff else 1):
        raise UserError(f"FILE: {len(files)} given; --diff takes two, everything else one")
    from kvtop import replay

    if is_diff:
        return replay.diff(files[0], files[1], as_json=as_json)
    if is_verify:
        return replay.verify(files[0], as_json=as_json)
    if form is not None:
        return replay.export(files[0], at=at, form=form)
    if as_json or as_text:
        return replay.tell(files[0], at=at, as_json=as_json)
    return replay.show(files[0], at=at, speed=speed)


@cli.command("attach")
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option("--allow-operations", is_flag=True, help="Let the capitals act on the engine, not only look.")
@click.option("--events", multiple=True, metavar="ADDR", help="Its cache events, such as tcp://HOST:5557; one a rank.")
@click.option("--replay", multiple=True, metavar="ADDR", help="Where it replays them, such as tcp://HOST:5558.")
@click.option("--topic", default="", metavar="T", help="Topic of its cache events (all).")
@click.option("--token-file", metavar="FILE", help="Send the first line of this file as a bearer token.")
@click.option("--ca-file", metavar="FILE", help="Trust these certificates instead of the system's.")
@click.option("--insecure", is_flag=True, help="Trust any certificate.")
@click.option("--headless", is_flag=True, help="No screen: serve its metrics until stopped (--metrics-port).")
@click.option("--metrics-port", type=_whole(0, 65535), help="Where to serve them; 0 takes a free port.")
@click.option("--metrics-host", metavar="H", help="Address to serve them on (127.0.0.1).")
@click.option("--metrics-tls-cert", metavar="FILE", help="Serve them over TLS with this certificate chain, in PEM.")
@click.option("--metrics-tls-key", metavar="FILE", help="Its key, in PEM, without a passphrase.")
@click.option("--metrics-auth", metavar="FILE", help="Ask for a user and a password: lines of USER:PASSWORD.")
@click.option("--log-format", type=_one_of(*LOG_FORMATS), help="Form of the messages on stderr (text).")
def attach_command(targets: tuple[str, ...], headless: bool, **params: Any) -> int:
    """Open the console on a running engine, which goes on when the console is closed.

    TARGET is local:NAME, an engine that was published by that name, local for the only one there is, or
    http(s)://HOST:PORT, a server of vLLM, SGLang, llama.cpp, TensorRT-LLM, TGI, or a kvtop exporter. Without it, this
    machine is looked at: published engines, and the ports that engines usually take. Several servers are one table.
    """
    from kvtop.targets import AttachOptions

    options = AttachOptions(
        params["allow_operations"],
        params["token_file"],
        params["ca_file"],
        params["insecure"],
        params["events"],
        params["replay"],
        params["topic"],
    )
    address = _metrics({**params, "compat": None})
    if headless != (address is not None):
        raise UserError("--headless and --metrics-port N: only together")
    if not targets:
        from kvtop.discovery import choose, discover

        can_ask = not headless and sys.stdin is not None and sys.stdin.isatty()
        ask = (lambda text: click.prompt(text, prompt_suffix="", err=True)) if can_ask else None
        targets = (choose(discover(), ask),)
    if address is not None:
        from kvtop.exporting import run_exporting

        form: LogFormat = params["log_format"] or "text"
        return run_exporting(targets, options, address=address, log_format=form)
    from kvtop.console import run_attached

    return run_attached(targets, options)


@cli.group("ctl", cls=CtlGroup, no_args_is_help=False)
@click.option("--to", metavar="NAME", type=_WORD, help="The engine (the only published one).")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show the plan and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: command, plan and outcome.")
@click.option("--timeout", "timeout_s", type=_SECONDS, metavar="S", help="Seconds the answer may take (60).")
@click.pass_context
def ctl_group(ctx: click.Context, /, **params: Any) -> None:
    """Drive a running kvtop that was published by a name.

    Exit code 0: done; 1: it failed; 2: it was refused, nothing changed; 3: the engine could not be reached.
    """
    aim(ctx, **params)


@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor_command(as_json: bool) -> int:
    """Look at the terminal, Python, torch, GPUs and files.

    Each line is good, missing (kvtop works without it) or a problem, with what to do. Exit code 1 on a problem.
    """
    from kvtop.doctor import run_doctor

    return run_doctor(as_json=as_json)


@cli.group("bench", no_args_is_help=False)
def bench_group() -> None:
    """Measure the allocator on this machine."""


@bench_group.command("replay")
@click.argument("trace", required=False)
@click.option("--blocks", type=_whole(1, MAX_BLOCKS), metavar="N", multiple=True, help="Pool size; repeatable.")
@click.option("--rounds", type=_whole(1, 100), metavar="N", default="3", help="Times each side runs (3).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def bench_replay(trace: str | None, blocks: tuple[int, ...], rounds: int, as_json: bool) -> int:
    """Replay TRACE serially, beside the plainest possible replay of it.

    TRACE is a JSON-lines trace with hash_ids, plain or gzip; without one, a made one is used. Both sides read
    the file and must count the same; exit code 1 when they do not.
    """
    from kvtop.bench.command import run_bench_replay

    return run_bench_replay(trace, blocks, rounds=rounds, as_json=as_json)


@bench_group.command("allocator")
@click.option("--only", type=_some_of(*BENCH_GROUPS), metavar="A,B", help=f"Of {', '.join(BENCH_GROUPS)} (all).")
@_with(_BENCH_OPTIONS)
def bench_allocator(only: tuple[str, ...] | None, rounds: int, as_json: bool) -> int:
    """Time the allocator alone.

    Bulk allocation, decode steps, prefix cache, scaling, threads, copies on a CPU, an observer's statistics. Figures
    are medians over the rounds; a ratio is taken inside a round.
    """
    from kvtop.bench.suites import run_bench_allocator

    return run_bench_allocator(only or (), rounds=rounds, as_json=as_json)


@bench_group.command("locks")
@_with(_BENCH_OPTIONS)
def bench_locks(rounds: int, as_json: bool) -> int:
    """Time each layer of locking, switched on and off.

    Reservations, optimistic lookup, batching; with what their counters say.
    """
    from kvtop.bench.suites import run_bench_locks

    return run_bench_locks(rounds=rounds, as_json=as_json)


@bench_group.command("observer")
@_with(_BENCH_OPTIONS)
def bench_observer(rounds: int, as_json: bool) -> int:
    """Time an engine of 1,000,000 blocks, watched 10 times a second and not."""
    from kvtop.bench.suites import run_bench_observer

    return run_bench_observer(rounds=rounds, as_json=as_json)


@bench_group.command("record")
@_with(_BENCH_OPTIONS)
def bench_record(rounds: int, as_json: bool) -> int:
    """Time a run at full speed with a recording and without, and weigh the recording."""
    from kvtop.bench.suites import run_bench_record

    return run_bench_record(rounds=rounds, as_json=as_json)


@bench_group.command("overhead")
@_with(_BENCH_OPTIONS)
def bench_overhead(rounds: int, as_json: bool) -> int:
    """Time a published engine of 1,000,000 blocks alone, with 4 observers, and scraped every second."""
    from kvtop.bench.suites import run_bench_overhead

    return run_bench_overhead(rounds=rounds, as_json=as_json)


@bench_group.command("console")
@_with(_BENCH_OPTIONS)
def bench_console(rounds: int, as_json: bool) -> int:
    """Time the console itself: frames, processor, bytes to the terminal.

    At 4,096, 65,536 and 1,000,000 blocks, on screens of 120x40 and 240x70, on an engine that changes and on one that
    stands still. What a console costs the engine is measured by: kvtop bench observer.
    """
    from kvtop.bench.suites import run_bench_console

    return run_bench_console(rounds=rounds, as_json=as_json)


@cli.group("export", no_args_is_help=False)
def export_group() -> None:
    """Print what is shipped for Prometheus and Grafana."""


@export_group.command("rules")
@click.option(
    "--for",
    "holds",
    type=_HOLD,
    metavar="[ALERT=]D",
    multiple=True,
    help="How long an alert must hold before it fires: of one, or of all that do not fire at once; repeatable.",
)
@click.option(
    "--threshold",
    "thresholds",
    type=_THRESHOLD,
    metavar="ALERT=X",
    multiple=True,
    help="An alert's number; repeatable.",
)
@click.option("--window", type=_DURATION, metavar="D", default="5m", help="Of rates and averages (5m).")
@click.option("--long-window", type=_DURATION, metavar="D", default="1h", help="Of the usual hit ratio (1h).")
@click.option("--interval", type=_DURATION, metavar="D", help="Between two evaluations (Prometheus's own).")
@click.option("--job", type=_LABEL, metavar="NAME", default="kvtop", help="Name of the scrape job (kvtop).")
@click.option(
    "--runbooks", type=_WORD, metavar="URL", default="docs/runbooks", help="Where the runbooks lie (docs/runbooks)."
)
def export_rules(
    holds: tuple[tuple[str | None, str], ...],
    thresholds: tuple[tuple[str, float], ...],
    window: str,
    long_window: str,
    interval: str | None,
    job: str,
    runbooks: str,
) -> int:
    """Print recording rules and alerts, a rule file for Prometheus.

    D is a duration such as 90s, 5m or 1h30m. The window must span at least four scrapes.
    """
    from kvtop.headless import write_out
    from kvtop.monitoring.rules import RuleSettings, rules_text

    settings = RuleSettings(
        window=window,
        long_window=long_window,
        interval=interval or "",
        hold=next((hold for name, hold in reversed(holds) if name is None), None),
        holds={name: hold for name, hold in holds if name is not None},
        thresholds=dict(thresholds),
        job=job,
        runbooks=runbooks,
    )
    write_out(rules_text(settings).rstrip("\n"))
    return EXIT_OK


@export_group.command("dashboard")
def export_dashboard() -> int:
    """Print a dashboard for Grafana, to be imported there."""
    from kvtop.headless import write_out
    from kvtop.monitoring.dashboard import dashboard_text

    write_out(dashboard_text().rstrip("\n"))
    return EXIT_OK


@export_group.command("prometheus-config")
@click.option(
    "--target", "targets", type=_HOST_PORT, metavar="HOST:PORT", multiple=True, help="An exporter (127.0.0.1:9464)."
)
@click.option("--rules", type=_WORD, metavar="FILE", multiple=True, help="A rule file; repeatable (kvtop-rules.yml).")
@click.option(
    "--alertmanager", type=_HOST_PORT, metavar="HOST:PORT", multiple=True, help="Where alerts go; repeatable."
)
@click.option("--interval", type=_DURATION, metavar="D", default="15s", help="Between two scrapes (15s).")
@click.option("--job", type=_LABEL, metavar="NAME", default="kvtop", help="Name of the scrape job (kvtop).")
def export_prometheus_config(
    targets: tuple[str, ...], rules: tuple[str, ...], alertmanager: tuple[str, ...], interval: str, job: str
) -> int:
    """Print a configuration with which Prometheus scrapes kvtop and evaluates its rules."""
    from kvtop.headless import write_out
    from kvtop.monitoring.rules import scrape_config_text

    text = scrape_config_text(
        targets or ("127.0.0.1:9464",),
        job=job,
        interval=interval,
        rules=rules or ("kvtop-rules.yml",),
        alertmanagers=alertmanager,
    )
    write_out(text.rstrip("\n"))
    return EXIT_OK


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
        metrics=_metrics(params),
        publish=params["publish"],
        record=_record(params),
        as_json=params["as_json"],
        is_check=is_check,
        started_s=started_s,
        log_format=params["log_format"] or "text",
        reload=lambda: read()[1],
    )


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


def _metrics(params: Params) -> MetricsAddress | None:
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


def _record(params: Params) -> RecordOrder | None:
    if params["record"] is None:
        if params["record_every"] is not None:
            raise UserError(f"--record-every {params['record_every']}: only together with --record FILE")
        return None
    from kvtop.recording.writer import RecordOrder

    return RecordOrder(params["record"], params["record_every"], kvtop.__version__)


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every failure is one line on stderr."""
    try:
        result = cli.main(args=args, prog_name="kvtop", standalone_mode=False)
    except click.Abort:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except KvtopError as error:
        return _fail(str(error), error.exit_code)
    except click.ClickException as error:
        return _fail(_one_line(error), EXIT_USAGE)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except AllocatorError as error:
        return _fail(str(error), EXIT_FAILED)
    except MemoryError:
        return _fail("out of memory: fewer --blocks, a smaller --geometry, or --geometry none", EXIT_FAILED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _one_line(error: click.ClickException) -> str:
    """Return click's complaint in our form: what, then what is allowed."""
    match error:
        case click.NoSuchOption(option_name=name, possibilities=near):
            alike = [option for option in near or () if option[:4] == name[:4]]
            hint = f"did you mean {' or '.join(sorted(alike))}?" if alike else "--help lists them"
            return f"{name}: no such option; {hint}"
        case click.BadOptionUsage(option_name=name):
            return f"{name}: {'takes no value' if 'not take' in error.message else 'needs a value'}"
        case _:
            text = " ".join(error.format_message().split()).rstrip(".")
            return f"{text[:1].lower()}{text[1:]}; --help says what is allowed"


def _fail(text: str, code: int) -> int:
    one_line = " ".join(text.split())
    # What is told may hold a file's name or its text: nothing of it may steer the terminal.
    safe = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in one_line)
    print(f"kvtop: {safe}", file=sys.stderr)
    return code


def main() -> NoReturn:
    """Entry point of the scripts ``kvtop`` and ``kvtop-console``."""
    sys.exit(run())
