"""GpuCollector: what NVML tells of the GPUs as Prometheus metrics. Names and texts are here once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtop.gpu import DRIVER_STATES, GPU_STATES, GpuMonitor


class GpuCollector(Collector):
    """Turns the newest reading into metric families; it asks the driver nothing.

    Args:
        monitor: Where the reading comes from.
        source: The ``source`` label.
    """

    def __init__(self, monitor: GpuMonitor, source: str) -> None:
        self._monitor = monitor
        self._source = source

    def collect(self) -> Iterator[Metric]:
        reading = self._monitor.reading()
        driver = GaugeMetricFamily(
            "kvtop_gpu_driver_state", "State of the NVIDIA driver: 1 for the present one.", labels=("source", "state")
        )
        for state in DRIVER_STATES:
            driver.add_metric((self._source, state), float(state == reading.state))
        yield driver
        states = GaugeMetricFamily(
            "kvtop_gpu_state", "State of a GPU: 1 for the present one.", labels=("source", "gpu", "state")
        )
        for facts in reading.gpus:
            for state in GPU_STATES:
                states.add_metric((self._source, facts.gpu, state), float(state == facts.state))
        if states.samples:
            yield states
        for name, text, label, fields in _FACTS:
            labels = ("source", "gpu") if label is None else ("source", "gpu", label)
            family = GaugeMetricFamily(f"kvtop_gpu_{name}", text, labels=labels)
            for facts in reading.gpus:
                for value_of_label, field in fields.items():
                    value = getattr(facts, field)
                    if value is not None:
                        more = () if label is None else (value_of_label,)
                        family.add_metric((self._source, facts.gpu, *more), value)
            if family.samples:
                yield family


#: Name, text, label besides ``source`` and ``gpu``, and the field for each of its values.
_FACTS: Final[tuple[tuple[str, str, str | None, dict[str, str]], ...]] = (
    ("memory_used_bytes", "Memory in use on a GPU.", None, {"": "memory_used"}),
    ("memory_total_bytes", "Memory of a GPU.", None, {"": "memory_total"}),
    ("utilization_ratio", "Share of the time in which a GPU ran something, 0 to 1.", None, {"": "utilization_ratio"}),
    ("power_watts", "Power a GPU draws.", None, {"": "power_watts"}),
    ("temperature_celsius", "Temperature of a GPU.", None, {"": "temperature_celsius"}),
    (
        "pcie_bytes_per_second",
        "PCIe traffic of a GPU, over the last moments.",
        "direction",
        {"sent": "pcie_sent", "received": "pcie_received"},
    ),
    (
        "process_memory_bytes",
        "Memory of a GPU by whose processes hold it.",
        "process",
        {"kvtop": "kvtop_memory", "other": "other_memory"},
    ),
)
GPU_METRICS: Final = ("kvtop_gpu_driver_state", "kvtop_gpu_state", *(f"kvtop_gpu_{name}" for name, *_ in _FACTS))
