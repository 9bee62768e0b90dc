"""Lesson files: what they may say, and the one line for whatever is wrong, with file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtop.cli import run
from kvtop.errors import UserError
from kvtop.learn.experiments import EXPERIMENTS
from kvtop.learn.expression import FORMATS
from kvtop.learn.facts import ARGUMENTS, NAMES
from kvtop.learn.playing import play, right_answers
from kvtop.learn.reading import read_lesson

LESSON = """\
[lesson]
minutes = 3

[engine.main]
blocks = 16
block-size = 4

[[engine.main.request]]
label = "A"
prompt = 9
output = 20

[[step]]
id = "hello"
kind = "text"

[[step]]
id = "guess"
kind = "predict"
answer = "got"

[[step]]
id = "run"
kind = "do"
check = "step >= 5"
solve = ["step 5"]

[[step]]
id = "told"
kind = "explain"
about = "guess"
keep = { got = "blocks('A')" }

[texts]
title = "Mine"
summary = "A lesson of my own"

[texts.hello]
text = "The pool has {total} blocks."

[texts.guess]
text = "How many will A hold?"

[texts.run]
text = "Take five steps."
missing = "Step {step} of 5."
hints = ["Type :step 5"]

[texts.told]
right = "Right: {right}."
wrong = "{answer}? It is {right}."
"""


def write(folder: Path, text: str = LESSON) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_file_with_its_texts_is_a_lesson(tmp_path: Path) -> None:
    lesson = read_lesson(write(tmp_path))
    assert (lesson.name, lesson.number, lesson.title) == ("mine", None, "Mine")
    pages = [playing.run.page() for playing in play(lesson, {"guess": "4"})]
    assert pages[0] == "The pool has 16 blocks."
    assert pages[-1] == "Right: 4."
    assert right_answers(lesson) == {"guess": "4"}


def test_texts_of_another_language_lie_in_a_folder_of_its_name(tmp_path: Path) -> None:
    structure, texts = LESSON.split("[texts]\n")
    path = write(tmp_path, structure)
    for language, title in (("en", "Mine"), ("de", "Meine")):
        (tmp_path / language).mkdir()
        words = texts.replace("texts.", "").replace('"Mine"', f'"{title}"')
        (tmp_path / language / "mine.toml").write_text(words, encoding="utf-8")
        assert read_lesson(path, language=language).title == title
    with pytest.raises(UserError, match=r"mine\.toml: no \[texts\] in it, and no .*fr/mine\.toml beside it"):
        read_lesson(path, language="fr")


#: (text replaced, by what, what stands on the line that is named, the complaint)
WRONG = [
    ("minutes = 3", "minutes = 0", "minutes", "minutes: 0: a whole number from 1 to 60"),
    ("minutes = 3", "minuets = 3", "minuets", "minuets: unknown here; one of minutes"),
    ("[lesson]", "[lesson", "[lesson", "not TOML"),
    ("blocks = 16", "blocks = 0", "blocks", "--blocks 0: a whole number from 1 to 67108864"),
    ("blocks = 16", 'blocks = "many"', "blocks", "blocks: expected int, got str"),
    ("blocks = 16", "block = 16", "block = 16", "block: unknown here; one of kind, "),
    ("block-size = 4", 'policy = "best"', "policy", "policy: invalid enum value 'best'"),
    ('label = "A"', "name = 1", "name = 1", "name: unknown here; one of label, prompt"),
    ("prompt = 9", "prompt = 0", "prompt", "prompt: 0: a whole number from 1 to 65536"),
    ('kind = "text"', 'kind = "test"', 'kind = "test"', "kind: test; one of text, predict, do, see, explain"),
    ('id = "run"', 'id = "Run!"', 'id = "Run!"', "id: Run!: small letters, digits and -"),
    ('id = "run"', 'id = "hello"', 'id = "hello"\nkind = "do"', "id: hello: given twice"),
    ("step >= 5", "stop >= 5", "check", "check: stop: no such fact; did you mean"),
    ("step >= 5", "step >=", "check", "check: invalid syntax"),
    ("step >= 5", "__import__('os')", "check", "check: __import__(…): no such function; one of abs, "),
    ("step >= 5", "[x for x in 5]", "check", "only numbers, names, calls"),
    ("step >= 5", "step.real", "check", "step.real: only numbers, names, calls"),
    ("step >= 5", "blocks('A', 2)", "check", "check: blocks(…): 2 arguments; it takes 1"),
    ('solve = ["step 5"]', "solve = []", "solve", "solve: a list of at least one text"),
    ('solve = ["step 5"]', 'solve = ["step {five}"]', "solve", "solve: {five}: five: no such fact"),
    ('about = "guess"', 'about = "hello"', "about", "about: hello; one of guess"),
    ("got = ", "step = '1', got = ", "keep", "keep.step: a name of its own"),
    ('answer = "got"', 'answer = "lost"', "answer", "answer: lost: no such fact"),
    ('answer = "got"', 'options = ["a"]\nanswer = "a"', "options", "options: from 2 to 5 different ids"),
    ('answer = "got"', 'options = ["a", "b"]\nanswer = "c"', 'answer = "c"', "answer: c: one of a, b"),
    ("{total} blocks", "{totel} blocks", "text = ", "text: {totel}: totel: no such fact; did you mean total?"),
    ("{total} blocks", "{total:pounds}", "text = ", "pounds: one of count, size"),
    ('missing = "Step {step} of 5."\n', "", "[texts.run]", "missing: missing; a text"),
    ('title = "Mine"\n', "", "[texts]", "title: missing; a text"),
    ("[texts.told]", "[texts.tald]", "[texts.tald]", "tald: unknown here; one of title, summary, hello"),
    ('right = "Right: {right}."', 'rihgt = "x"', "rihgt", "rihgt: unknown here; one of right, wrong, text"),
]


@pytest.mark.parametrize(("old", "new", "where", "complaint"), WRONG, ids=[f"{w[2]}-{w[1][:24]}" for w in WRONG])
def test_what_is_wrong_is_one_line_with_file_and_line(
    old: str, new: str, where: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in LESSON
    text = LESSON.replace(old, new, 1)
    path = write(tmp_path, text)
    assert run(["learn", "--check", "--file", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {path}, line {line_of(text, where)}: "), err
    assert complaint in err
    assert err.count("\n") == 1


def test_a_prediction_that_nothing_explains_is_refused(tmp_path: Path) -> None:
    text = LESSON.replace('kind = "explain"\nabout = "guess"', 'kind = "see"')
    with pytest.raises(UserError, match="guess: nothing explains this prediction"):
        read_lesson(write(tmp_path, text))


def test_files_that_are_none_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"[lesson]\nminutes = 1 # \xff\n")
    for name, complaint in (("bytes.toml", "line 2: not UTF-8"), ("none.toml", "No such file")):
        assert run(["learn", "--check", "--file", str(tmp_path / name)]) == 2
        assert complaint in capsys.readouterr().err


def test_check_tells_tasks_that_are_done_before_or_never(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, LESSON.replace("step >= 5", "step >= 0"))
    assert run(["learn", "--check", "--file", str(path)]) == 1
    assert "run: done before anything was done for it" in capsys.readouterr().out
    path = write(tmp_path, LESSON.replace("step >= 5", "step >= 50"))
    assert run(["learn", "--check", "--file", str(path)]) == 1
    assert "mine, run: Step 5 of 5." in capsys.readouterr().err
    assert run(["learn", "--check", "--file", str(write(tmp_path))]) == 0
    assert capsys.readouterr().out == "mine: fine\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["99"], "LESSON 99: a number from 1 to "),
        (["nope"], "LESSON nope: a number from 1 to "),
        (["1", "--file", "x"], "LESSON 1 and --file x: one of the two, not both"),
        (["--language", "xx"], "--language xx: one of en"),
        (["--language", "../en"], "--language ../en: one of en"),
        (["--pace", "2"], "--pace 2: only together with --auto"),
        (["--auto", "--pace", "0"], "--pace 0: a number from 0.1 to 100"),
        (["--list", "--auto"], "--list: not together with --auto, --report or a lesson"),
        (["--list", "1"], "--list: not together with --auto, --report or a lesson"),
        (["--check", "--report", "-"], "--check: not together with --auto, --report"),
        (["--report", __file__], f"--report {__file__}: exists already; choose another name"),
        (["--report", "/no/such/folder/x"], "--report /no/such/folder/x: there is no folder /no/such/folder"),
        (["--theme", "pink"], "--theme pink: one of dark, light, contrast, colour-blind"),
        (["1"], "standard input is not a terminal: open the lessons in a terminal, or use --list or --check"),
    ],
)
def test_a_bad_option_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learn", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {line}"), err
    assert err.count("\n") == 1


def test_the_page_for_teachers_names_every_fact_and_its_example_is_a_lesson(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lessons.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)(?:\([a-z]*\))?`", page))
    assert set(NAMES) | set(ARGUMENTS) | set(FORMATS) <= named
    assert set(EXPERIMENTS) <= set(re.findall(r"`([a-z-]+)`", page))
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert list(play(read_lesson(write(tmp_path, example)), {}))[-1].run.page().startswith("You said 0. It holds 4")


def test_panels_and_colours_are_the_screens_own() -> None:
    from kvtop.learn import reading
    from kvtop.tui.look_actions import PANELS
    from kvtop.tui.shades import MODES

    assert reading.COLOURS == MODES
    assert set(reading.PANELS) <= set(PANELS)
