"""The GPU panel: what the driver tells of this machine's GPUs, or why it tells nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from allocator.metrics import ratio
from kvtop.gpu import GpuFacts, GpuProcess, GpuReading
from kvtop.model import format as fmt
from kvtop.model.view import View
from kvtop.panels.content import Asked, Entry, Section

#: What the states of the driver mean to whoever reads them; what the driver said itself stands behind it.
_DRIVER: Final = {
    "no-library": "no NVIDIA library (NVML) on this machine",
    "no-driver": "the NVIDIA driver is not loaded",
    "no-permission": "this user may not ask the NVIDIA driver",
    "error": "the NVIDIA driver answers with an error",
    "not-answering": "the NVIDIA driver does not answer",
    "starting": "asking the NVIDIA driver…",
}
_GPU: Final = {
    "lost": "it fell off the bus or is being reset; a restart of the machine may bring it back",
    "no-permission": "some facts may not be seen by this user",
    "error": "the driver answers with an error",
}
#: Share of a GPU's memory or power from which it is worth a look, and a temperature likewise. [°C]
_TIGHT, _HOT = 0.95, 85


def gpu(view: View, asked: Asked) -> tuple[Section, ...]:
    """Return a section for each GPU or slice of one, and who holds its memory; or one line that says why not."""
    whose = "" if view.remote is None else ", not of the servers that are watched"
    title = f"GPUs of this machine{whose}"
    if not asked.gpus:
        return (Section(title, (Entry("GPUs", fmt.UNKNOWN, "not asked for yet"),)),)
    reading = asked.gpus[-1]
    if reading.state != "ok":
        is_wrong = reading.state in ("no-permission", "error", "not-answering")
        return (Section(title, (Entry("no GPU", _DRIVER[reading.state], reading.reason, alarm=is_wrong),)),)
    if not reading.gpus:
        return (Section(title, (Entry("no GPU", "the NVIDIA driver has none"),)),)
    well = [facts for facts in reading.gpus if facts.state not in ("lost", "error")]
    trouble = tuple(_trouble(facts) for facts in reading.gpus if facts.state != "ok")
    return (
        *((Section(title, (), wide=True),) if whose else ()),
        *((Section("Trouble", trouble, wide=True),) if trouble else ()),
        *(Section(_name(facts), _facts(facts, asked.gpus)) for facts in well),
        *(Section(f"Processes on GPU {facts.gpu}", _processes(facts), wide=len(well) == 1) for facts in well),
    )


def _trouble(facts: GpuFacts) -> Entry:
    return Entry(f"GPU {facts.gpu}", facts.state, f"{_GPU[facts.state]}: {facts.reason}", alarm=True)


def _name(facts: GpuFacts) -> str:
    part = " (slice)" if ":" in facts.gpu else ""
    return f"GPU {facts.gpu}{part}  {facts.name or ''}".rstrip()


def _facts(facts: GpuFacts, readings: Iterable[GpuReading]) -> tuple[Entry, ...]:
    past = [next((g for g in reading.gpus if g.gpu == facts.gpu), None) for reading in readings]
    memory = _ratio(facts.memory_used, facts.memory_total)
    power = _ratio(facts.power_watts, facts.power_limit_watts)
    used = facts.utilization_ratio
    return (
        Entry(
            "memory",
            fmt.percent(memory),
            f"{fmt.size(facts.memory_used)} of {fmt.size(facts.memory_total)}",
            share=memory,
            alarm=memory is not None and memory >= _TIGHT,
        ),
        Entry("in use", fmt.percent(used), "of the time", share=used),
        Entry("over time", "", series=tuple(g.utilization_ratio if g else None for g in past), top=1.0),
        Entry(
            "power",
            _watts(facts.power_watts),
            f"of {_watts(facts.power_limit_watts)}",
            share=power,
            alarm=power is not None and power >= _TIGHT,
        ),
        Entry(
            "temperature",
            fmt.UNKNOWN if facts.temperature_celsius is None else f"{facts.temperature_celsius:.0f} °C",
            alarm=facts.temperature_celsius is not None and facts.temperature_celsius >= _HOT,
        ),
        Entry("PCIe sent", _bytes_per_s(facts.pcie_sent)),
        Entry("PCIe received", _bytes_per_s(facts.pcie_received)),
        Entry("memory of kvtop", fmt.size(facts.kvtop_memory), f"{fmt.size(facts.other_memory)} of all others"),
    )


def _processes(facts: GpuFacts) -> tuple[Entry, ...]:
    if facts.processes is None:
        return (Entry("processes", fmt.UNKNOWN, "the driver does not tell"),)
    entries = tuple(_process(process, facts.memory_total) for process in facts.processes)
    return entries or (Entry("none", "no process holds memory of it"),)


def _process(process: GpuProcess, total: int | None) -> Entry:
    note = f"{process.name or fmt.UNKNOWN}{' (this program)' if process.is_ours else ''}"
    return Entry(f"pid {process.pid}", fmt.size(process.memory), note, share=_ratio(process.memory, total))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else ratio(part, whole)


def _bytes_per_s(number: float | None) -> str:
    return fmt.UNKNOWN if number is None else f"{fmt.size(number)}/s"


def _watts(number: float | None) -> str:
    return fmt.UNKNOWN if number is None else f"{number:.0f} W"
