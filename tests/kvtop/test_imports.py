"""What is loaded when: import rules see no late import, so a fresh interpreter is asked what it holds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "textual", "numpy", "kvtop", "prometheus_client", "rich")

#: The console up to its first frame, while its engine is still starting.
FIRST_FRAME = """
import asyncio, threading
from kvtop.errors import SourceError
from kvtop.tui.app import KvtopApp

def connect():
    threading.Event().wait(1)
    raise SourceError("no engine")

async def main():
    async with KvtopApp(connect).run_test() as pilot:
        await pilot.pause()
        assert pilot.app.screen.query("BlockMap")

asyncio.run(main())
"""

CASES = [
    ("import kvtop", set(HEAVY) - {"kvtop"}),
    ("import kvtop; kvtop.attach", {"torch", "textual", "prometheus_client", "rich"}),
    ("import allocator", {"torch", "textual", "kvtop", "prometheus_client", "rich"}),
    ("import allocator.engine", {"torch", "textual", "kvtop", "prometheus_client", "rich"}),
    ("import kvtop.cli; kvtop.cli.run(['--help'])", {"torch", "textual", "numpy", "prometheus_client"}),
    ("import kvtop.cli; kvtop.cli.run(['run', '--help'])", {"torch", "textual", "numpy", "prometheus_client"}),
    ("import kvtop.cli; kvtop.cli.run(['run', '--blocks', '0'])", {"torch", "textual", "numpy", "prometheus_client"}),
    (
        "import kvtop.cli; assert kvtop.cli.run(['run', '--geometry', 'none', '--blocks', '16', '--steps', '3']) == 0",
        {"torch", "textual", "prometheus_client"},
    ),
    (
        "from kvtop.workloads.model import model_requests; next(model_requests(0, block_size=4, num_blocks=9))",
        {"torch", "textual", "prometheus_client"},
    ),
    ("import kvtop.console, kvtop.engine_process, kvtop.sources.local", {"torch", "textual", "prometheus_client"}),
    (FIRST_FRAME, {"torch", "prometheus_client"}),
]


@pytest.mark.parametrize(("code", "forbidden"), CASES, ids=[code.strip().splitlines()[0] for code, _ in CASES])
def test_loads_nothing_it_does_not_need(code, forbidden):
    program = f"{code}\nimport sys\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTOP_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert not loaded & forbidden
