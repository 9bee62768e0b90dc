"""Make the pictures of real servers in ``screenshots/``.

    KVTOP_ENGINES=/where/they/are python scripts/engine_screenshots.py

A vLLM and an SGLang server with their plugins, under load with shared beginnings, and consoles attached to each: by the
plugin's block map, and by metrics with cache events. Servers run in real time: two pictures are never the same.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engines")]

from engine_servers import EngineServer, sglang_server, vllm_server  # noqa: E402

from kvtop.targets import AttachOptions, open_target  # noqa: E402
from kvtop.tui.app import KvtopApp  # noqa: E402
from screenshots import offline, to_png  # noqa: E402

#: Seconds a console looks before its picture, so that the trends have something to show.
LOOK_S = 20.0
BLOCKS = 512


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
    Shot("engine-vllm-events", "vllm", with_events=True),
    Shot("engine-sglang", "local:sglang"),
)


@contextmanager
def load(server: EngineServer) -> Iterator[None]:
    """Have requests with shared beginnings computed, several at once, until the block ends."""
    stop = threading.Event()
    rng = random.Random(4)
    beginnings = [[rng.randrange(3, 400) for _ in range(rng.choice((160, 320, 640)))] for _ in range(5)]

    def ask(seed: int) -> None:
        own = random.Random(seed)
        while not stop.is_set():
            rest = [own.randrange(3, 400) for _ in range(own.randrange(20, 600))]
            with suppress(TimeoutError):  # on a machine that is too busy
                server.complete(own.choice(beginnings) + rest, own.randrange(4, 60))

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(10)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


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
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        runtime = Path(directory) / "r"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        for kind in ("vllm", "sglang"):
            of_kind = [shot for shot in shots if shot.target.endswith(kind)]
            if of_kind:
                make_all(of_kind, kind, Path(directory), arguments.folder)


def make_all(shots: list[Shot], kind: str, directory: Path, folder: Path) -> None:
    """Make the pictures of one server."""
    opens = (
        vllm_server(directory, publish=kind, events=True, blocks=BLOCKS)
        if kind == "vllm"
        else sglang_server(directory, publish=kind)
    )
    with opens as server, load(server):
        for shot in shots:
            svg = asyncio.run(take(shot, server, folder))
            to_png(svg)
            print(svg, flush=True)


if __name__ == "__main__":
    main()
