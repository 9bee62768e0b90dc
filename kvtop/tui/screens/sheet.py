"""ActionSheet: shows what a command would do, and asks. Nothing is changed before ``y``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from allocator.plans import Effect, Plan
from kvtop.model import format as fmt
from kvtop.serving_commands import AnyCommand, ServingCommand
from kvtop.tui.look import Look
from kvtop.tui.messages import PlanReady
from kvtop.tui.screens.dialog import Dialog
from kvtop.tui.widgets.lines import line, printable

_MAX_DIGITS: Final = 9
#: Between two plans of one command, at least: making one is work for the engine. [s]
RENEW_S: Final = 1.0
#: An effect whose name has one of these words is a ratio, and written as a percentage.
_RATIO_WORDS: Final = ("ratio", "fragmentation", "usage", "watermark")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several commands that a sheet offers.

    Attributes:
        label: What it is called.
        command: What it does.
        is_now: Whether this is how things are already.
    """

    label: str
    command: AnyCommand
    is_now: bool = False


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number that the operator types, and the command it makes.

    Attributes:
        label: What the number is.
        start: The number shown first; empty for none.
        make: Text typed → the command, or one line saying what is wrong.
        hint: What is allowed.
        has_point: Whether it may have decimals.
    """

    label: str
    start: str
    make: Callable[[str], AnyCommand | str]
    hint: str = ""
    has_point: bool = False


class ActionSheet(Dialog[AnyCommand | None]):
    """Answers with the command to apply, or ``None`` for no.

    Args:
        look: How to draw.
        title: What is about to be done.
        offer: One command, several to choose from with ← and →, or a number to type.
        ask: Asked for a plan, with the request's number; answers with ``PlanReady``.
    """

    DEFAULT_CSS = """
    ActionSheet { align: center middle; }
    ActionSheet > Vertical {
        width: 72; max-width: 98%; height: auto; max-height: 96%; padding: 0 1;
        border: round $kv-warn; background: $kv-panel;
    }
    ActionSheet:ansi > Vertical { background: ansi_default; border: round ansi_yellow; }
    """

    def __init__(
        self,
        look: Look,
        title: str,
        offer: AnyCommand | Sequence[Choice] | NumberField,
        ask: Callable[[ActionSheet, int, AnyCommand], None],
    ) -> None:
        super().__init__()
        self.look = look
        self.heading = title
        self.plan: Plan | None = None
        self.command: AnyCommand | None = None
        self.problem = ""
        self._field: NumberField | None = None
        self._choices: tuple[Choice, ...] = ()
        self._fixed: AnyCommand | None = None
        if isinstance(offer, NumberField):
            self._field = offer
        elif isinstance(offer, Sequence):
            self._choices = tuple(offer)
        else:
            self._fixed = offer
        self._typed = self._field.start if self._field else ""
        self._untouched = True
        self._picked = 0
        self._ask = ask
        self._request = 0
        self._is_asked = False
        self._step: int | None = None
        self._renew_at_s = 0.0

    def compose(self) -> ComposeResult:
        with Vertical() as pane:
            pane.border_title = Text(printable(self.heading))
            yield Static(id="plan")

    def on_mount(self) -> None:
        self._plan_again()

    # Keys -----------------------------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """Answer, or change the offer; every other key stays here too."""
        if event.key == "ctrl+c":
            return
        event.stop()
        event.prevent_default()
        if event.key in ("escape", "enter", "n"):
            self.dismiss(None)
        elif event.key == "y":
            if self.command is not None and self.plan is not None and self.plan.refusal is None:
                self.dismiss(self.command)
        elif self._choices and event.key in ("left", "right", "up", "down", "tab", "h", "l", "j", "k"):
            step = -1 if event.key in ("left", "up", "h", "k") else 1
            self._picked = (self._picked + step) % len(self._choices)
            self._plan_again()
        elif self._field is not None and (event.character or "").isdecimal() and (event.character or "").isascii():
            typed = "" if self._untouched else self._typed
            self._type((typed + (event.character or ""))[:_MAX_DIGITS])
        elif self._field is not None and self._field.has_point and event.character == "." and not self._has_point:
            self._type("0." if self._untouched or not self._typed else f"{self._typed}.")
        elif self._field is not None and event.key in ("backspace", "ctrl+h"):
            self._type("" if self._untouched else self._typed[:-1])
        elif self._field is not None and event.key == "ctrl+u":
            self._type("")

    @property
    def _has_point(self) -> bool:
        return not self._untouched and "." in self._typed

    def _type(self, text: str) -> None:
        self._typed, self._untouched = text, False
        self._plan_again()

    # Plans ----------------------------------------------------------------------------------------------------------

    def _plan_again(self) -> None:
        self.plan, self.command, self.problem = None, self._fixed, ""
        if self._choices:
            self.command = self._choices[self._picked].command
        elif self._field is not None:
            made = self._field.make(self._typed)
            if isinstance(made, str):
                self.problem = made
            else:
                self.command = made
        self._request += 1
        if self.command is not None:
            self._is_asked = True
            self._ask(self, self._request, self.command)
        self._draw()

    def keep_current(self, step: int, now_s: float) -> None:
        """Have the plan made again once the engine has gone on; the one shown stays until then.

        Args:
            step: Where the engine is.
            now_s: Any clock that goes on. [s]
        """
        if self.plan is None or self._is_asked or self.command is None or isinstance(self.command, ServingCommand):
            return
        if self._step is None:
            self._step, self._renew_at_s = step, now_s + RENEW_S
        elif step != self._step and now_s >= self._renew_at_s:
            self._step, self._renew_at_s, self._is_asked = step, now_s + RENEW_S, True
            self._ask(self, self._request, self.command)

    def wants(self, request: int) -> bool:
        """Whether the answer to this request would still be shown; safe from any thread."""
        return request == self._request and self.is_attached

    def on_plan_ready(self, message: PlanReady) -> None:
        if message.request == self._request:
            self.plan, self._is_asked = message.plan, False
            self._draw()

    # Drawing --------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self.query_one("#plan", Static).update(self.text())

    def text(self) -> Text:
        """Return what the sheet says."""
        look = self.look
        rows: list[Text] = []
        if self._choices:
            text = line()
            for i, choice in enumerate(self._choices):
                label = f"{choice.label} (now)" if choice.is_now else choice.label
                text.append(f" {label} ", look.style("row-focus" if i == self._picked else "dim"))
                text.append(" ")
            text.append("  ← → chooses", look.style("faint"))
            rows += [text, line()]
        if self._field is not None:
            typed = self._typed or " "
            text = line((f"{self._field.label} ", look.style("dim")), (f" {typed} ", look.style("row-focus")))
            text.append(f"  {self._field.hint}", look.style("faint"))
            rows += [text, line()]
        if self.problem:
            rows.append(line((self.problem, look.style("warn"))))
        elif self.plan is None:
            rows.append(line(("planning…", look.style("dim"))))
        else:
            rows += self._plan_rows(self.plan)
        rows.append(line())
        if self.plan is not None and self.plan.refusal is None:
            rows.append(line(("y", look.style("key")), (" do it    ", look.style("text")), *self._no()))
        else:
            rows.append(line(*self._no()))
        return Text("\n", end="").join(rows)

    def _no(self) -> tuple[tuple[str, Style], ...]:
        return ("Enter Esc n", self.look.style("key")), (" leave it", self.look.style("text"))

    def _plan_rows(self, plan: Plan) -> list[Text]:
        look = self.look
        rows = [line((printable(plan.summary), look.style("value")))]
        if plan.refusal is not None:
            rows.append(line((f"refused: {printable(plan.refusal)}", look.style("bad"))))
            return rows
        costs = []
        if plan.moved_blocks:
            costs.append(f"copies {fmt.blocks(plan.moved_blocks)} ({fmt.size(plan.moved_bytes)})")
        if plan.evicted_blocks:
            costs.append(f"evicts {fmt.blocks(plan.evicted_blocks)}")
        if plan.sequences:
            costs.append(f"touches {_sequences(plan.sequences)}")
        if costs or not isinstance(self.command, ServingCommand):  # of a server, what is not told is not known
            rows.append(line((", ".join(costs) or "copies and evicts nothing", look.style("text"))))
        if plan.effects:
            rows.append(line())
            wide = max(len(e.name) for e in plan.effects)
            for effect in plan.effects:
                before, after = _effect(effect)
                text = line((f"  {printable(effect.name):<{wide}}  ", look.style("dim")))
                text.append(f"{before:>10}", look.style("text"))
                text.append(" → ", look.style("dim"))
                text.append(f"{after:<10}", look.style("value" if before != after else "text"))
                rows.append(text)
        return rows


def _effect(effect: Effect) -> tuple[str, str]:
    """Return both numbers of an effect as text, in the unit that its name tells."""
    if any(word in effect.name for word in _RATIO_WORDS):
        return fmt.percent(effect.before), fmt.percent(effect.after)
    if "bytes" in effect.name:
        return fmt.size(effect.before), fmt.size(effect.after)
    return fmt.count(effect.before), fmt.count(effect.after)


def _sequences(ids: tuple[int, ...]) -> str:
    if len(ids) == 1:
        return f"sequence {ids[0]}"
    shown = ", ".join(map(str, ids[:4]))
    return f"{len(ids)} sequences ({shown}{', …' if len(ids) > 4 else ''})"
