"""GPUs of this machine, as NVML tells it: polled by a thread of its own, so that nobody waits for a driver.

What goes wrong is a state with a name: of the driver (``DRIVER_STATES``), or of one GPU (``GPU_STATES``). A fact that a
GPU does not offer, or that this user may not see, is ``None``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvtop.processes import program_of

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


#: Readings kept, the newest among them, and processes told of one GPU.
KEPT: Final = 150
MAX_PROCESSES: Final = 64


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        pid: Its number, as the driver sees it.
        name: Its program; ``None`` where this user may not see it.
        memory: What it holds; ``None`` where the driver does not tell. [bytes]
        is_ours: Whether it is this program's.
    """

    pid: int
    name: str | None
    memory: int | None
    is_ours: bool


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
        power_limit_watts: What it may draw.
        pcie_sent, pcie_received: PCIe traffic over the last moments. [bytes / s]
        kvtop_memory, other_memory: Memory of this program's processes and of all others. [bytes]
        name: Its model.
        processes: Who holds its memory, most first, at most ``MAX_PROCESSES``; ``None`` where the driver does not tell.
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
    name: str | None = None
    power_limit_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None


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
        name_of: A process's program; ``None`` where it cannot be told.
    """

    def __init__(
        self,
        nvml: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_ours: Callable[[int], bool] | None = None,
        name_of: Callable[[int], str | None] | None = None,
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._is_ours = is_ours or _is_own_process
        self._name_of = name_of or program_of
        self._reading = GpuReading("starting")
        self._recent: tuple[GpuReading, ...] = ()
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

    def recent(self) -> tuple[GpuReading, ...]:
        """Return the latest readings at once, oldest first, at most ``KEPT``; the last one is ``reading()``."""
        return (*self._recent[:-1], self.reading())

    def poll(self) -> GpuReading:
        """Look now. What comes of it is also what ``reading`` returns from here on."""
        self._asked_at_s = self._clock()
        self._reading = self._look()
        self._recent = (*self._recent, self._reading)[-KEPT:]
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
            limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            name = ask(lambda: nvml.nvmlDeviceGetName(handle))
            celsius = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            sent = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
            received = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
            processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError as error:
            return _broken(gpu, error)
        told = None if processes is None else [self._process(p) for p in processes]
        ours, others = _split(told)
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
            name=name.decode(errors="replace") if isinstance(name, bytes) else name,
            power_limit_watts=None if limit is None else limit / 1000,
            processes=None if told is None else tuple(sorted(told, key=_by_memory)[:MAX_PROCESSES]),
        )

    def _process(self, process: Any) -> GpuProcess:
        pid, used = int(process.pid), process.usedGpuMemory
        return GpuProcess(pid, self._name_of(pid), None if used is None else int(used), self._is_ours(pid))


def _split(processes: list[GpuProcess] | None) -> tuple[int | None, int | None]:
    """Return the memory of this program's processes and of the others; ``None`` where the driver does not say."""
    if processes is None:
        return None, None
    sums: dict[bool, int | None] = {True: 0, False: 0}
    for process in processes:
        so_far = sums[process.is_ours]
        sums[process.is_ours] = None if process.memory is None or so_far is None else so_far + process.memory
    return sums[True], sums[False]


def _by_memory(process: GpuProcess) -> tuple[int, int]:
    return (-(process.memory or 0), process.pid)


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
