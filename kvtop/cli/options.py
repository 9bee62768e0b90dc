"""Options that several commands have: of the engine, of how long it runs, of the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from allocator.config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_PREFILL_TOKENS
from allocator.fault_kinds import DEFAULT_RATE, FAULT_KINDS, FAULTS
from allocator.geometry import GEOMETRY_NAMES
from kvtop.cli.values import FAULT, RATIO, SCALE, SECONDS, SPEED, WORD, Flag, one_of, real, whole
from kvtop.errors import EXIT_OK
from kvtop.log import LOG_FORMATS, LogFormat

_F = TypeVar("_F", bound=Callable[..., Any])


def _list_workloads(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:
    """Print one line a workload and end the command."""
    if not is_asked or ctx.resilient_parsing:
        return
    from kvtop.workloads.catalog import workload_lines

    click.echo("\n".join(workload_lines()))
    ctx.exit(EXIT_OK)


def option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    """A click option that is also read from ``KVTOP_…``, without a default: absent stays absent."""
    settings.setdefault("envvar", "KVTOP_" + names[0].lstrip("-").replace("-", "_").upper())
    if not settings.get("is_flag"):
        settings.setdefault("type", WORD)
        settings.setdefault("metavar", settings["type"].name)
    if settings.get("is_flag"):
        settings |= {"default": False, "type": Flag()}
    return click.option(*names, **settings)


@dataclass
class Messages:
    """How one call of the command line tells what goes wrong.

    Attributes:
        form: As ``--log-format`` says, from the moment it has been read.
    """

    form: LogFormat = "text"


def _keep_form(ctx: click.Context, _param: click.Parameter, form: LogFormat | None) -> LogFormat:
    messages: Messages = ctx.ensure_object(Messages)
    messages.form = form or messages.form
    return messages.form


CONFIG: Final = "--config"

#: Read before the others, so that what is wrong with them is told in this form.
LOG_OPTION: Final = option(
    "--log-format",
    type=one_of(*LOG_FORMATS),
    is_eager=True,
    callback=_keep_form,
    help="Form of the messages on stderr (text).",
)

CONFIG_OPTION: Final = option(
    CONFIG, metavar="FILE", help="Take options that are given nowhere else from this file (kvtop.toml)."
)

ENGINE_OPTIONS: Final = (
    option("--blocks", "num_blocks", type=whole(1, MAX_BLOCKS), help="Device pool size (4096)."),
    option(
        "--block-size", type=whole(1, MAX_BLOCK_SIZE), help="Tokens a block (16, or what the trace's block ids need)."
    ),
    option(
        "--geometry",
        type=one_of(*GEOMETRY_NAMES),
        metavar="NAME",
        help=f"Bytes of a token: {', '.join(GEOMETRY_NAMES)} (tiny, or model's own); none keeps books only.",
    ),
    option("--device", metavar="auto|cpu|cuda[:I]", help="Where the device pool lies (auto)."),
    option("--swap-blocks", "num_swap_blocks", type=whole(0, MAX_BLOCKS), help="Host pool size; 0 is none."),
    option("--swap-ratio", type=real(0, 64, "a number from 0 to 64"), help="Host ÷ device pool size (0.5)."),
    option("--slab-blocks", type=whole(1, MAX_BLOCKS), help="Blocks a storage slab (the whole first pool)."),
    option(
        "--workload",
        metavar="NAME[:W][+…]",
        help="Synthetic workloads with their weights: chat, or chat:3+rag (chat); --list-workloads names them.",
    ),
    option("--workload-file", metavar="FILE", help="Synthetic workloads with parameters, as TOML."),
    option("--verify", is_flag=True, help="Compare all that model computes with a contiguous cache."),
    option("--requests", "num_requests", type=whole(1, 2**53), help="End a synthetic workload after N requests."),
    option("--rate", "rate_scale", type=SCALE, metavar="R", help="Requests come R times as fast (1)."),
    option("--size", "size_scale", type=SCALE, metavar="R", help="Requests are R times as long (1)."),
    click.option(
        "--list-workloads",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_workloads,
        help="Say what the synthetic workloads are, and exit.",
    ),
    option("--trace", metavar="FILE", help="Replay the requests of a trace instead."),
    option("--trace-format", metavar="NAME", help="Format of the trace (auto)."),
    option("--skip-bad", is_flag=True, help="Leave out the trace's bad rows, and count them."),
    option("--speed", type=SPEED, metavar="X|max", help="Virtual seconds a real second (console 1; run, check max)."),
    option("--serial", is_flag=True, help="Each request alone, in file order."),
    option("--seed", type=whole(0, 2**63 - 1), help="Seed of everything random (0)."),
    option("--policy", type=one_of("fcfs", "priority", "sjf"), help="Who is admitted first (fcfs)."),
    option(
        "--prefill-tokens",
        type=whole(0, MAX_PREFILL_TOKENS),
        help="Prompt tokens computed a step, at most (8192); 0 is no limit.",
    ),
    option("--preempt", type=one_of("swap", "recompute"), help="How a running sequence gives way (swap)."),
    option("--eviction", type=one_of("lru", "fifo", "lfu"), help="Which cached block goes first (lru)."),
    option("--no-prefix-cache", is_flag=True, help="Keep no block for reuse."),
    option("--no-reuse-distances", is_flag=True, help="Do not predict the hits at other pool sizes."),
    option("--watermark", "watermark_ratio", type=RATIO, help="Share of the pool kept when admitting (0.01)."),
    option("--compact", type=one_of("off", "manual", "auto"), help="When blocks are moved together (manual)."),
    option(
        "--compact-threshold",
        "compact_threshold_ratio",
        type=RATIO,
        help="External fragmentation at which auto compacts (0.5).",
    ),
    option("--compact-budget", type=whole(1, MAX_BLOCKS), help="Blocks that auto moves a step, at most (256)."),
    option(
        "--copy-bandwidth",
        "copy_gb_per_s",
        type=real(1e-6, 1e6, "a number of GB/s from 0.000001 to 1000000"),
        metavar="GB/s",
        help="Speed of copies in virtual time (16).",
    ),
    option("--executor", type=one_of("thread", "inline"), help="Copies in a thread of their own, or at once (thread)."),
    option("--max-running", type=whole(1, 65536), help="Sequences that may run at once (256)."),
    option("--stamp", is_flag=True, help="Write a pattern into every slot and read it back."),
    option(
        "--inject",
        type=FAULT,
        multiple=True,
        help=f"Let a fault strike each step or copy with probability RATE ({DEFAULT_RATE:g}); repeatable. "
        f"To be survived: {', '.join(k for k in FAULT_KINDS if FAULTS[k].caught_by is None)}. "
        f"To be caught, so that check fails: {', '.join(k for k in FAULT_KINDS if FAULTS[k].caught_by)}.",
    ),
    option("--publish", metavar="NAME", help="Let others watch and drive it, and programs attach, by this name."),
    option("--record", metavar="FILE", help="Record the run in a new file, for kvtop replay."),
    option(
        "--record-every",
        type=whole(1, 1 << 40),
        help="Steps between two recorded moments (paced runs 1; at full speed 40; more for large pools).",
    ),
    option("--metrics-port", type=whole(0, 65535), help="Serve Prometheus metrics; 0 takes a free port."),
    option("--metrics-host", metavar="H", help="Address to serve them on (127.0.0.1)."),
    option("--metrics-tls-cert", metavar="FILE", help="Serve them over TLS with this certificate chain, in PEM."),
    option("--metrics-tls-key", metavar="FILE", help="Its key, in PEM, without a passphrase."),
    option("--metrics-auth", metavar="FILE", help="Ask for a user and a password: lines of USER:PASSWORD."),
    option("--compat", type=one_of("vllm"), help="Tell the same facts under vLLM's metric names too."),
    CONFIG_OPTION,
)

BOUND_OPTIONS: Final = (
    option("--steps", type=whole(1, 2**53), help="Stop after N engine steps."),
    option("--duration", type=SECONDS, metavar="S", help="Stop after S real seconds."),
    option("--until-done", is_flag=True, help="Stop when every request has ended (a trace does so anyway)."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
    LOG_OPTION,
)


#: As in ``kvtop.tui.themes.THEMES``, which is not imported for help alone.
THEME_NAMES: Final = ("dark", "light", "contrast", "colour-blind")

#: As in ``kvtop.panels.catalog.CONTENTS``, which is not imported for help alone.
PANEL_NAMES: Final = (
    "prefix",
    "fragmentation",
    "tiers",
    "locks",
    "history",
    "audit",
    "details",
    "block",
    "gpu",
    "alerts",
)

#: Of every console, whatever it shows.
LOOK_OPTIONS: Final = (
    option("--theme", type=one_of(*THEME_NAMES), metavar="NAME", help=f"Colours: {', '.join(THEME_NAMES)} (dark)."),
    option("--ascii", "ascii_only", is_flag=True, help="Write ASCII characters only."),
    option(
        "--refresh",
        "refresh_s",
        type=real(0.02, 60, "a number of seconds from 0.02 to 60"),
        metavar="S",
        help="Seconds between two readings (0.1; with --plain 2).",
    ),
    option("--no-remember", is_flag=True, help="Arrange panels as at first, and remember no other arrangement."),
)

#: Of lines of text instead of a screen.
PLAIN_OPTIONS: Final = (
    option("--plain", is_flag=True, help="Print lines of text instead of a screen, for pipes and screen readers."),
    click.option(
        "--panel",
        "panels",
        multiple=True,
        type=one_of(*PANEL_NAMES),
        metavar="NAME",
        help="With --plain: print this panel instead of the overview; repeatable.",
    ),
    click.option("--once", is_flag=True, help="With --plain: print one reading, after --refresh, and end."),
)

#: Of the console on an engine of its own.
CONSOLE_OPTIONS: Final = (*LOOK_OPTIONS, *PLAIN_OPTIONS)


def with_options(options: Sequence[Callable[[_F], _F]]) -> Callable[[_F], _F]:
    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
