"""Beside: what panels show that the engine itself does not tell. Owns the thread that asks the GPU driver."""

from __future__ import annotations

from typing import Any, Final

from kvtop.gpu import GpuMonitor, GpuReading

#: Panels that stand for any engine, of ours or not: they need no snapshot.
PANELS: Final = ("gpu",)


class Beside:
    """The facts beside the engine's. One thread draws what another follows; both only swap frozen values.

    Args:
        nvml: The NVML binding; ``None`` takes the installed one.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._gpus: GpuMonitor | None = None

    def open(self, panel: str) -> None:
        """Begin to look at what a panel shows; the driver is asked from a thread of its own, from then on."""
        if panel == "gpu" and self._gpus is None:
            self._gpus = GpuMonitor(self._nvml)
            self._gpus.start()

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """The latest readings of the GPUs, oldest first; empty before anybody looked at them."""
        return () if self._gpus is None else self._gpus.recent()

    def close(self) -> None:
        """End the thread, within its bound. Safe to call twice."""
        if self._gpus is not None:
            self._gpus.close()
