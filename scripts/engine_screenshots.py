"""Make the pictures of real servers in ``screenshots/``.

    KVTOP_ENGINES=/where/they/are python scripts/engine_screenshots.py

A vLLM and an SGLang server with their plugins, under load with shared beginnings, and consoles attached to each: by the
plugin's block map, by metrics alone, and by cache events. Servers run in real time: two pictures are never the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engines")]

from engine_servers import EngineServer, sglang_server, vllm_server  # noqa: E402

from kvtop.targets import AttachOptions, open_target  # noqa: E402
from kvtop.tui.app import KvtopApp  # noqa: E402
from screenshots import offline, to_png  # noqa: E402

#: Seconds a console looks before its picture, so that the trends have something to show.
LOOK_S = 25.0
BLOCKS = 2048


@dataclass(frozen=True)
class Shot:
    """One picture: what the console is attached to, which keys were pressed."""

    name: str
    target: str
    with_events: bool = False
    keys: tuple[str, ...] = ()
    size: tuple[int, int] = (120, 40)


SHOTS = (
    Shot("engine-vllm", "local:vllm"),
    Shot("engine-vllm-80x24", "local:vllm", size=(80, 24)),
    Shot("engine-vllm-selected", "local:vllm", keys=("2", "down", "down", "enter")),
    Shot("engine-vllm-prefix", "local:vllm", keys=("4",)),
    Shot("engine-vllm-metrics", "vllm"),
    Shot("engine-vllm-events", "vllm", with_events=True),
    Shot("engine-sglang", "local:sglang"),
)


@contextmanager
def load(server: EngineServer, number: int, tokens: int) -> Iterator[None]:
    """Have so many requests computed at once, until the block ends."""
    stop = threading.Event()
    rng = random.Random(4)
    beginnings = [[rng.randrange(3, 400) for _ in range(rng.choice((160, 320, 640)))] for _ in range(5)]

    def ask(seed: int) -> None:
        own = random.Random(seed)
        while not stop.is_set():
            rest = [own.randrange(3, 400) for _ in range(own.randrange(20, 300))]
            server.complete(own.choice(beginnings) + rest, own.randrange(tokens // 8, tokens))

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


async def take(shot: Shot, server: EngineServer, folder: Path) -> Path:
    """Attach, look for a while, draw the picture, and return the SVG's path."""
    target = shot.target if shot.target.startswith("local:") else server.url
    options = AttachOptions()
    if shot.with_events:
        options = AttachOptions(events=(server.events or "",), replays=(server.replay or "",), topic="kv-events")
    attachment = open_target(target, options=options)
    app = KvtopApp(lambda: attachment)
    async with app.run_test(size=shot.size) as pilot:
        await pilot.pause(LOOK_S)
        for key in shot.keys:
            await pilot.press(key)
            await pilot.pause(0.5)
        await pilot.pause(1.0)
        path = folder / f"{shot.name}.svg"
        path.write_text(offline(app.export_screenshot(title="kvtop")), encoding="utf-8")
        return path


def main() -> None:
    """Make all pictures, or those named."""
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
    os.environ.pop("NO_COLOR", None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="pictures to make; all of them by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "screenshots")
    arguments = parser.parse_args()
    shots = [shot for shot in SHOTS if not arguments.names or shot.name in arguments.names]
    with tempfile.TemporaryDirectory(prefix="kv") as directory, ExitStack() as stack:
        runtime = Path(directory) / "r"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        servers: dict[str, EngineServer] = {}
        for shot in shots:
            kind = shot.target.removeprefix("local:")
            if kind not in servers:
                opens = (
                    vllm_server(Path(directory), publish="vllm", events=True, blocks=BLOCKS)
                    if kind == "vllm"
                    else sglang_server(Path(directory), publish="sglang")
                )
                servers[kind] = stack.enter_context(opens)
            many = kind == "vllm"
            with load(servers[kind], 14 if many else 6, 600 if many else 60):
                svg = asyncio.run(take(shot, servers[kind], arguments.folder))
            to_png(svg)
            print(svg, flush=True)


if __name__ == "__main__":
    main()
