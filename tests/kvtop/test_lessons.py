"""Every lesson of the course, played to its end: by who is right, by who errs each time, and by who acts too soon."""

from __future__ import annotations

import contextlib
import re

import pytest

from kvtop.learn.catalog import lesson_files, read_course, read_words
from kvtop.learn.expression import placeholders
from kvtop.learn.lesson import Lesson
from kvtop.learn.playing import Playing, keys_of, play, right_answers
from kvtop.model.format import UNKNOWN

COURSE = read_course()
_ANSWERS: dict[str, dict[str, str]] = {}


def answers_of(lesson: Lesson) -> dict[str, str]:
    """What is right, found out once a session."""
    if lesson.name not in _ANSWERS:
        _ANSWERS[lesson.name] = right_answers(lesson)
    return _ANSWERS[lesson.name]


#: What threads do to each other is never quite the same twice: there, what was right may come to be wrong.
BY_CHANCE = ("optimistic",)


def wrong_answers(lesson: Lesson) -> dict[str, str]:
    """An answer to each prediction that is not the right one."""
    wrong = {}
    for name, right in answers_of(lesson).items():
        step = lesson.step(name)
        if step.options:
            wrong[name] = next(option for option in step.options if option != right)
        else:
            wrong[name] = str(int(float(right)) + int(step.tolerance) + 7)
    return wrong


@pytest.fixture(params=COURSE, ids=lambda lesson: lesson.name)
def lesson(request: pytest.FixtureRequest) -> Lesson:
    return request.param


def test_who_is_right_is_told_so_and_every_check_is_false_before_its_task_is_done(lesson: Lesson) -> None:
    tasks: dict[str, list[bool]] = {}
    run = None
    for playing in play(lesson, answers_of(lesson)):
        run = playing.run
        if run.step.kind == "do":
            tasks.setdefault(run.step.id, []).append(run.done)
        if run.step.kind == "explain":
            assert run.evaluate(run.text.right).strip() in run.page()
        assert UNKNOWN not in run.page(), (run.step.id, run.page())
    assert run is not None
    assert run.finished
    by_chance = sum(step.run in BY_CHANCE for step in lesson.steps)
    assert run.num_predictions - by_chance <= run.num_right <= run.num_predictions
    assert run.num_predictions >= 2
    assert tasks
    assert all(seen == [False, True] for seen in tasks.values()), tasks


def test_who_errs_each_time_gets_to_the_end_and_is_told_the_numbers(lesson: Lesson) -> None:
    wrong = wrong_answers(lesson)
    run = None
    by_chance: set[str] = set()
    for playing in play(lesson, wrong):
        run = playing.run
        if run.step.about is not None:
            verdict = run.verdicts[run.step.about]
            assert not verdict.is_right or run.step.run in BY_CHANCE, run.step.id
            by_chance |= {run.step.id} if verdict.is_right else set()
            told = run.page()
            assert verdict.is_right or verdict.answer in told, (run.step.id, "does not repeat what was answered")
            assert verdict.right in told or re.search(r"\d", told), (
                run.step.id,
                "tells no number of the learner's own",
            )
            assert UNKNOWN not in told, (run.step.id, told)
    assert run is not None
    assert run.finished
    assert run.num_right == len(by_chance)


def test_who_acts_too_soon_is_told_what_is_missing_and_gets_every_hint(lesson: Lesson) -> None:
    for playing in play(lesson, answers_of(lesson)):
        run = playing.run
        if run.step.kind == "do" and not run.done:
            assert not run.go_on()
            assert run.note
            assert UNKNOWN not in run.note, (run.step.id, run.note)
            hints = [run.hint() for _ in run.text.hints]
            assert len(set(hints)) == len(run.text.hints)
            assert run.hint() == hints[-1]
            assert not any(UNKNOWN in hint for hint in hints), hints
        elif run.step.kind == "predict":
            assert not run.go_on()
            assert run.note


def _play_to(lesson_name: str, step: str, answers: dict[str, str]) -> Playing:
    """A play that has come to a task, without it being done."""
    lesson = next(lesson for lesson in COURSE if lesson.name == lesson_name)
    playing = Playing(lesson)
    while playing.begin_step().id != step:
        for digit in keys_of(playing.run.step, answers.get(playing.run.step.id)):
            playing.run.press(digit)
        for line in playing.run.solution():
            playing.do(line)
        assert playing.run.go_on()
    return playing


def test_who_lets_far_too_much_time_pass_is_judged_by_what_was_asked() -> None:
    playing = _play_to("contiguous", "run-20", {"guess-used": "26"})
    with contextlib.closing(playing):
        playing.do("step 200")
        run = playing.run
        assert run.go_on()
        playing.begin_step()
        assert run.verdicts["guess-used"].is_right
        while "guess-starts" not in run.verdicts:
            run.press("2")
            assert run.go_on()
            playing.begin_step()
        assert run.verdicts["guess-starts"].is_right
        assert "in 2 pieces" in run.page()


def test_who_forks_before_being_asked_is_told_a_fork_costs_nothing() -> None:
    playing = _play_to("forks", "guess-taken", {})
    with contextlib.closing(playing):
        playing.do("fork 0")
        playing.do("step 2")
        run = playing.run
        run.press("0")
        assert run.go_on()
        playing.begin_step()
        assert not run.done
        for line in run.solution():
            playing.do(line)
        assert run.go_on()
        playing.begin_step()
        assert run.verdicts["guess-taken"].is_right


def test_every_lesson_asks_lets_do_and_explains(lesson: Lesson) -> None:
    kinds = [step.kind for step in lesson.steps]
    assert {"predict", "do", "explain"} <= set(kinds)
    assert 3 <= lesson.minutes <= 8
    # Words of the texts at 180 a minute, and half a minute for each task and each question.
    words = sum(len(part.split()) for step in lesson.steps for part in lesson.texts[step.id].parts())
    minutes = words / 180 + (kinds.count("do") + kinds.count("predict")) / 2
    assert minutes <= 12, minutes


def test_the_course_is_numbered_without_gaps() -> None:
    assert [lesson.number for lesson in COURSE] == list(range(1, len(COURSE) + 1))
    assert [lesson.name for lesson in COURSE] == list(lesson_files())


def test_every_word_is_explained_where_it_is_used_first() -> None:
    texts = [(f"{le.name}, {step.id}", "\n".join(le.texts[step.id].parts())) for le in COURSE for step in le.steps]
    for word in read_words():
        used = [(where, text) for where, text in texts if word.found_in(_without_placeholders(text))]
        assert used, f"{word.word}: in the glossary, and in no lesson"
        where, text = used[0]
        marked = [found for found in re.findall(r"\*([^*\n]+)\*", text) if word.found_in(found)]
        assert marked, f"{word.word}: used in {where} before it is explained"


def test_every_marked_word_is_in_the_glossary() -> None:
    words = read_words()
    for lesson in COURSE:
        for step in lesson.steps:
            for found in re.findall(r"\*([^*\n]+)\*", _without_placeholders("\n".join(lesson.texts[step.id].parts()))):
                assert any(word.found_in(found) for word in words), f"{lesson.name}, {step.id}: {found}"


def _without_placeholders(text: str) -> str:
    for written, _, _ in placeholders(text):
        text = text.replace(written, "0")
    return re.sub(r"`[^`\n]+`", "0", text)
