"""GPUs through a fake NVML: every fact, and every way in which a driver or a GPU lets one down."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from fake_nvml import LOST, NO_DRIVER, NO_LIBRARY, NO_PERMISSION, NOT_SUPPORTED, OURS, UNKNOWN, FakeNvml

from kvtop.gpu import (
    ANSWER_BOUND_S,
    DRIVER_STATES,
    GPU_STATES,
    KEPT,
    GpuMonitor,
    GpuProcess,
    _is_own_process,
)
from kvtop.gpu_metrics import GPU_METRICS, GpuCollector
from kvtop.processes import program_of


def monitor(nvml: FakeNvml) -> GpuMonitor:
    found = GpuMonitor(nvml, is_ours=lambda pid: pid == OURS, name_of={OURS: "kvtop", 7: "python3"}.get)
    found.poll()
    return found


def samples(found: GpuMonitor) -> dict[tuple[str, ...], float]:
    """Return every sample that is not a state's 0, by name and label values besides the source."""
    told = [s for family in GpuCollector(found, "embedded").collect() for s in family.samples]
    assert all(s.labels["source"] == "embedded" for s in told)
    keyed = {(s.name, *[v for label, v in s.labels.items() if label != "source"]): s.value for s in told}
    return {name: value for name, value in keyed.items() if value or "state" not in name[0]}


ALL_OF_ONE = {
    ("kvtop_gpu_state", "0", "ok"): 1,
    ("kvtop_gpu_memory_used_bytes", "0"): 1000,
    ("kvtop_gpu_memory_total_bytes", "0"): 8000,
    ("kvtop_gpu_utilization_ratio", "0"): 0.75,
    ("kvtop_gpu_power_watts", "0"): 250.5,
    ("kvtop_gpu_temperature_celsius", "0"): 61,
    ("kvtop_gpu_pcie_bytes_per_second", "0", "sent"): 2048,
    ("kvtop_gpu_pcie_bytes_per_second", "0", "received"): 3072,
    ("kvtop_gpu_process_memory_bytes", "0", "kvtop"): 300,
    ("kvtop_gpu_process_memory_bytes", "0", "other"): 56,
}


def of_gpu(found: dict[tuple[str, ...], float], gpu: str) -> dict[tuple[str, ...], float]:
    return {name: value for name, value in found.items() if len(name) > 1 and name[1] == gpu}


def test_every_fact_of_every_gpu():
    found = samples(monitor(FakeNvml()))
    assert found[("kvtop_gpu_driver_state", "ok")] == 1
    assert of_gpu(found, "0") == ALL_OF_ONE
    assert of_gpu(found, "1")[("kvtop_gpu_memory_used_bytes", "1")] == 1001
    assert {name[0] for name in found} == set(GPU_METRICS)


@pytest.mark.parametrize(
    ("fails", "state"),
    [
        ({"init": NO_LIBRARY}, "no-library"),
        ({"init": NO_DRIVER}, "no-driver"),
        ({"init": NO_PERMISSION}, "no-permission"),
        ({"init": UNKNOWN}, "error"),
        ({"count": UNKNOWN}, "error"),
    ],
)
def test_a_driver_that_cannot_be_asked_is_a_state_and_is_tried_again(fails, state):
    nvml = FakeNvml(fails)
    found = monitor(nvml)
    assert samples(found) == {("kvtop_gpu_driver_state", state): 1}
    assert found.reading().reason == f"code {next(iter(fails.values()))}"
    nvml.fails.clear()
    found.poll()
    assert nvml.inits == 2
    assert of_gpu(samples(found), "0") == ALL_OF_ONE


@pytest.mark.parametrize("call", ["handle", "mig", "memory", "power", "processes"])
def test_a_lost_gpu_is_a_state_and_the_others_go_on(call):
    found = samples(monitor(FakeNvml({(call, "1"): LOST})))
    assert of_gpu(found, "1") == {("kvtop_gpu_state", "1", "lost"): 1}
    assert of_gpu(found, "0") == ALL_OF_ONE


