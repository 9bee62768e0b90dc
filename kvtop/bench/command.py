"""``kvtop bench replay``: runs the benchmark with the real engine and prints it. Owns the made trace."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvtop.bench.replay import ReplayResult, bench_replay
from kvtop.driving import Bounds, drive
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.errors import EXIT_FAILED, EXIT_OK
from kvtop.headless import say, write_out
from kvtop.model.format import count, seconds

DEFAULT_BLOCKS: Final = (1_000, 10_000, 50_000)
#: Block size of the made trace, and the one assumed for a file that does not tell its own. [tokens]
BLOCK_SIZE: Final = 512
_MADE_REQUESTS: Final = 5_000


def run_bench_replay(trace: str | None, block_counts: Sequence[int], *, rounds: int, as_json: bool) -> int:
    """Run the benchmark, print it, and return the exit code: 1 when both sides do not count the same.

    Args:
        trace: A JSON-lines trace with ``hash_ids``; ``None`` makes one.
        block_counts: Pool sizes; empty takes ``DEFAULT_BLOCKS``.
        rounds: Times each side runs at each size.
        as_json: Print one JSON object instead of text.

    Raises:
        UserError: The trace cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="kvtop-bench-") as folder:
        path = Path(trace) if trace is not None else make_trace(Path(folder) / "made.jsonl", _MADE_REQUESTS)
        block_size = _block_size(path)
        say(f"replaying {path.name}, {rounds} rounds a pool size; torch is loaded beforehand")
        _load_torch()
        results = bench_replay(path, block_counts or DEFAULT_BLOCKS, rounds, replay_engine, block_size=block_size)
    write_out(json.dumps(_as_object(path.name, results)) if as_json else _as_text(results))
    if not all(result.agrees for result in results):
        say("the engine and the plain replay do not count the same")
        return EXIT_FAILED
    return EXIT_OK


def replay_engine(path: Path, num_blocks: int) -> Mapping[str, Any]:
    """Replay a trace serially on a new engine, reading included, and return the counts that have one right answer."""
    # The plain replay predicts nothing for other sizes, so the engine does not either.
    options = EngineOptions(
        num_blocks=num_blocks, num_swap_blocks=0, geometry="tiny", trace=str(path), serial=True, reuse_distances=False
    )
    engine, _notes = build_engine(options)
    try:
        drive(engine, Bounds(), speed=None, stop=lambda: None, after_turn=lambda _now_s: None)
        counters = engine.counters
        return {
            "hit_blocks": counters.hit_blocks,
            "hit_tokens": counters.hit_tokens,
            "evictions": counters.evictions,
            "refused": counters.refused,
        }
    finally:
        engine.close()


def make_trace(path: Path, num_requests: int, seed: int = 0) -> Path:
    """Write a trace of conversations that share prefixes, in the JSON-lines format with ``hash_ids``, and return it."""
    rng = random.Random(seed)
    sessions: list[list[int]] = []
    next_id = 8
    with path.open("w") as file:
        for number in range(num_requests):
            if not sessions or rng.random() < 0.4:
                session = list(range(rng.randint(1, 8)))
                sessions.append(session)
                del sessions[:-200]
            else:
                session = rng.choice(sessions)
            grown = min(rng.randint(1, 12), 240 - len(session))
            session.extend(range(next_id, next_id + grown))
            next_id += grown
            row = {
                "timestamp": number * 300,
                "input_length": len(session) * BLOCK_SIZE - rng.randrange(BLOCK_SIZE),
                "output_length": rng.randint(1, 1024),
                "hash_ids": session,
            }
            file.write(json.dumps(row) + "\n")
    return path


def _load_torch() -> None:
    """Build one small engine, so that no round pays for what a process pays once."""
    build_engine(EngineOptions(num_blocks=1, num_swap_blocks=0))[0].close()


def _block_size(path: Path) -> int:
    from kvtop.workloads.trace import open_trace

    return open_trace(path).block_size or BLOCK_SIZE


def _as_object(name: str, results: Sequence[ReplayResult]) -> dict[str, Any]:
    return {
        "trace": name,
        "results": [
            {
                "blocks": result.num_blocks,
                "plain_s": result.plain_s,
                "engine_s": result.engine_s,
                "ratio": result.ratio,
                "agrees": result.agrees,
                "plain": dict(result.plain),
                "engine": dict(result.engine),
            }
            for result in results
        ],
    }


def _as_text(results: Sequence[ReplayResult]) -> str:
    lines = ["   blocks     plain    engine   ratio  hit blocks   evictions  same counts"]
    for result in results:
        lines.append(
            f"{count(result.num_blocks):>9}  {seconds(result.plain_s):>8}  {seconds(result.engine_s):>8}  "
            f"{result.ratio:>5.1f}x  {count(result.engine['hit_blocks']):>10}  "
            f"{count(result.engine['evictions']):>10}  {'yes' if result.agrees else 'NO'}"
        )
    return "\n".join(lines)
