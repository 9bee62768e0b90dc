"""Header: the engine and its numbers, always on screen. Every field has a fixed width, so that nothing jumps."""

from __future__ import annotations

from rich.text import Text

from allocator.metrics import plus
from allocator.snapshot import Snapshot
from kvtop.model import format as fmt
from kvtop.model.history import per_second
from kvtop.model.view import View
from kvtop.tui.look import Look
from kvtop.tui.widgets.lines import Lines, bar, fit, line, printable
from kvtop.tui.widgets.remote import remote_header

_PHASE_BADGES = {
    "running": "badge-good",
    "paused": "badge-warn",
    "idle": "badge-dim",
    "done": "badge-dim",
    "stuck": "badge-bad",
    "failed": "badge-bad",
}
#: A good reading older than this is marked with its age.
STALE_AFTER_S = 1.5
#: The same for an engine over the network, which is asked once a second and may take some to answer.
REMOTE_STALE_AFTER_S = 4.0


class Header(Lines):
    """Four lines: the engine, its use, its fragmentation and hits, its totals."""

    DEFAULT_CSS = "Header { height: 4; }"

    def __init__(self, look: Look, source: str = "") -> None:
        super().__init__(look)
        self._view = View(source=source)
        self._now_s = 0.0
        self._again: str | None = None
        self._held = False
        self._firing = 0

    def show(self, view: View, now_s: float, again: str | None, held: bool = False, firing: int = 0) -> None:
        """Draw a view as seen at monotonic time ``now_s``.

        Args:
            view: The view.
            now_s: Monotonic time. [s]
            again: What ``r`` does once the engine is lost; ``None`` where it does nothing.
            held: Whether the screen stands still.
            firing: Alerts that fire.
        """
        self._view, self._now_s, self._again, self._held, self._firing = view, now_s, again, held, firing
        self.redraw()

    def build(self, width: int, height: int) -> list[Text]:
        if self._view.remote is not None:
            return remote_header(self.look, self._view, self._view.remote, self._engine(width), width)
        return [self._engine(width), self._use(width), self._shape(width), self._totals(width)]

    def _engine(self, width: int) -> Text:
        look, view = self.look, self._view
        snapshot = view.snapshot
        text = line((" kvtop ", look.style("title")), (f"{printable(view.source)} "[:24], look.style("label")))
        age_s = None if view.read_at_s is None else max(0.0, self._now_s - view.read_at_s)
        if view.error is not None:
            age = "" if age_s is None else f" {fmt.seconds(age_s)} ago"
            text.append(f" engine lost{age} ", look.style("badge-bad"))
            tail = f"  r {self._again}" if self._again else ""
            text.append(" ")
            room = max(0, width - text.cell_len - len(tail))
            text.append(fit(printable(view.error), room).rstrip(), look.style("bad"))
            text.append(tail, look.style("key"))
            return text
        if self._firing:
            text.append(f" {self._firing} {'ALERT' if self._firing == 1 else 'ALERTS'} ", look.style("badge-bad"))
        if view.remote is not None:
            if age_s is not None and age_s > REMOTE_STALE_AFTER_S:
                text.append(f" no news for {fmt.seconds(age_s)} ", look.style("badge-bad"))
            return text
        if snapshot is None:
            text.append(" STARTING ", look.style("badge-dim"))
            return text
        phase = snapshot.phase.partition(":")[0]  # the reason behind the colon is the event line's
        text.append(f" {printable(phase).upper():<7} ", look.style(_PHASE_BADGES.get(phase, "badge-dim")))
        if faults := snapshot.counters.integrity_faults:
            text.append(f" {fmt.short(faults)} {'FAULT' if faults == 1 else 'FAULTS'} ", look.style("badge-bad"))
        if self._held:
            text.append(f" HELD {fmt.seconds(age_s)} ", look.style("badge-warn"))
        elif age_s is not None and age_s > STALE_AFTER_S:
            text.append(f" no news for {fmt.seconds(age_s)} ", look.style("badge-bad"))
        pool = view.device.numbers.total if view.device else None
        self._field(text, "speed" if width >= 100 else "", fmt.speed(snapshot.speed), 5)
        self._field(text, "step", fmt.count(snapshot.step), 9)
        self._field(text, "time" if width >= 100 else "", fmt.seconds(snapshot.time_s), 7)
        memory = fmt.size(pool * snapshot.block_bytes) if pool is not None and snapshot.block_bytes else fmt.UNKNOWN
        storage = printable(fmt.storage(snapshot.device, snapshot.geometry))
        lies = (("", storage),) if storage == fmt.BOOKS_ONLY else (("", memory), ("on", storage))
        for label, value in (
            ("", f"{fmt.short(pool)}×{snapshot.block_size} tok"),
            *lies,
            ("load", printable(snapshot.workload) + load_scale(snapshot)),
            ("evict", snapshot.eviction),
            ("compact", snapshot.compact),
            ("preempt", snapshot.preempt),
            ("policy", snapshot.policy),
        ):
            if text.cell_len + len(value) + 2 + (len(label) + 1 if label else 0) <= width:
                self._field(text, label, value, len(value))
        return text

    def _use(self, width: int) -> Text:
        look = self.look
        numbers = self._view.device.numbers if self._view.device else None
        size = max(8, min(44, width - 64))
        held = cached = None
        if numbers and numbers.total:
            held, cached = numbers.usage_ratio, numbers.cached / numbers.total
        text = line((" USED  ", look.style("label")))
        text.append_text(bar_of(look, size, held, cached))
        text.append(" ")
        self._value(text, fmt.percent(numbers.usage_ratio if numbers else None), 5)
        for label, number in (
            ("free", numbers.free if numbers else None),
            ("cached", numbers.cached if numbers else None),
            ("shared", numbers.shared if numbers else None),
            ("pinned", numbers.pinned if numbers else None),
            ("copying", numbers.fenced if numbers else None),
        ):
            if text.cell_len + len(label) + 8 <= width:
                self._field(text, label, fmt.short(number), 5)
        return text

    def _shape(self, width: int) -> Text:
        look, view = self.look, self._view
        numbers = view.device.numbers if view.device else None
        host = view.host.numbers if view.host else None
        text = line((" FRAG  ", look.style("label")), ("ext ", look.style("dim")))
        self._value(text, fmt.percent(numbers.external_ratio if numbers else None), 5)
        run = (numbers.largest_free_run if numbers else None, numbers.allocatable if numbers else None)
        if width >= 100:
            self._field(text, "longest run", f"{fmt.short(run[0])} of {fmt.short(run[1])} allocatable", 26)
        else:
            self._field(text, "run", f"{fmt.short(run[0])}/{fmt.short(run[1])}", 11)
        self._field(text, "int", fmt.percent(numbers.internal_ratio if numbers else None), 5)
        text.append("  SWAP ", look.style("label"))
        if width >= 100:
            text.append_text(bar_of(look, 8, host.usage_ratio if host else None, None))
            text.append(" ")
        self._value(text, fmt.percent(host.usage_ratio if host else None), 5)
        text.append("  HIT ", look.style("label"))
        if width >= 86:
            text.append("1m ", look.style("dim"))
        self._value(text, fmt.percent(view.hit_ratio_window), 5)
        text.append(" all ", look.style("dim"))
        self._value(text, fmt.percent(view.hit_ratio), 5)
        return text

    def _totals(self, width: int) -> Text:
        look, view = self.look, self._view
        snapshot = view.snapshot
        counters = snapshot.counters if snapshot else None
        preempted = plus(counters.preemptions_swap, counters.preemptions_recompute) if counters else None
        failed = plus(counters.failures_capacity, counters.failures_contiguous) if counters else None
        text = line((" EVICT ", look.style("label")))
        self._value(text, fmt.short(counters.evictions if counters else None), 5)
        if width >= 100:
            text.append(f" {fmt.rate(per_second(view.history, 'evictions')):<8}", look.style("dim"))
        text.append("  PREEMPT ", look.style("label"))
        self._value(text, fmt.short(preempted), 5)
        verified = snapshot.verified if snapshot else None
        if verified is None or width >= 110:  # below that there is room for one of the two
            text.append("  SWAPPED", look.style("label"))
            text.append(" out ", look.style("dim"))
            self._value(text, fmt.short(counters.swap_out_blocks if counters else None), 5)
            text.append(" in ", look.style("dim"))
            self._value(text, fmt.short(counters.swap_in_blocks if counters else None), 5)
        text.append("  FAIL ", look.style("label"))
        text.append(f"{fmt.short(failed):<5}", look.style("bad" if failed else "value"))
        if verified is not None:
            steps = f" verified {fmt.short(verified.steps)} steps," if width >= 80 else ""
            text.append(f"{steps} max difference ", look.style("dim"))
            differs = verified.max_difference != 0
            text.append(fmt.difference(verified.max_difference), look.style("bad" if differs else "value"))
        elif width >= 110:
            for name, number in (
                ("run", snapshot.num_running if snapshot else None),
                ("wait", snapshot.num_waiting if snapshot else None),
                ("swap", snapshot.num_swapped if snapshot else None),
            ):
                self._field(text, name, fmt.short(number), 5)
        return text

    def _field(self, text: Text, label: str, value: str, width: int) -> None:
        text.append("  ")
        if label:
            text.append(f"{label} ", self.look.style("dim"))
        self._value(text, value, width)

    def _value(self, text: Text, value: str, width: int) -> None:
        text.append(f"{value:<{width}}", self.look.style("value"))


def bar_of(look: Look, width: int, held: float | None, cached: float | None) -> Text:
    """Return a bar of the held share, and the cached share behind it."""
    return bar(look, width, [(held, "bar"), (cached, "bar-cached")])


def load_scale(snapshot: Snapshot) -> str:
    """Return how far the load is turned from what it is by itself, such as `` ×2 size ×0.5``; empty when it is not."""
    rate, size = snapshot.rate_scale or 1.0, snapshot.size_scale or 1.0
    return (f" ×{rate:g}" if rate != 1 else "") + (f" size ×{size:g}" if size != 1 else "")
