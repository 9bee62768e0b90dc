"""Metrics pages of every engine → rows: renames, units, absent and bad values, ranks, models, restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.exporter import ViewCollector
from kvtop.model.remote import EngineRow, usage_of
from kvtop.operations import ReadOnly
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessSource
from kvtop.sources.remote.dialects import CounterMemory, Told, recognise
from kvtop.sources.remote.exposition import MAX_SAMPLES, NotMetrics, parse

OWN = Path(__file__).parents[1] / "data" / "remote"
REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
#: Sample → (engine, rows), with what each row says of the numbers named.
SAMPLES: Mapping[str, tuple[str, list[dict[str, object]]]] = {
    "vllm_v1_0.33.prom": (
        "vLLM",
        [
            {
                "model": "example/model-8b",
                "usage_ratio": 0.4375,
                "total_blocks": 8192,
                "used_blocks": 3584,
                "block_size": 16,
                "running": 12,
                "waiting": 3,
                "queries": 182400.0,
                "hits": 119040.0,
                "hit_unit": "tokens",
                "preemptions": 7.0,
                "swapped": None,
                "evictions": None,
                "host_usage_ratio": None,
            }
        ],
    ),
    "vllm_v1_0.33.openmetrics_underscores.txt": ("vLLM", [{"usage_ratio": 0.4375, "hits": 119040.0, "waiting": 3}]),
    "vllm_v1_0.33.openmetrics_colons.txt": ("vLLM", [{"usage_ratio": 0.4375, "hits": 119040.0, "waiting": 3}]),
    "vllm_v1_0.33_multi_api_server.prom": ("vLLM", [{"usage_ratio": 0.4375, "hits": 119040.0, "waiting": 3}]),
    "vllm_v1_0.33_dp2.prom": (
        "vLLM",
        [
            {"engine": "0", "usage_ratio": 0.25, "total_blocks": 8192, "used_blocks": 2048},
            {"engine": "1", "usage_ratio": 0.8125, "total_blocks": 8192, "used_blocks": 6656, "running": 24},
        ],
    ),
    "vllm_v1_0.9.2.prom": ("vLLM", [{"usage_ratio": 0.31, "queries": 40960.0, "hit_unit": "tokens"}]),
    "vllm_v1_0.8.5.prom": (
        "vLLM",
        [{"usage_ratio": 0.31, "queries": 2560.0, "hits": 1280.0, "hit_unit": None, "total_blocks": None}],
    ),
    "vllm_v1_offload.prom": (
        "vLLM",
        [{"usage_ratio": 0.97, "host_usage_ratio": 0.66, "running": None, "queries": None, "hit_ratio": None}],
    ),
    "vllm_v0_0.6.6.prom": (
        "vLLM",
        [
            {
                "usage_ratio": 0.9375,
                "total_blocks": 2048,
                "host_usage_ratio": 0.03125,
                "swapped": 1,
                "hit_ratio": 0.62,
                "hits": None,
                "preemptions": 18.0,
            }
        ],
    ),
    "sglang_0.5.23.prom": (
        "SGLang",
        [
            {
                "usage_ratio": 0.44,
                "used_tokens": 57672,
                "cached_tokens": 41920,
                "free_tokens": 31480,
                "total_tokens": 131072,
                "total_blocks": 8192,
                "block_size": 16,
                "running": 12,
                "waiting": 3,
                "queries": 182400.0,
                "hits": 127232.0,
                "evictions": 8800.0,
                "preemptions": 5.0,
                "host_usage_ratio": 200000 / 262144,
                "prompt_tokens": 182400.0,
            }
        ],
    ),
    "sglang_0.4.9.prom": (
        "SGLang",
        [{"usage_ratio": 0.16, "used_tokens": 20480, "total_tokens": None, "preemptions": None, "hit_ratio": 0.5}],
    ),
    "llamacpp_2026.prom": ("llama.cpp", [{"usage_ratio": None, "running": 2, "waiting": 1, "hits": 1980.0}]),
    "llamacpp_before_pr13660.prom": (
        "llama.cpp",
        [{"usage_ratio": 0.412, "used_tokens": 3375, "hits": None, "hit_ratio": None}],
    ),
    "trtllm_serve.prom": (
        "TensorRT-LLM",
        [
            {
                "usage_ratio": 0.44,
                "total_blocks": 4096,
                "used_blocks": 1802,
                "block_size": 32,
                "host_usage_ratio": 0.02,
                "hits": 7120.0,
                "queries": 11610.0,
                "hit_unit": "blocks",
            }
        ],
    ),
    "triton_trtllm.prom": (
        "TensorRT-LLM on Triton",
        [{"usage_ratio": 1802 / 4096, "total_blocks": 4096, "running": 9, "waiting": 0, "hits": None}],
    ),
    "tgi_v3.prom": ("TGI", [{"usage_ratio": 21504 / 131072, "running": 8, "waiting": 2, "total_blocks": None}]),
}


def read(text: str) -> tuple[str, Told]:
    page = parse(text)
    dialect = recognise(page)
    assert dialect is not None
    return dialect.kind, dialect.read(page)


def says(row: EngineRow, wanted: Mapping[str, object]) -> None:
    for name, value in wanted.items():
        assert getattr(row, name) == (pytest.approx(value) if isinstance(value, float) else value), name


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no metrics samples in ../shared/reference")
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_page(name: str) -> None:
    kind, rows = SAMPLES[name]
    found, told = read((REFERENCE / "metrics_samples" / name).read_text())
    assert (found, len(told.rows)) == (kind, len(rows))
    for row, wanted in zip(told.rows, rows, strict=True):
        says(row, wanted)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no captures in ../shared/reference")
def test_every_page_that_is_there_has_an_expectation_or_is_a_capture() -> None:
    assert {p.name for p in (REFERENCE / "metrics_samples").iterdir()} == set(SAMPLES)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no captures in ../shared/reference")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("vllm-0.32.0-cpu.metrics.idle", [{"usage_ratio": 0.0, "total_blocks": 511, "used_blocks": 0}]),
        ("vllm-0.32.0-cpu.metrics.flood", [{"used_blocks": 506, "total_blocks": 511, "running": 11, "waiting": 9}]),
        ("vllm-0.32.0-cpu.metrics.busy", [{"used_blocks": 254, "running": 6, "hit_unit": "tokens"}]),
        ("vllm-0.32.0-cpu.metrics.reset_running", [{"preemptions": 9.0, "used_blocks": 0}]),
        ("vllm-0.32.0-cpu-hybrid.metrics.flood", [{"used_blocks": 116, "total_blocks": 511}]),
        (
            "vllm-0.32.0-cpu-dp2.metrics.busy",
            [
                {"engine": "0", "used_blocks": 104, "total_blocks": 511},
                {"engine": "1", "used_blocks": 95, "total_blocks": 511},
            ],
        ),
        ("vllm-0.14.0-cpu.metrics.flood", [{"used_blocks": 376, "total_blocks": 511, "running": 8}]),
        (
            "sglang-0.5.23-cpu.metrics.flood",
            [{"used_tokens": 3200, "cached_tokens": 816, "free_tokens": 80, "used_blocks": 200, "evictions": 1984.0}],
        ),
        ("sglang-0.5.23-cpu.metrics.idle", [{"usage_ratio": 0.0, "cached_tokens": 16, "evictions": None}]),
        ("llama.cpp-xllamacpp-2026.10.11549.metrics.after", [{"running": 0, "hits": 490.0, "usage_ratio": None}]),
    ],
)
def test_a_page_of_a_real_server(name: str, wanted: list[dict[str, object]]) -> None:
    path = REFERENCE / "real-captures" / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the repository")
    _, told = read(path.read_text())
    assert len(told.rows) == len(wanted)
    for row, numbers in zip(told.rows, wanted, strict=True):
        says(row, numbers)


def test_bad_values_are_unknown_and_never_zero() -> None:
    kind, told = read((OWN / "vllm_two_models.prom").read_text())
    assert kind == "vLLM"
    first, second, small = told.rows
    assert (first.model, first.engine, first.usage_ratio, first.hit_ratio) == ("big", "0", 0.5, 0.25)
    assert (second.engine, second.usage_ratio, second.waiting, second.running) == ("1", None, None, 3)
    assert (small.model, small.usage_ratio, small.running, small.waiting) == ("small", None, 0, None)
    assert first.total_blocks is None
    assert first.used_blocks is None
    assert any("outside" in note for note in told.notes)


def test_ranks_of_one_replica_are_not_counted_twice() -> None:
    _, told = read((OWN / "sglang_two_ranks.prom").read_text())
    assert [(row.engine, row.running, row.usage_ratio) for row in told.rows] == [("0", 4, 0.25), ("1", 5, 0.75)]
    assert told.rows[1].evictions == 64.0  # that series has no model label
    assert told.rows[0].evictions is None
    assert told.rows[0].prompt_tokens is None  # told for both ranks together
    assert usage_of(told.rows) == pytest.approx(0.625)


def test_the_use_of_several_engines_is_unknown_when_one_of_them_is() -> None:
    assert usage_of([EngineRow(usage_ratio=0.5), EngineRow()]) is None
    assert usage_of([]) is None
    assert usage_of([EngineRow(usage_ratio=0.5), EngineRow(usage_ratio=1.0, total_blocks=10)]) == 0.75


@pytest.mark.parametrize(
    ("labels", "blocks"),
    [
        ([("1024", "None", ""), ("1024", "None", "")], [512, 512]),  # the sum, told twice
        ([("1024", "1024", ""), ("1024", "1024", "")], [1024, 1024]),  # told for each: the override says so
        ([("1024", "None", "16384"), ("1024", "None", "16384")], [1024, 1024]),  # the tokens say so
        ([("1024", "None", ""), ("1023", "None", "")], [512, None]),
        ([("1024", "None", "")], [1024]),
        ([("None", "None", "")], [None]),
        ([("9" * 40, "None", "")], [None]),
    ],
)
def test_block_counts_over_several_engines(labels: list[tuple[str, str, str]], blocks: list[int | None]) -> None:
    lines = []
    for rank, (count, override, tokens) in enumerate(labels):
        lines.append(f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0')
        lines.append(
            f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="{count}",'
            f'num_gpu_blocks_override="{override}",kv_cache_size_tokens="{tokens}"}} 1'
        )
    _, told = read("\n".join(lines) + "\n")
    assert [row.total_blocks for row in told.rows] == [None if n is None else n - 1 for n in blocks]


def test_the_denominator_is_the_one_that_makes_held_blocks_whole() -> None:
    page = 'vllm:kv_cache_usage_perc {}\nvllm:cache_config_info{{num_gpu_blocks="512"}} 1\n'
    for usage, wanted in ((38 / 511, (511, 38)), (38 / 512, (512, 38)), (1.0, (511, 511))):
        row = read(page.format(usage))[1].rows[0]
        assert (row.total_blocks, row.used_blocks) == wanted


def test_our_own_exporter_is_read_back() -> None:
    engine, notes = build_engine(EngineOptions(num_blocks=64, swap_ratio=0.5, geometry="none", speed=None, seed=3))
    runner = EngineRunner(engine, speed=None, notes=notes)
    attachment = Attachment(InProcessSource(runner, name="lab"), ReadOnly("a test"))
    for _ in range(40):
        runner.turn()
    view = attachment.poll()
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view))
    kind, told = read(generate_latest(registry).decode())
    engine.close()
    assert kind == "kvtop"
    assert view.device is not None
    assert view.snapshot is not None
    numbers = view.device.numbers
    says(
        told.rows[0],
        {
            "model": "lab",
            "total_blocks": 64,
            "used_blocks": numbers.active + numbers.reserved,
            "usage_ratio": numbers.usage_ratio,
            "running": view.snapshot.num_running,
            "queries": float(view.snapshot.counters.query_blocks),
            "is_up": True,
        },
    )


def test_an_exporter_that_lost_its_engine_says_so() -> None:
    _, told = read('kvtop_source_up{source="lab"} 0\n')
    assert (told.rows[0].is_up, told.rows[0].usage_ratio) == (False, None)
    assert "lost its engine: lab" in told.notes[0]


def test_totals_go_on_rising_over_a_restart() -> None:
    memory = CounterMemory()
    row = EngineRow(model="m", queries=100.0, hits=40.0, preemptions=3.0)

    def after(**numbers: float | None) -> EngineRow:
        return memory.correct([replace(row, **numbers)])[0]  # type: ignore[arg-type]

    assert after() == row
    assert after(queries=150.0).queries == 150.0
    again = after(queries=10.0, hits=4.0, preemptions=3.0)
    assert (again.queries, again.hits, again.preemptions, memory.restarts) == (160.0, 44.0, 6.0, 1)
    assert after(queries=None, hits=8.0).queries is None
    assert after(queries=20.0, hits=8.0).queries == 170.0
    assert memory.restarts == 1
    # Another engine of the same server is not concerned.
    assert memory.correct([replace(row, engine="1", queries=1.0)])[0].queries == 1.0
    assert memory.restarts == 1


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "hello", "{}", "<html>", "# HELP a b\n", 'a{b="c" 1\n', "a{} b\n", "\x00\x01\n", "a{"],
)
def test_what_is_no_metrics_page(text: str) -> None:
    with pytest.raises(NotMetrics):
        parse(text)


def test_a_page_with_too_many_samples_is_given_up() -> None:
    with pytest.raises(NotMetrics, match="more than"):
        parse("a 1\n" * (MAX_SAMPLES + 1))


def test_metrics_of_something_else_are_recognised_as_nothing() -> None:
    assert recognise(parse("up 1\nnode_load1 0.5\nvllm_router_requests_total 3\n")) is None
