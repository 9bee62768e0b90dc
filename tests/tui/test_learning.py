"""Lessons on the screen: every page fits 80x24, keys, hints, words, the course, playing by itself, going back."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from tui_fakes import console, screen_text, wait_until

from kvtop.attachment import Attachment
from kvtop.errors import SourceError
from kvtop.learn.catalog import find_lesson, read_course
from kvtop.learn.lesson import EngineSpec, Lesson
from kvtop.learn.playing import fits, keys_of, resume, right_answers
from kvtop.learn.progress import Left, Played, Progress
from kvtop.learn.report import report_text
from kvtop.learn.school import School
from kvtop.learn.workshop import open_engine
from kvtop.model.format import UNKNOWN
from kvtop.model.observation import Focus
from kvtop.sources.recorded import RecordedSource
from kvtop.tui.lesson_app import LessonApp
from kvtop.tui.screens.course import CourseScreen, WordsScreen
from kvtop.tui.widgets.lesson import LessonPane
from kvtop.tui.widgets.stage import Stage

COURSE = read_course()
#: What threads do to each other is never quite the same twice: there, what was right may come to be wrong.
BY_CHANCE = ("optimistic",)


@dataclass
class Clock:
    """Moves only by hand."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Class:
    """Lessons under test."""

    app: LessonApp
    pilot: Pilot[None]
    clock: Clock = field(default_factory=Clock)

    @property
    def pane(self) -> LessonPane:
        return self.app.lesson_pane

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def poll() -> None:
            await self.app.poll_once()

        for _ in range(500):
            if condition():
                break
            await poll()
            await self.pilot.pause(0.01)
        await wait_until(self.pilot, condition, what)

    async def ready(self) -> None:
        """Let the step's engine come, and its text."""
        run = self.app.play
        assert run is not None
        await self.until(lambda: run.ready or run.finished, f"{run.lesson.name}, {run.step.id}")

    async def do(self, line: str) -> None:
        """Do a line of the command line, and let the lesson see what it did."""
        asked = len(self.app.asked.commands)
        self.app.do_line(line)
        if line.partition(" ")[0] in ("panel", "colour", "sequence", "block"):
            await self.pilot.pause()
        else:
            await self.until(lambda: len(self.app.asked.commands) > asked, line)
        await self.app.poll_once()

    def body(self) -> str:
        return "\n".join(self.pane.line_text(y) for y in range(self.pane.size.height))


@asynccontextmanager
async def lessons(
    folder: Path, lesson: Lesson | None = None, *, size: tuple[int, int] = (80, 24), pace: float | None = None
) -> AsyncIterator[Class]:
    clock = Clock()
    school = School(progress=Progress(folder / "lessons.json"), threaded=False, pace=pace, clock=clock)
    app = LessonApp(school, lesson, auto_poll=False, clock=clock)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Class(app, pilot, clock)


@pytest.mark.parametrize("lesson", COURSE, ids=lambda lesson: lesson.name)
async def test_every_page_of_every_lesson_fits_80x24(lesson: Lesson, tmp_path: Path) -> None:
    answers = right_answers(lesson)
    too_long = []
    async with lessons(tmp_path, lesson) as one:
        run = one.app.play
        assert run is not None
        while not run.finished:
            await one.ready()
            step = run.step
            if one.pane.num_hidden:
                too_long.append((step.id, one.pane.num_hidden))
            if step.kind == "do":
                for _ in run.text.hints:
                    one.app.lesson_key("hint")
                    if one.pane.num_hidden:
                        too_long.append((step.id, "hint", one.pane.num_hidden))
                one.app.lesson_key("enter")
                if one.pane.num_hidden:
                    too_long.append((step.id, "missing", one.pane.num_hidden))
                for line in step.solve:
                    await one.do(run.evaluate(line))
                await one.until(lambda: run.done, f"{step.id} is done")
            elif step.kind == "predict":
                await one.press(*keys_of(step, answers[step.id]))
                assert run.typed
            assert UNKNOWN not in run.page()
            await one.press("enter")
        assert not too_long
        by_chance = sum(step.run in BY_CHANCE for step in lesson.steps)
        assert run.num_predictions - by_chance <= run.num_right <= run.num_predictions
        assert "predictions were right" in one.body()


