"""Runs vLLM's scheduler with the plugin, and compares what is published with the pool: MODEL STEPS. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_scheduler import Driver

from allocator.ids import BlockState
from kvtop.model.observation import Focus
from kvtop.plugins import publisher
from kvtop.plugins import vllm as plugin
from kvtop.plugins.vllm_pool import key64
from kvtop.sources.local import LocalSource
from kvtop.sources.named import NamedEngine


def differences(driver: Driver, source: LocalSource) -> list[str]:
    """Return what is published otherwise than it is."""
    seen = source.read(Focus(num_victims=64), 20.0)
    pool, scheduler, arrays = driver.pool, driver.scheduler, seen.device
    assert arrays is not None
    blocks = pool.blocks
    free = [b for b in pool.free_block_queue.get_all_free_blocks() if b.block_hash is not None]
    rows = {row.label: row for row in seen.snapshot.sequences}
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name)[0] for name in scheduler.requests}
    is_active = arrays.state == BlockState.ACTIVE
    pairs: dict[str, tuple[Any, Any]] = {
        "used": (int(is_active.sum()), round(pool.get_usage() * (len(blocks) - 1))),
        "references": (arrays.ref_count.tolist(), [0 if b is pool.null_block else b.ref_cnt for b in blocks]),
        "hashes": (arrays.hash64.tolist(), [key64(b.block_hash) for b in blocks]),
        "cached": (int((arrays.state == BlockState.CACHED).sum()), len(free)),
        "victims": (list(seen.next_victims or ()), [b.block_id for b in free][:64]),
        "running": (seen.snapshot.num_running, len(scheduler.running)),
        "waiting": (seen.snapshot.num_waiting, len(scheduler.requests) - len(scheduler.running)),
        "tables": ({name: row.num_blocks for name, row in rows.items()}, {n: len(t) for n, t in tables.items()}),
        "tokens": (
            {n: r.num_tokens for n, r in rows.items()},
            {n: r.num_computed_tokens for n, r in scheduler.requests.items()},
        ),
        "owners": (sorted(set(arrays.owner[is_active].tolist()) - {r.row for r in rows.values()}), []),
    }
    return [name for name, (told, true) in pairs.items() if told != true]


def main(model: str, steps: int) -> None:
    """Drive a pool that is too small, reset it once, and print what came of it."""
    publisher.EVERY_S, publisher.SHARE = 0.0, 1e9
    plugin.register()
    driver = Driver(model, num_blocks=160)
    source = LocalSource(NamedEngine(plugin.publication_name(driver.scheduler)))
    wrong: set[str] = set()
    checks = shared = 0
    for step in range(steps):
        while len(driver.scheduler.requests) < 20 and step < steps - 300:
            driver.add()
        if driver.scheduler.requests:
            driver.step()
        if step % 40 == 0:
            checks += 1
            wrong.update(differences(driver, source))
            shared += int((source.read(Focus(), 20.0).device.ref_count > 1).sum())  # type: ignore[union-attr]
    wrong.update(differences(driver, source))
    counters = source.read(Focus(), 20.0).snapshot.counters
    is_reset = driver.scheduler.reset_prefix_cache()
    wrong.update(differences(driver, source))
    result = {
        "wrong": sorted(wrong),
        "checks": checks,
        "shared": shared,
        "preemptions": counters.preemptions_recompute,
        "hit_tokens": counters.hit_tokens,
        "is_reset": bool(is_reset),
        "left": int((source.read(Focus(), 20.0).device.state != BlockState.FREE).sum()),  # type: ignore[union-attr]
    }
    source.close()
    driver.scheduler.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