def test_what_this_user_may_not_see_is_absent_and_said():
    reading = monitor(FakeNvml({"processes": NO_PERMISSION, "power": NO_PERMISSION})).poll()
    assert (reading.gpus[0].state, reading.gpus[0].reason) == ("no-permission", f"code {NO_PERMISSION}")
    found = of_gpu(samples(monitor(FakeNvml({"processes": NO_PERMISSION}))), "0")
    assert ("kvtop_gpu_state", "0", "no-permission") in found
    assert not [name for name in found if name[0] == "kvtop_gpu_process_memory_bytes"]
    assert ("kvtop_gpu_memory_used_bytes", "0") in found


def test_what_a_gpu_does_not_offer_is_absent_and_no_fault():
    found = of_gpu(samples(monitor(FakeNvml({"mig": NOT_SUPPORTED, "rates": NOT_SUPPORTED, "pcie": UNKNOWN}))), "0")
    assert found == {
        name: value for name, value in ALL_OF_ONE.items() if "utilization" not in name[0] and "pcie" not in name[0]
    }


def test_the_slices_of_a_gpu_in_mig_mode_stand_beside_it():
    nvml = FakeNvml({("rates", "0"): NOT_SUPPORTED, ("power", "0:1"): NOT_SUPPORTED}, slices={0: 2})
    found = samples(monitor(nvml))
    assert {name[1] for name in found if name[0] == "kvtop_gpu_memory_used_bytes"} == {"0", "0:0", "0:1", "1"}
    assert ("kvtop_gpu_power_watts", "0:0") in found
    assert ("kvtop_gpu_power_watts", "0:1") not in found


def test_memory_that_the_driver_does_not_tell_is_unknown(monkeypatch):
    nvml = FakeNvml()
    told = [SimpleNamespace(pid=OURS, usedGpuMemory=None), SimpleNamespace(pid=7, usedGpuMemory=5)]
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: told)
    found = samples(monitor(nvml))
    assert ("kvtop_gpu_process_memory_bytes", "0", "kvtop") not in found
    assert found[("kvtop_gpu_process_memory_bytes", "0", "other")] == 5


def test_a_driver_that_does_not_come_back_keeps_no_scrape_waiting():
    now_s, asked, go_on = [0.0], threading.Event(), threading.Event()

    class Stuck(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            asked.set()
            assert go_on.wait(10)
            return 2

    found = GpuMonitor(Stuck(), clock=lambda: now_s[0], is_ours=lambda pid: False)
    assert samples(found) == {("kvtop_gpu_driver_state", "starting"): 1}
    found.start()
    try:
        assert asked.wait(10)
        assert found.reading().state == "starting"
        now_s[0] = ANSWER_BOUND_S + 1
        assert samples(found) == {("kvtop_gpu_driver_state", "not-answering"): 1}
    finally:
        go_on.set()
        found.close()
    assert found.reading().state == "ok"


def test_the_processes_of_a_gpu_are_named_most_memory_first():
    facts = monitor(FakeNvml()).reading().gpus[0]
    assert facts.processes == (
        GpuProcess(OURS, "kvtop", 300, True),
        GpuProcess(7, "python3", 50, False),
        GpuProcess(8, None, 6, False),
    )
    assert (facts.name, facts.power_limit_watts) == ("NVIDIA H200", 700)
    assert monitor(FakeNvml({"processes": NO_PERMISSION})).reading().gpus[0].processes is None


def test_a_program_is_named_by_its_own_process():
    assert program_of(os.getpid())
    assert program_of(2**30) is None


def test_recent_readings_are_kept_in_order_and_bounded():
    found = monitor(FakeNvml())
    assert [reading.state for reading in found.recent()] == ["ok"]
    for _ in range(KEPT + 3):
        found.poll()
    assert len(found.recent()) == KEPT
    assert found.recent()[-1] == found.reading()


def test_states_are_a_closed_set():
    told = [s for family in GpuCollector(monitor(FakeNvml()), "embedded").collect() for s in family.samples]
    assert {s.labels["state"] for s in told if s.name == "kvtop_gpu_driver_state"} == set(DRIVER_STATES)
    assert {s.labels["state"] for s in told if s.name == "kvtop_gpu_state"} == set(GPU_STATES)


def test_own_processes_are_told_from_others():
    assert _is_own_process(os.getpid())
    assert not _is_own_process(os.getppid())
    assert not _is_own_process(2**30)


def test_without_a_driver_the_installed_binding_is_a_state_too():
    found = GpuMonitor()
    found.poll()
    assert found.reading().state in DRIVER_STATES
