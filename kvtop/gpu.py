"""GPUs of this machine, as NVML tells it: polled by a thread of its own, so that no scrape waits for a driver.

What goes wrong is a state with a name: of the driver (``DRIVER_STATES``), or of one GPU (``GPU_STATES``). A fact that a
GPU does not offer, or that this user may not see, is ``None`` and gives no series.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: ``not-answering``: a call into the driver has not come back. ``starting``: not asked yet.
DRIVER_STATES: Final = ("ok", "no-library", "no-driver", "no-permission", "error", "not-answering", "starting")
#: ``no-permission``: some of its facts may not be seen.
GPU_STATES: Final = ("ok", "lost", "no-permission", "error")

#: Seconds between two looks, while there is a driver and while there is none.
POLL_EVERY_S: Final = 2.0
RETRY_EVERY_S: Final = 30.0
#: Seconds after which a look that has not come back counts as ``not-answering``.
ANSWER_BOUND_S: Final = 10.0
#: Longest wait for the thread at the end; one that is stuck in the driver is left behind. [s]
_END_S: Final = 1.0

#: NVML's error codes that have a state of their own.
_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 3, 4, 6
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _GPU_IS_LOST = 9, 12, 15
_DRIVER_ERRORS: Final = {
    _DRIVER_NOT_LOADED: "no-driver",
    _LIBRARY_NOT_FOUND: "no-library",
    _NO_PERMISSION: "no-permission",
}
#: Processes between a GPU's user and this one, at most: the engine is a child of the console.
_MAX_PARENTS: Final = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, or one slice of a GPU in MIG mode, as it was seen.

    Attributes:
        gpu: Its index; of a slice, its GPU's index and its own: ``0:1``.
        state: One of ``GPU_STATES``.
        reason: What NVML said; empty when all is well.
        memory_used, memory_total: [bytes]
        utilization_ratio: Share of the time in which some kernel ran, 0 to 1.
        power_watts, temperature_celsius: As named.
        pcie_sent, pcie_received: PCIe traffic over the last moments. [bytes / s]
        kvtop_memory, other_memory: Memory of this program's processes and of all others. [bytes]
    """

    gpu: str
    state: str = "ok"
    reason: str = ""
    memory_used: int | None = None
    memory_total: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    pcie_sent: float | None = None
    pcie_received: float | None = None
    kvtop_memory: int | None = None
    other_memory: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at the driver: its state, what it said, and the GPUs it has."""

    state: str
    reason: str = ""
    gpus: tuple[GpuFacts, ...] = ()


class GpuMonitor:
    """Keeps the newest reading.

    Args:
        nvml: The NVML binding; ``None`` takes the installed one.
        clock: Real seconds, monotonic.
        is_ours: Whether a process is this program's.
    """

    def __init__(
        self,
        nvml: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_ours: Callable[[int], bool] | None = None,
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._is_ours = is_ours or _is_own_process
        self._reading = GpuReading("starting")
        self._asked_at_s: float | None = None
        self._is_open = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every ``POLL_EVERY_S`` from a thread of its own, until ``close``."""
        self._thread = threading.Thread(target=self._run, name="kvtop-gpu", daemon=True)
        self._thread.start()

    def reading(self) -> GpuReading:
        """Return the newest reading, at once."""
        asked_at_s = self._asked_at_s
        if asked_at_s is not None and self._clock() - asked_at_s > ANSWER_BOUND_S:
            return GpuReading("not-answering", f"NVML has not answered for {ANSWER_BOUND_S:g} s")
        return self._reading

    def poll(self) -> GpuReading:
        """Look now. What comes of it is also what ``reading`` returns from here on."""
        self._asked_at_s = self._clock()
        self._reading = self._look()
        self._asked_at_s = None
        return self._reading

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            reading = self.poll()
            self._stop.wait(POLL_EVERY_S if reading.state == "ok" else RETRY_EVERY_S)

    def _look(self) -> GpuReading:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        nvml = self._nvml
        try:
            if not self._is_open:
                nvml.nvmlInit()
                self._is_open = True
            return GpuReading("ok", "", tuple(self._all(nvml)))
        except nvml.NVMLError as error:
            self._is_open = False
            return GpuReading(_DRIVER_ERRORS.get(_code(error), "error"), str(error))

    def _all(self, nvml: Any) -> Iterator[GpuFacts]:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                slices = _slices(nvml, handle)
            except nvml.NVMLError as error:
                yield _broken(str(index), error)
                continue
            yield self._facts(nvml, handle, str(index))
            for number, part in slices:
                yield self._facts(nvml, part, f"{index}:{number}")

    def _facts(self, nvml: Any, handle: Any, gpu: str) -> GpuFacts:
        denied: list[str] = []

        def ask(call: Callable[[], _T]) -> _T | None:
            try:
                return call()
            except nvml.NVMLError as error:
                if _code(error) == _GPU_IS_LOST:
                    raise
                if _code(error) == _NO_PERMISSION:
                    denied.append(str(error))
                return None

        try:
            memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
            rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
            milliwatts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            celsius = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            sent = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
            received = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
            processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError as error:
            return _broken(gpu, error)
        ours, others = self._split(processes)
        return GpuFacts(
            gpu=gpu,
            state="no-permission" if denied else "ok",
            reason=denied[0] if denied else "",
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            utilization_ratio=None if rates is None else rates.gpu / 100,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=None if celsius is None else float(celsius),
            # NVML counts in units of 1024 bytes.
            pcie_sent=None if sent is None else sent * 1024.0,
            pcie_received=None if received is None else received * 1024.0,
            kvtop_memory=ours,
            other_memory=others,
        )

    def _split(self, processes: list[Any] | None) -> tuple[int | None, int | None]:
        """Return the memory of this program's processes and of the others; ``None`` where the driver does not say."""
        if processes is None:
            return None, None
        sums: dict[bool, int | None] = {True: 0, False: 0}
        for process in processes:
            ours, used = self._is_ours(process.pid), process.usedGpuMemory
            so_far = sums[ours]
            sums[ours] = None if used is None or so_far is None else so_far + int(used)
        return sums[True], sums[False]


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


def _slices(nvml: Any, handle: Any) -> list[tuple[int, Any]]:
    """Return a GPU's slices with their numbers; none where it is not in MIG mode, or cannot be."""
    try:
        is_sliced, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if _code(error) in (_NOT_SUPPORTED, _NO_PERMISSION):
            return []
        raise
    if not is_sliced:
        return []
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append((number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except nvml.NVMLError as error:
            if _code(error) not in (_NOT_FOUND, _NO_PERMISSION):
                raise
    return found


def _broken(gpu: str, error: Any) -> GpuFacts:
    states = {_GPU_IS_LOST: "lost", _NO_PERMISSION: "no-permission"}
    return GpuFacts(gpu, states.get(_code(error), "error"), str(error))


def _code(error: Any) -> int:
    return int(getattr(error, "value", 0))


def _is_own_process(pid: int) -> bool:
    """Return whether a process is this one, or was started by it at few removes."""
    own = os.getpid()
    for _ in range(_MAX_PARENTS):
        if pid == own:
            return True
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                # The name of the program, in parentheses, may hold anything; its parent comes two words after.
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == own
