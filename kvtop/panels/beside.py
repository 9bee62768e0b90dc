"""Beside: what panels show that the engine itself does not tell. Owns the thread that asks the GPU driver."""

from __future__ import annotations

from typing import Any, Final

from kvtop.alerting import Alerting
from kvtop.audit import AuditEntry, AuditTail, audit_path
from kvtop.gpu import GpuMonitor, GpuReading
from kvtop.model.view import View
from kvtop.monitoring.watch import AlertStatus

#: Panels that stand for any engine, of ours or not: they need no snapshot.
PANELS: Final = ("gpu", "alerts", "audit")


class Beside:
    """The facts beside the engine's. One thread draws what another follows; both only swap frozen values.

    Args:
        nvml: The NVML binding; ``None`` takes the installed one.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._gpus: GpuMonitor | None = None
        self._alerting = Alerting()
        self._audit: AuditTail | None = None

    def open(self, panel: str) -> None:
        """Begin to look at what a panel shows; the driver is asked from a thread of its own, from then on."""
        if panel == "gpu" and self._gpus is None:
            self._gpus = GpuMonitor(self._nvml)
            self._gpus.start()

    def follow(self, view: View, now_s: float) -> None:
        """Take a newer view into account; for the thread that reads views.

        Args:
            view: The newest view.
            now_s: Time by the clock of its ``read_at_s``. [s]
        """
        self._alerting.follow(view, now_s)
        if self._audit is None:
            self._audit = AuditTail(audit_path())
        self._audit.read()

    @property
    def alerts(self) -> tuple[AlertStatus, ...]:
        """The shipped alerts as they stand; empty before the first reading."""
        return self._alerting.statuses

    @property
    def audit(self) -> tuple[AuditEntry, ...]:
        """The latest lines of this user's audit log, oldest first."""
        return () if self._audit is None else self._audit.entries

    @property
    def num_firing(self) -> int:
        """How many alerts fire."""
        return sum(status.state == "firing" for status in self.alerts)

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """The latest readings of the GPUs, oldest first; empty before anybody looked at them."""
        return () if self._gpus is None else self._gpus.recent()

    def close(self) -> None:
        """End the thread, within its bound. Safe to call twice."""
        if self._gpus is not None:
            self._gpus.close()
