"""FakeNvml: a driver with two GPUs that fails in every way a driver can."""

from __future__ import annotations

from types import SimpleNamespace

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, NO_DRIVER, NO_LIBRARY, LOST, UNKNOWN = 3, 4, 6, 9, 12, 15, 999
OURS = 41


class FakeNvml:
    """A driver with two GPUs. ``fails`` maps a call, or a call and a handle, to the code it fails with."""

    NVML_TEMPERATURE_GPU, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 0, 1

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def __init__(self, fails: dict[object, int] | None = None, *, slices: dict[int, int] | None = None) -> None:
        self.fails = dict(fails or {})
        self.slices = slices or {}
        self.inits = 0

    def _answer(self, call: str, handle: object = None) -> None:
        code = self.fails.get(call, self.fails.get((call, handle)))
        if code is not None:
            raise self.NVMLError(code)

    def nvmlInit(self) -> None:
        self.inits += 1
        self._answer("init")

    def nvmlDeviceGetCount(self) -> int:
        self._answer("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._answer("handle", str(index))
        return str(index)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        self._answer("mig", handle)
        return int(int(handle) in self.slices), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:
        if number >= self.slices[int(handle)]:
            raise self.NVMLError(NOT_FOUND)
        return f"{handle}:{number}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._answer("memory", handle)
        return SimpleNamespace(used=1000 + int(handle[0]), total=8000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._answer("rates", handle)
        return SimpleNamespace(gpu=75, memory=20)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._answer("power", handle)
        return 250_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._answer("limit", handle)
        return 700_000

    def nvmlDeviceGetName(self, handle: str) -> str:
        self._answer("name", handle)
        return "NVIDIA H200"

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._answer("temperature", handle)
        return 61

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        self._answer("pcie", handle)
        return (2, 3)[counter]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        self._answer("processes", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in ((OURS, 300), (7, 50), (8, 6))]
