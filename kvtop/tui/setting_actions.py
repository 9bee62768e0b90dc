"""SettingActions: what the keys change of how an engine works, and how that is taken back."""

from __future__ import annotations

from typing import Final

from allocator.commands import SetAutoCompaction, SetLoad, SetPolicy, SetWatermark
from allocator.config import CompactMode, Policy
from kvtop.serving_commands import AnyCommand
from kvtop.tui.engine_actions import EngineActions
from kvtop.tui.screens.sheet import Choice, NumberField

_POLICIES: Final[tuple[tuple[str, Policy], ...]] = (
    ("first come", "fcfs"),
    ("by class", "priority"),
    ("shortest job", "sjf"),
)
_MODES: Final[tuple[CompactMode, ...]] = ("auto", "manual", "off")


class SettingActions(EngineActions):
    """Settings and their undo. ``KvtopApp`` is the only subclass."""

    def action_policy(self) -> None:
        snapshot = self.view.snapshot
        now = None if snapshot is None else snapshot.policy
        choices = [Choice(name, SetPolicy(policy), policy == now) for name, policy in _POLICIES]
        self._open_sheet("policy", "Order the queue", choices)

    def action_watermark(self) -> None:
        snapshot = self.view.snapshot
        if self._may("watermark") is None or snapshot is None:
            return

        def make(text: str) -> AnyCommand | str:
            if not text.strip("."):
                return "type a share of the pool, in percent"
            percent = float(text)
            return SetWatermark(percent / 100) if percent <= 100 else f"{text}: from 0 to 100 percent"

        now = f"{100 * snapshot.watermark_ratio:g}"
        field = NumberField("percent", now, make, "kept allocatable when admitting", has_point=True)
        self._open_sheet("watermark", f"Watermark, {now}% of the pool", field)

    def action_when_to_compact(self) -> None:
        snapshot = self.view.snapshot
        if self._may("when_to_compact") is None or snapshot is None:
            return
        threshold = snapshot.compact_threshold_ratio
        choices = [Choice(mode, SetAutoCompaction(mode, threshold), mode == snapshot.compact) for mode in _MODES]
        self._open_sheet("when_to_compact", "When to compact", choices)

    def action_load(self) -> None:
        snapshot = self.view.snapshot
        if self._may("load") is None or snapshot is None:
            return
        if snapshot.rate_scale is None or snapshot.size_scale is None:
            self.say("refused: the load of this engine cannot be changed", "bad")
            return
        rate, size = snapshot.rate_scale, snapshot.size_scale
        choices = [
            Choice("rate ×2", SetLoad(rate * 2, None)),
            Choice("rate ÷2", SetLoad(rate / 2, None)),
            Choice("size ×2", SetLoad(None, size * 2)),
            Choice("size ÷2", SetLoad(None, size / 2)),
            Choice("as at first", SetLoad(1.0, 1.0)),
        ]
        self._open_sheet("load", "Change the load", choices)

    def action_undo(self) -> None:
        change = self._changes.last
        if self._may("undo") is None:
            return
        if change is None:
            self.say("nothing to undo: no size, policy, watermark, mode or load was changed here")
            return
        self._open_sheet("undo", f"Undo {change.text}", change.inverse)