async def test_keys_hint_words_back_and_erase(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1")) as one:
        await one.ready()
        assert "token" in one.body()
        await one.press("w")
        assert isinstance(one.app.screen, WordsScreen)
        assert "KV cache" in screen_text(one.app)
        await one.press("escape")
        run = one.app.play
        assert run is not None
        while run.step.kind != "predict":
            await one.press("enter")
            await one.ready()
        await one.press("enter")
        assert "type a whole number" in one.body()
        await one.press("9", "9", "backspace", "i")
        assert run.typed == "9"
        assert "Hint: " in one.body()
        await one.press("b")
        assert f"{run.at}/" in one.body()
        await one.press("i", "backspace")
        assert run.hints == {"guess-used": 1}
        await one.press("enter")
        assert run.typed == "9"
        await one.press("enter")
        assert run.answers == {"guess-used": "9"}
        await one.ready()
        await one.press("enter", "i")
        assert "Step 0 of 20." in one.body()
        await one.do("step 3")
        assert "Step 3 of 20." in one.body()
        await one.do("step 17")
        assert "Done. Enter goes on." in one.body()


async def test_digits_are_the_consoles_where_nothing_is_asked(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1")) as one:
        await one.ready()
        await one.press("4")
        assert one.app.panel == "prefix"
        assert isinstance(one.app.focused, Stage)
        assert "Tab comes back" in one.body()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_pane_that_has_the_focus_gets_the_whole_screen(size: tuple[int, int], tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1"), size=size) as one:
        await one.ready()
        both = (one.pane.size.width, one.app.main.size.width)
        await one.press("e")
        assert (one.pane.size.width, one.app.main.size.width) == (size[0], 0)
        assert "token" in one.body()
        await one.press("e")
        assert (one.pane.size.width, one.app.main.size.width) == both
        one.app.main.focus()
        await one.press("e")
        assert (one.pane.size.width, one.app.main.size.width) == (0, size[0])
        await one.press("escape")
        assert (one.pane.size.width, one.app.main.size.width) == both


async def test_the_course_begins_lessons_and_knows_what_was_played(tmp_path: Path) -> None:
    async with lessons(tmp_path) as one:
        assert isinstance(one.app.screen, CourseScreen)
        await one.press("1", "2")
        assert one.app.screen.at == 11
        await one.press("5")
        assert one.app.screen.at == 4
        await one.press("0")
        assert one.app.screen.at == 4
        await one.press("1", "enter")
        await one.ready()
        assert one.app.play is not None
        assert one.app.play.lesson.name == COURSE[0].name
        await one.press("f2")
        assert isinstance(one.app.screen, CourseScreen)
        await one.press("escape")
        assert one.app.play.lesson.name == COURSE[0].name
        one.app.leave_lessons()
    assert json.loads((tmp_path / "lessons.json").read_text())["lessons"][COURSE[0].name]["furthest"] == 0
    report = json.loads(report_text(one.app.school.reports))
    assert [(each["lesson"], each["done"]) for each in report["lessons"]] == [(COURSE[0].name, False)]


async def _play_to(one: Class, step_id: str, answers: Mapping[str, str]) -> None:
    run = one.app.play
    assert run is not None
    await one.ready()
    while run.step.id != step_id:
        if run.step.kind == "predict":
            await one.press(*keys_of(run.step, answers.get(run.step.id)))
        for line in run.step.solve:
            await one.do(run.evaluate(line))
        await one.until(lambda: run.done or run.step.kind == "predict", run.step.id)
        await one.press("enter")
        await one.ready()


async def test_a_lesson_goes_on_where_it_was_left(tmp_path: Path) -> None:
    lesson = find_lesson("4")
    step = lesson.steps[-2]
    answers = right_answers(lesson)
    wrong = next(s.id for s in lesson.steps if s.kind == "predict" and not s.options)
    async with lessons(tmp_path, lesson) as one:
        await _play_to(one, step.id, {**answers, wrong: "99"})
        run = one.app.play
        assert run is not None
        pages = [run.page(at) for at in range(run.at + 1)]
        snapshot = one.app.view.snapshot
        assert snapshot is not None
    async with lessons(tmp_path) as one:
        await one.press("4")
        place = f"page {len(pages)} of {len(lesson.steps)}"
        assert screen_text(one.app).count(place) == 2
        assert f"Enter goes on at {place}, n begins anew" in screen_text(one.app)
        await one.press("enter")
        await one.ready()
        again = one.app.play
        assert again is not None
        assert [again.page(at) for at in range(again.at + 1)] == pages
        assert (again.answers, again.verdicts) == (run.answers, run.verdicts)
        assert not again.verdicts[wrong].is_right
        now = one.app.view.snapshot
        assert now is not None
        assert (now.step, now.sequences) == (snapshot.step, snapshot.sequences)
        assert "tasks before this page were done for you" in screen_text(one.app)
        await one.press("f2", "enter")
        assert one.app.play is again
        await one.press("f2", "n")
        await one.ready()
        assert one.app.play is not again
        assert one.app.play.at == 0
    kept = Progress(tmp_path / "lessons.json").read()[lesson.name]
    assert (kept.left, kept.furthest) == (None, len(pages) - 1)


@pytest.mark.parametrize("lesson", COURSE, ids=lambda lesson: lesson.name)
def test_every_page_of_every_lesson_can_be_gone_back_to(lesson: Lesson) -> None:
    answers = right_answers(lesson)
    for step in lesson.steps[1:]:
        left = Left(step.id, answers)
        assert fits(lesson, left)
        playing = resume(lesson, left)
        assert playing.begin_step() is step
        assert UNKNOWN not in playing.run.page()
        playing.close()


async def test_a_lesson_that_cannot_be_brought_back_begins_anew(tmp_path: Path) -> None:
    lesson = find_lesson("1")
    task = next(step for step in lesson.steps if step.kind == "do")
    Progress(tmp_path / "lessons.json").add(lesson.name, Played(left=Left(lesson.steps[-1].id, right_answers(lesson))))
    steps = tuple(replace(step, solve=()) if step is task else step for step in lesson.steps)
    async with lessons(tmp_path, replace(lesson, steps=steps)) as one:
        await one.ready()
        assert one.app.play is not None
        assert (one.app.play.at, one.app.play.answers) == (0, {})
        assert f"the lesson begins anew: contiguous, {task.id}" in screen_text(one.app)


def test_a_place_that_the_lesson_does_not_have_is_none() -> None:
    lesson = find_lesson("1")
    last, answers = lesson.steps[-1].id, right_answers(lesson)
    name = next(iter(answers))
    assert fits(lesson, Left(last, answers))
    assert not fits(lesson, Left("gone", answers))
    assert not fits(lesson, Left(lesson.steps[0].id, answers))
    assert not fits(lesson, Left(last, {**answers, name: "x"}))
    assert not fits(lesson, Left(last, {k: v for k, v in answers.items() if k != name}))


async def test_who_turns_to_another_lesson_at_once_gets_that_one(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1")) as one:
        one.app.begin_lesson(find_lesson("2"))
        one.app.begin_lesson(find_lesson("13"))
        await one.ready()
        assert one.app.play is not None
        assert one.app.play.lesson.name == "incident"
        assert isinstance(one.app.attachment.source if one.app.attachment else None, RecordedSource)


async def test_who_leaves_before_the_engine_is_there_gets_the_own_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()
    built: list[Attachment] = []

    def slowly(spec: EngineSpec, *, threaded: bool = True) -> Attachment:
        asked.set()
        assert go_on.wait(10)
        built.append(open_engine(spec, threaded=threaded))
        return built[0]

    async with console() as running:
        app, own = running.app, running.app.attachment
        app.school = School(progress=Progress(tmp_path / "lessons.json"), threaded=False)
        monkeypatch.setattr("kvtop.learn.workshop.open_engine", slowly)
        app.begin_lesson(find_lesson("1"))
        assert asked.wait(10)
        app.leave_lessons()
        go_on.set()
        await running.until(lambda: bool(built) and app._lesson_engine is None, "the lesson's engine is gone")
        await running.until(lambda: app.attachment is own, "the own engine")
        with pytest.raises(SourceError, match="closed"):
            built[0].source.read(Focus(), 1.0)
        assert not running.source.closed


async def test_damaged_progress_is_one_line_and_the_course_goes_on(tmp_path: Path) -> None:
    (tmp_path / "lessons.json").write_text("{")
    async with lessons(tmp_path) as one:
        assert "damaged; remove it to begin anew" in screen_text(one.app).replace("\n", " ")
        await one.press("enter")
        await one.ready()
    assert (tmp_path / "lessons.json").read_text() == "{"


async def test_a_lesson_plays_by_itself(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("3"), pace=100) as one:
        run = one.app.play
        assert run is not None
        for _ in range(3000):
            one.clock.now_s += 0.2
            one.app._play_by_itself()
            await one.app.poll_once()
            await one.pilot.pause(0.002)
            if run.finished:
                break
        assert run.finished
        assert run.num_right == run.num_predictions
    assert not (tmp_path / "lessons.json").exists()
    assert one.app.school.reports[0]["auto"] is True


async def test_action_learn() -> None:
    async with console() as running:
        running.app.school = School(threaded=False)
        await running.press("f2")
        assert isinstance(running.app.screen, CourseScreen)
        assert "back to the engine" in running.screen_text()
        await running.press("escape")
        assert running.app.play is None


async def test_the_consoles_own_engine_waits_while_lessons_are_given(tmp_path: Path) -> None:
    async with console() as running:
        app, own = running.app, running.app.attachment
        app.school = School(progress=Progress(tmp_path / "lessons.json"), threaded=False)
        app.begin_lesson(find_lesson("1"))
        await running.until(lambda: app.attachment is not own, "the lesson's engine")
        await running.poll()
        assert not running.source.closed
        assert "Why reserving" in running.text_of("LessonPane")
        app.leave_lessons()
        await running.until(lambda: app.attachment is own, "the own engine")
        assert not app.screen_stack[0].has_class("-lesson")
        assert not running.source.closed
    assert running.source.closed


async def test_a_page_that_is_too_long_for_a_small_screen_is_scrolled(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1"), size=(60, 16)) as one:
        await one.ready()
        assert one.pane.num_hidden
        assert "PgDn more" in one.body()
        assert "can be served at once." not in one.body()
        await one.press("pagedown")
        assert "can be served at once." in one.body()
        assert "PgDn more" not in one.body()
        await one.press("pageup", "enter")
        await one.ready()
        assert "2/15" in one.body()


async def test_a_step_that_is_being_prepared_takes_no_answer(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1")) as one:
        assert one.app.play is not None
        assert not one.app.play.ready
        await one.press("3", "enter")
        assert (one.app.panel, one.app.play.at) == ("map", 0)


async def test_who_is_stuck_is_told_how_to_begin_anew(tmp_path: Path) -> None:
    async with lessons(tmp_path, find_lesson("1")) as one:
        run = one.app.play
        assert run is not None
        while run.step.kind != "predict":
            await one.ready()
            await one.press("enter")
        await one.ready()
        for _ in range(len(run.text.hints) + 1):
            await one.press("i")
        assert "any guess will do" in one.body()
        assert "F2, then n, begins the lesson anew" in " ".join(one.body().split())
        await one.press("f2", "n")
        assert one.app.play is not run
        assert one.app.play is not None
        assert one.app.play.lesson.name == run.lesson.name
        await one.ready()
        assert one.app.play.at == 0


async def test_an_experiment_that_cannot_be_run_is_told_and_the_lesson_goes_on(tmp_path: Path) -> None:
    lesson = find_lesson("contiguous")
    steps = tuple(replace(step, run="policies") if step.id == "screen" else step for step in lesson.steps)
    async with lessons(tmp_path, replace(lesson, steps=steps)) as one:
        await one.ready()
        await one.press("enter")
        await one.ready()
        assert one.app.play is not None
        assert one.app.play.step.id == "screen"
        assert "experiment policies: A: not one full block in common" in screen_text(one.app)
