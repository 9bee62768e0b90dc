"""``kvtop bench``: one command a measurement."""

from __future__ import annotations

from typing import Final

import click

from allocator.config import MAX_BLOCKS
from kvtop.cli.options import with_options
from kvtop.cli.values import some_of, whole

_OPTIONS: Final = (
    click.option("--rounds", type=whole(1, 100), metavar="N", default="3", help="Times everything is measured (3)."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
)

#: What ``kvtop bench allocator`` can measure; ``kvtop.bench.suites`` has the same names.
BENCH_GROUPS: Final = ("pairs", "decode", "prefix", "scaling", "threads", "copies", "statistics")


@click.group("bench", no_args_is_help=False)
def bench_group() -> None:
    """Measure the allocator on this machine."""


@bench_group.command("replay")
@click.argument("trace", required=False)
@click.option("--blocks", type=whole(1, MAX_BLOCKS), metavar="N", multiple=True, help="Pool size; repeatable.")
@click.option("--rounds", type=whole(1, 100), metavar="N", default="3", help="Times each side runs (3).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def bench_replay(trace: str | None, blocks: tuple[int, ...], rounds: int, as_json: bool) -> int:
    """Replay TRACE serially, beside the plainest possible replay of it.

    TRACE is a JSON-lines trace with hash_ids, plain or gzip; without one, a made one is used. Both sides read
    the file and must count the same; exit code 1 when they do not.
    """
    from kvtop.bench.command import run_bench_replay

    return run_bench_replay(trace, blocks, rounds=rounds, as_json=as_json)


@bench_group.command("allocator")
@click.option("--only", type=some_of(*BENCH_GROUPS), metavar="A,B", help=f"Of {', '.join(BENCH_GROUPS)} (all).")
@with_options(_OPTIONS)
def bench_allocator(only: tuple[str, ...] | None, rounds: int, as_json: bool) -> int:
    """Time the allocator alone.

    Bulk allocation, decode steps, prefix cache, scaling, threads, copies on a CPU, an observer's statistics. Figures
    are medians over the rounds; a ratio is taken inside a round.
    """
    from kvtop.bench.suites import run_bench_allocator

    return run_bench_allocator(only or (), rounds=rounds, as_json=as_json)


@bench_group.command("locks")
@with_options(_OPTIONS)
def bench_locks(rounds: int, as_json: bool) -> int:
    """Time each layer of locking, switched on and off.

    Reservations, optimistic lookup, batching; with what their counters say.
    """
    from kvtop.bench.suites import run_bench_locks

    return run_bench_locks(rounds=rounds, as_json=as_json)


@bench_group.command("observer")
@with_options(_OPTIONS)
def bench_observer(rounds: int, as_json: bool) -> int:
    """Time an engine of 1,000,000 blocks, watched 10 times a second and not."""
    from kvtop.bench.suites import run_bench_observer

    return run_bench_observer(rounds=rounds, as_json=as_json)


@bench_group.command("record")
@with_options(_OPTIONS)
def bench_record(rounds: int, as_json: bool) -> int:
    """Time a run at full speed with a recording and without, and weigh the recording."""
    from kvtop.bench.suites import run_bench_record

    return run_bench_record(rounds=rounds, as_json=as_json)


@bench_group.command("overhead")
@with_options(_OPTIONS)
def bench_overhead(rounds: int, as_json: bool) -> int:
    """Time a published engine of 1,000,000 blocks alone, with 4 observers, and scraped every second."""
    from kvtop.bench.suites import run_bench_overhead

    return run_bench_overhead(rounds=rounds, as_json=as_json)


@bench_group.command("console")
@with_options(_OPTIONS)
def bench_console(rounds: int, as_json: bool) -> int:
    """Time the console itself: frames, processor, bytes to the terminal.

    At 4,096, 65,536 and 1,000,000 blocks, on screens of 120x40 and 240x70, on an engine that changes and on one that
    stands still. Then what an open console costs an engine at full speed, and how far the first frame is before torch.
    """
    from kvtop.bench.suites import run_bench_console

    return run_bench_console(rounds=rounds, as_json=as_json)


@bench_group.command("events")
@with_options(_OPTIONS)
def bench_events(rounds: int, as_json: bool) -> int:
    """Time how fast cache events are taken in over sockets, against what a busy server emits.

    The busy server is reckoned, not run: 50,000 tokens a second in blocks of 16, each stored and removed.
    """
    from kvtop.bench.suites import run_bench_events

    return run_bench_events(rounds=rounds, as_json=as_json)
