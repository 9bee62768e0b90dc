"""The overhead benchmark on a small engine: real processes, figures whole. Speed is not tested."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from published import own_directories

from kvtop.bench.overhead import OverheadSizes, PublishedProcess
from kvtop.bench.suites import run_bench_overhead
from kvtop.errors import KvtopError


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        own_directories(monkeypatch, Path(directory))
        yield


def test_the_overhead_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = OverheadSizes(num_blocks=256, observers=2, scrapes=1, warm_up_s=0.0)
    assert run_bench_overhead(rounds=1, as_json=True, sizes=sizes) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "overhead"
    told = {figure["what"]: figure for figure in found["figures"]}
    assert told["256 blocks, steps alone"]["median"] > 0
    assert told["readings of all observers"]["median"] > 0
    assert told["256 blocks, steps with 2 observers ÷ alone"]["at_least"] == 0.98
    assert told["256 blocks, steps scraped every second ÷ alone"]["median"] > 0


def test_an_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(KvtopError, match="the engine did not start: --publish no name: an engine's name"):
        PublishedProcess("no name", 64, metrics=False)
