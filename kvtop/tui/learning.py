"""Learning: lessons in the console. Opens their engines in place of its own, and passes keys and views to the play."""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvtop.errors import UserError
from kvtop.sources.recorded import RecordedSource
from kvtop.tui.lesson_engine import LessonEngine, Opening
from kvtop.tui.messages import ExperimentDone
from kvtop.tui.widgets.block_map import BlockRef
from kvtop.tui.widgets.lesson import LessonPane

# What gives lessons is imported when the first one is asked for: most consoles are opened for something else.
if TYPE_CHECKING:
    from kvtop.learn.experiments import Results
    from kvtop.learn.lesson import Lesson, Step
    from kvtop.learn.player import LessonRun, Screen
    from kvtop.learn.school import School
    from kvtop.tui.auto_play import AutoPlay
    from kvtop.tui.screens.course import Chosen

#: Said once all hints were given: of a task, and of a question, which any answer leaves.
_NO_MORE_HINTS: Final = ("still stuck? ", "any guess will do: what is right is told afterwards. ")


class Learning(LessonEngine):
    """Gives lessons beside the map. ``KvtopApp`` is the only subclass.

    Args:
        school: Where lessons come from, and what is kept of them.
    """

    def __init__(self, *args: Any, school: School | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given_school = school
        self.play: LessonRun | None = None
        self._is_testing = False
        self._staged = -1
        self._auto: AutoPlay | None = None

    @cached_property
    def school(self) -> School:
        """Where lessons come from."""
        from kvtop.learn.school import School

        return self._given_school or School()

    @property
    def _is_threaded(self) -> bool:
        return self.school.threaded

    @property
    def lesson_pane(self) -> LessonPane:
        """The lesson's pane."""
        return self._base.query_one(LessonPane)

    # Choosing a lesson ----------------------------------------------------------------------------------------------

    def action_learn(self) -> None:
        """Show the course, or begin the learner's own lesson anew."""
        if self.school.own is not None:
            self.begin_lesson(self.school.own, anew=True)
            return
        try:
            lessons = self.school.course
        except UserError as error:
            self.say(str(error), "bad")
            return
        played, complaint = self.school.progress(self.play)
        from kvtop.tui.screens.course import CourseScreen

        has_own_engine = self._aside is not None or (self.attachment is not None and self.play is None)
        screen = CourseScreen(
            self.look,
            lessons,
            played,
            complaint=complaint,
            leave="back to the engine" if has_own_engine else "quit",
            may_stay=self.play is not None or has_own_engine,
            first=self.play.lesson.name if self.play is not None and not self.play.finished else None,
        )
        self.push_screen(screen, self._chosen)

    def _chosen(self, chosen: Chosen | None) -> None:
        from kvtop.tui.screens.course import LEAVE

        if chosen is None:
            return
        if chosen.name == LEAVE:
            self.leave_lessons()
        elif self.play is None or self.play.finished or chosen.anew or chosen.name != self.play.lesson.name:
            lesson = next(lesson for lesson in self.school.course if lesson.name == chosen.name)
            self.begin_lesson(lesson, anew=chosen.anew)

    def begin_lesson(self, lesson: Lesson, *, anew: bool = False) -> None:
        """Begin a lesson, or go on with it where it was left unless it is to begin ``anew``."""
        self._end_play()
        if not self._base.has_class("-lesson"):
            self._aside, self._aside_polling = self.attachment, self._polling
        left = None if anew else self.school.left(lesson)
        self.play = self.school.begin(lesson, left)
        self._staged = -1
        self._shrink()
        self._base.add_class("-lesson")
        if self.panel != "map":
            self.action_show("map")
        self.lesson_pane.turn_page()
        self.lesson_pane.focus()
        if self.school.pace is not None:
            from kvtop.tui.auto_play import AutoPlay

            if self._auto is None:
                self.set_interval(0.1, self._play_by_itself)
            self._auto = AutoPlay(lesson, self.school.pace)
            self._background.start("answers", self._auto.find_answers)
        if left is None:
            self._prepare()
        else:
            self._rebuild(lesson, left)
            self._teach()

    def leave_lessons(self) -> None:
        """Go back to the console's own engine, or quit where there is none."""
        self._end_play()
        if self._aside is None:
            self.exit()
            return
        self.play = None
        self._base.remove_class("-lesson")
        self.main.set_mode("references")
        self.action_show("map")
        self._go_back()

    def _end_play(self) -> None:
        """Keep what came of a play that is left before its end."""
        if self.play is not None and not self.play.finished:
            self._complain(self.school.end(self.play))
        self.play = None

    def _complain(self, text: str) -> None:
        if text and not self._background.stopping.is_set() and self.screen_stack:
            self.say(text, "warn")

    # A step ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Open the engine or run the experiment that the step needs, then show it."""
        run = self.play
        if run is None or run.finished:
            return
        if (engine := run.wants_engine) is not None:
            self._open(run.lesson.engines[engine], engine)
        elif (experiment := run.wants_experiment) is not None:
            self._is_testing = True
            self._background.start("experiment", lambda: self._test(run, experiment))
        self._teach()

    def _arrived(self, run: LessonRun, opening: Opening) -> None:
        """Go on with the engine that was waited for."""
        self._opening = None
        playing = opening.rebuilt
        if playing is None:
            run.opened(opening.name)
        else:
            self.play = playing.run
            self._show_as(playing.screen)
            if opening.complaint:
                self._complain(f"the lesson begins anew: {opening.complaint}")
            else:
                has_tasks = any(step.kind == "do" for step in playing.run.lesson.steps[: playing.run.at])
                done = "; tasks before this page were done for you" if has_tasks else ""
                self.say(f"goes on where you left{done}")
        self._prepare()

    def _show_as(self, screen: Screen) -> None:
        """Put on the screen what earlier pages have put there."""
        if screen.panel != self.panel:
            self.action_show(screen.panel)
        if screen.colour:
            self.main.set_mode(screen.colour)  # type: ignore[arg-type]
        if screen.selected is not None:
            self.choose(screen.selected)

    def _test(self, run: LessonRun, name: str) -> None:
        from kvtop.learn.experiments import run_experiment

        results: Results = {}
        problem = ""
        try:
            results = run_experiment(name, run.spec, run.step.parameters)
        except UserError as error:
            problem = str(error)
        with contextlib.suppress(RuntimeError):  # the screen may be gone
            self.post_message(ExperimentDone(run, results, problem))

    def on_experiment_done(self, message: ExperimentDone) -> None:
        self._is_testing = False
        self._complain(message.problem)
        if message.run is self.play:
            message.run.ran(message.results)
            self._prepare()

    def _teach(self) -> None:
        """Let the lesson see the newest view, and draw it."""
        run, pane = self.play, self.lesson_pane
        if run is None:
            return
        opening = self._opening
        if opening is not None and self.attachment is not None and self.attachment is opening.engine:
            self._arrived(run, opening)
            return
        if self._opening is None and not self._is_testing and not run.finished:
            run.see(self.view, self._on_screen())
            has_facts = self.view.snapshot is not None or self.view.remote is not None
            if self._staged != run.at and has_facts:
                self._staged = run.at
                self._stage(run, run.step)
                run.see(self.view, self._on_screen())
        pane.show(run)

    def _on_screen(self) -> Screen:
        from kvtop.learn.player import Screen

        return Screen(self.panel, self.main.mode, self.selected)

    def _stage(self, run: LessonRun, step: Step) -> None:
        """Put on the screen what a step wants to be seen."""
        from kvtop.learn.expression import UnknownFact

        show = step.show
        if show.panel is not None and show.panel != self.panel:
            self.action_show(show.panel)
        # Only after what a panel does with the focus.
        self.call_after_refresh(self.call_after_refresh, self.lesson_pane.focus)
        if show.colour is not None:
            self.main.set_mode(show.colour)  # type: ignore[arg-type]
        if show.sequence is not None:
            row = run.find(show.sequence) if show.sequence else None
            self.choose(None if row is None else row.seq_id)
        with contextlib.suppress(UnknownFact):
            if show.block is not None:
                self.main.put_cursor(BlockRef("device", int(run.ask(show.block))))
            if show.at is not None:
                source = None if self.attachment is None else self.attachment.source
                if isinstance(source, RecordedSource):
                    source.go_to(int(run.ask(show.at)))
                run.wound()
                self._look_at()

    # Keys -----------------------------------------------------------------------------------------------------------

    def on_lesson_pane_pressed(self, message: LessonPane.Pressed) -> None:
        self.lesson_key(message.what)

    def lesson_key(self, what: str) -> None:
        """Do what a key of the lesson does: a digit, ``enter``, ``erase``, ``hint`` or ``words``."""
        run, pane = self.play, self.lesson_pane
        if run is None:
            return
        match what:
            case "enter":
                self._go_on(run)
            case "hint":
                taken = run.hints.get(run.step.id, 0)
                pane.hint = run.hint()
                if pane.hint and taken == len(run.text.hints):
                    anew = f"{self.look.key('learn')}{'' if self.school.own else ', then n,'} begins the lesson anew"
                    pane.hint = _NO_MORE_HINTS[run.step.kind == "predict"] + anew
            case "words":
                from kvtop.tui.screens.course import WordsScreen

                page = "\n".join((run.page(), *run.options()))
                self.push_screen(WordsScreen(self.look, [w for w in self.school.words if w.found_in(page)]))
            case "erase":
                run.erase()
            case digit:
                run.press(digit)
        pane.show(self.play)

    def _go_on(self, run: LessonRun) -> None:
        pane = self.lesson_pane
        if run.finished:
            following = self.school.after(run.lesson)
            if following is not None:
                self.begin_lesson(following)
            else:
                self.action_learn()
            return
        pane.hint = ""
        if run.go_on():
            pane.turn_page()
            self._after_step(run)

    def _after_step(self, run: LessonRun) -> None:
        if run.finished:
            self._complain(self.school.end(run))
            following = self.school.after(run.lesson)
            after = "next lesson" if following is not None else "lessons" if self.school.own is None else "again"
            self.lesson_pane.after = after
        self._prepare()

    def _play_by_itself(self) -> None:
        run, auto = self.play, self._auto
        if run is None or auto is None or self._held is not None or len(self.screen_stack) > 1:
            return
        act = auto.due(run, self.clock())
        if act is None:
            return
        kind, value = act
        if kind == "key":
            self.lesson_key(value)
        else:
            self.say(f": {value}")
            self.do_line(value)

    def do_line(self, line: str) -> None:
        """Do a line of the command line at once, without a plan to look at first."""
        from kvtop.learn.playing import TRY
        from kvtop.panels.command_text import KINDS, parse_command

        line = line.removeprefix(TRY)
        if line.partition(" ")[0] in KINDS:
            self._apply(parse_command(line))
        else:
            self.run_line(line)

    async def let_go(self) -> None:
        """Keep what came of a play, and let the console's own engine go too."""
        self._end_play()
        aside, self._aside = self._aside, None
        if aside is not None and aside is not self.attachment:
            threading.Thread(target=aside.close, name="kvtop-close-own", daemon=True).start()
        await super().let_go()
