"""vLLM's names for the same facts: each as vLLM itself exports it, with its type and its labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtop.compat import VllmCollector
from kvtop.model.view import View

#: Names, types and labels as vLLM exports them; its versions 0.6.6 to 0.33 together.
VLLM = {
    "vllm:num_requests_running": ("gauge", {"engine", "model_name"}),
    "vllm:num_requests_waiting": ("gauge", {"engine", "model_name"}),
    "vllm:num_requests_swapped": ("gauge", {"model_name"}),
    "vllm:kv_cache_usage_perc": ("gauge", {"engine", "model_name"}),
    "vllm:gpu_cache_usage_perc": ("gauge", {"engine", "model_name"}),
    "vllm:cpu_cache_usage_perc": ("gauge", {"model_name"}),
    "vllm:prefix_cache_queries_total": ("counter", {"engine", "model_name"}),
    "vllm:prefix_cache_hits_total": ("counter", {"engine", "model_name"}),
    "vllm:num_preemptions_total": ("counter", {"engine", "model_name"}),
    "vllm:prompt_tokens_total": ("counter", {"engine", "model_name"}),
    "vllm:generation_tokens_total": ("counter", {"engine", "model_name"}),
    "vllm:request_success_total": ("counter", {"engine", "model_name", "finished_reason"}),
    "vllm:cache_config_info": ("gauge", {"engine", "block_size", "num_gpu_blocks", "num_cpu_blocks"}),
}
#: Recorded expositions of vLLM, where this checkout has them.
SAMPLES = Path(__file__).parents[3] / "shared" / "reference" / "metrics_samples"


def exposition(*views: View) -> str:
    registry = CollectorRegistry()
    registry.register(VllmCollector(lambda: views))
    return generate_latest(registry).decode()


def read(text: str) -> Iterator[tuple[str, str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, family.type, sample.labels, sample.value


def test_names_types_and_labels_are_vllm_s(full_view):
    told = list(read(exposition(full_view)))
    assert {name for name, *_ in told} == set(VLLM)
    for name, kind, labels, _ in told:
        assert kind == VLLM[name][0]
        assert set(labels) >= VLLM[name][1]


def test_values_are_the_view_s(full_view):
    values = {name: value for name, _, labels, value in read(exposition(full_view)) if "reason" not in str(labels)}
    counters = full_view.snapshot.counters
    assert values["vllm:num_requests_waiting"] == full_view.snapshot.num_waiting
    assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"] == 0.25
    assert values["vllm:cpu_cache_usage_perc"] == 0.5
    assert values["vllm:prefix_cache_queries_total"] == counters.query_tokens
    assert values["vllm:num_preemptions_total"] == counters.preemptions_swap + counters.preemptions_recompute
    config = next(labels for name, _, labels, _ in read(exposition(full_view)) if name == "vllm:cache_config_info")
    assert config == {"engine": "0", "block_size": "16", "num_gpu_blocks": "4", "num_cpu_blocks": "2"}


def test_what_is_not_known_is_absent():
    assert exposition(View(source="embedded")) == ""


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no recorded expositions of vLLM beside this checkout")
def test_the_names_are_those_of_recorded_expositions():
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    for path in SAMPLES.glob("vllm_v*.prom"):
        text = path.read_text()
        types |= dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        for name, inside in re.findall(r"^(vllm:\w+)\{(.*)\} ", text, re.MULTILINE):
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    for name, (kind, promised) in VLLM.items():
        assert types[name] == kind
        assert promised <= labels[name]
