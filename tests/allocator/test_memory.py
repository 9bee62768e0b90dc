"""Memory on a CPU, as the system counts it: a shrink gives it back, a grow takes none before it is written.

Each case runs in a process of its own, which prints its resident bytes after each act.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import numpy as np
from allocator import BlockManager, EngineConfig, Geometry, TorchStorage

SLAB, BLOCK_SIZE, TOTAL = 8, 16, 64
geometry = Geometry("1 MiB", 16, 2, 8, 128, "bf16")
config = EngineConfig(num_blocks=TOTAL, num_swap_blocks=0, slab_blocks=SLAB, device="cpu")
storage = TorchStorage(geometry, BLOCK_SIZE, "cpu", SLAB)
manager = BlockManager(config, storage)
seen = []

def note(act):
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("VmRSS"))
    seen.append([act, int(fields["VmRSS"].split()[0]) * 1024])

def touch(first, last):
    for block in range(first, last):
        slots = np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE, dtype=np.int64)
        storage.write_stamps("device", slots, slots.view(np.uint64))

touch(0, 1)  # what the first write loads is not counted
note("built")
touch(0, TOTAL)
note("touched")
for cycle in range(int(sys.argv[1])):
    rows = [manager.admit((), BLOCK_SIZE).row for _ in range(TOTAL)]
    manager.free_many(np.array(rows[: TOTAL - 4], np.int64))  # the last four blocks stay held and have to move down
    manager.resize(TOTAL // 4)
    manager.free_many(np.array(rows[TOTAL - 4 :], np.int64))
    note("shrunk")
    manager.resize(TOTAL)
    note("grown")
    touch(TOTAL // 4, TOTAL)
    note("touched")
print(json.dumps({"block_bytes": storage.block_bytes, "seen": seen}))
"""

MIB = 1 << 20
#: What a process's resident memory may wander by, beside the slabs.
SLACK = 8 * MIB


def resident_bytes(cycles: int) -> tuple[int, list[tuple[str, int]]]:
    """Return the bytes of a block and what was resident after each act."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cycles)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result["block_bytes"], [(act, size) for act, size in result["seen"]]


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def test_a_shrink_returns_the_slabs_above_the_end_and_a_grow_takes_nothing_yet():
    block_bytes, seen = resident_bytes(1)
    assert block_bytes == MIB
    (_, built), (_, touched), (_, shrunk), (_, grown), (_, again) = seen
    assert touched - built == pytest.approx(63 * MIB, abs=SLACK)
    assert touched - shrunk == pytest.approx(48 * MIB, abs=SLACK)
    assert grown - shrunk == pytest.approx(0, abs=SLACK)
    assert again - grown == pytest.approx(48 * MIB, abs=SLACK)


def test_memory_is_returned_every_time():
    _, seen = resident_bytes(4)
    shrunk = [size for act, size in seen if act == "shrunk"]
    assert max(shrunk) - min(shrunk) < SLACK
