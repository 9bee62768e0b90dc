"""Make the pictures of engines over the network: a fleet, a mirror, and what-if estimates.

The metrics pages and cache events are those that the tests are made of, read by the same code as a server's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from event_samples import LruEngine, chats, payload, stored  # noqa: E402
from many_engines import KINDS, page  # noqa: E402

from kvtop.attachment import Attachment  # noqa: E402
from kvtop.model.observation import Focus, RemoteObservation  # noqa: E402
from kvtop.model.remote import FLEET, EngineRow, EventFacts, RemoteFacts  # noqa: E402
from kvtop.model.what_if import WhatIf  # noqa: E402
from kvtop.operations import ReadOnly  # noqa: E402
from kvtop.sources.remote.capabilities import capabilities_of  # noqa: E402
from kvtop.sources.remote.dialects import recognise  # noqa: E402
from kvtop.sources.remote.exposition import parse  # noqa: E402
from kvtop.sources.remote.kv_events import decode  # noqa: E402
from kvtop.sources.remote.residency import Residency  # noqa: E402
from kvtop.sources.remote.what_if import what_if  # noqa: E402
from kvtop.tui.app import KvtopApp  # noqa: E402
from screenshots import offline, to_png  # noqa: E402

READINGS = 60
#: Blocks of the engine that is mirrored, requests it has served, and engines of the fleet.
POOL, REQUESTS, ENGINES = 2048, 900, 36


class Traffic:
    """One engine's cache events, in the order in which it served requests."""

    name = "10.0.3.7:8000"
    missing = {"operations": "read only: a picture"}  # noqa: RUF012

    def __init__(self) -> None:
        self.residency = Residency()
        self._engine = LruEngine(1700)
        self._requests = iter(chats(REQUESTS, seed=4, users=60))
        self._rng = random.Random(4)
        self._at_s = 0.0

    def go_on(self, requests: int) -> None:
        """Serve some requests."""
        for _, chain in zip(range(requests), self._requests, strict=False):
            self._at_s += 0.8
            told = self._engine.serve(chain)
            offloaded = [
                replaced for replaced in told if replaced["type"] == "BlockStored" and self._rng.random() < 0.2
            ]
            told += [stored(e["block_hashes"], e["parent_block_hash"], size=16, medium="CPU") for e in offloaded]
            self.residency.apply(decode(payload(*told, time_s=self._at_s)), 0)

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return the newest facts and the mirror."""
        residency = self.residency
        events = EventFacts(
            "complete", residency.by_medium(), residency.distinct, residency.prefixes(), batches=REQUESTS,
            stored=residency.stored, removed=residency.removed, mean_life_s=residency.mean_life_s,
        )  # fmt: skip
        row = EngineRow(
            "Llama-3.3-70B", "0", usage_ratio=0.31, total_blocks=POOL, used_blocks=635, block_size=16, running=14,
            waiting=2, queries=1e6 + self._at_s * 900, hits=5.7e5 + self._at_s * 520, hit_unit="tokens", preemptions=3,
            generated_tokens=81_200,
        )  # fmt: skip
        table = capabilities_of("vLLM", (row,), events_reason=None, has_events=True)
        facts = RemoteFacts("vLLM", "0.33.0", f"http://{self.name}", (row,), 0, table, (), events)
        mirror = residency.mirror({0: POOL}, "complete")
        if focus.block_id is not None:
            mirror = replace(mirror, block=residency.block_at("device", focus.block_id, mirror.places))
        return RemoteObservation(facts, mirror)

    def what_if(self) -> WhatIf | None:
        """Return the estimates."""
        lookups = {rank: found.newest() for rank, found in self.residency.lookups.items()}
        made = what_if(lookups, POOL, 348, block_size=16, is_told=True)
        return replace(made, told_queries=made.traffic.blocks * 17.1, told_hits=made.traffic.hits * 17.6)

    def close(self) -> None:
        """There is nothing to close."""


class Scraped:
    """A fleet behind a Prometheus, as its metrics pages make it."""

    name = "prometheus.internal:9090"
    missing = {"operations": "read only: a picture"}  # noqa: RUF012

    def __init__(self) -> None:
        self._turn = 0

    def go_on(self, requests: int) -> None:
        """Let time go by."""
        self._turn += 1

    def read(self, focus: Focus, timeout_s: float) -> RemoteObservation:
        """Return a row for each engine."""
        rng = random.Random(9)
        rows: list[EngineRow] = []
        for number in range(ENGINES):
            kind = [*KINDS, "vLLM", "vLLM"][number % (len(KINDS) + 2)]
            level = (rng.randrange(15, 97) + self._turn * (number % 3)) % 98
            target = f"{kind.lower().replace('.', '').replace('-', '')}-{number:02}.gpu:8000"
            if number in (11, 27):
                rows.append(
                    EngineRow(target=target, kind=kind, trouble="Prometheus cannot scrape it (up is 0)", is_up=False)
                )
                continue
            text = parse(page(kind, level))
            dialect = recognise(text)
            assert dialect is not None
            told = dialect.read(text).rows
            rows += [replace(row, target=target, kind=kind, age_s=rng.random() * 15) for row in told]
        return RemoteObservation(RemoteFacts(FLEET, None, f"http://{self.name}", tuple(rows)))

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class RemoteShot:
    """One picture: of what, how large the screen is, which keys were pressed."""

    name: str
    of: type[Traffic] | type[Scraped]
    size: tuple[int, int] = (120, 40)
    keys: tuple[str, ...] = ()


SHOTS = (
    RemoteShot("fleet-prometheus", Scraped, keys=("s",)),
    RemoteShot("fleet-prometheus-80x24", Scraped, (80, 24), keys=("s",)),
    RemoteShot("attached-events", Traffic),
    RemoteShot("mirror", Traffic, keys=("1", "down", "down", "right", "right", "right")),
    RemoteShot("mirror-80x24", Traffic, (80, 24), keys=("1", "down", "right")),
    RemoteShot("mirror-age", Traffic, keys=("1", "c")),
    RemoteShot("what-if", Traffic, (120, 48), keys=("a",)),
)


async def take(shot: RemoteShot, folder: Path) -> Path:
    """Draw one picture, and return the SVG's path."""
    now = 0.0
    source = shot.of()
    attachment = Attachment(source, ReadOnly("a picture"), clock=lambda: now)
    app = KvtopApp(lambda: attachment, auto_poll=False, clock=lambda: now)
    async with app.run_test(size=shot.size) as pilot:
        await pilot.pause()
        for _ in range(READINGS):
            now += 1.0
            source.go_on(REQUESTS // READINGS)
            await app.poll_once()
        for key in shot.keys:
            await pilot.press(key)
            await pilot.pause()
            await app.poll_once()
        await pilot.pause(0.3)
        path = folder / f"{shot.name}.svg"
        path.write_text(offline(app.export_screenshot(title="kvtop")), encoding="utf-8")
        return path


def main() -> None:
    """Make all pictures, or those named."""
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
    os.environ.pop("NO_COLOR", None)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pictures to make; all of them by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "screenshots")
    arguments = parser.parse_args()
    for shot in SHOTS:
        if not arguments.names or shot.name in arguments.names:
            svg = asyncio.run(take(shot, arguments.folder))
            to_png(svg)
            print(svg)


if __name__ == "__main__":
    main()
