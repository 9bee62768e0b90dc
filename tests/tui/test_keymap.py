"""The keys of ``kvtop.toml``: what they may be, what is refused, and that every text names the keys that are bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tui_fakes import console

from allocator.commands import Compact
from kvtop.errors import UserError
from kvtop.options_file import FileTable, read_options_file
from kvtop.tui.actions import ACTIONS, USUAL
from kvtop.tui.key_names import key_of, shown, typed
from kvtop.tui.keymap import rebound
from kvtop.tui.screens.advice import AdviceScreen
from kvtop.tui.screens.help import HelpScreen
from kvtop.tui.screens.sheet import ActionSheet
from kvtop.tui.settings import Settings, example_text, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvtop.toml"


def keys_of(file: Path, text: str) -> FileTable:
    file.write_text(text, encoding="utf-8")
    return read_options_file(str(file), {}, frozenset()).tables["keys"]


@pytest.mark.parametrize(
    ("text", "key", "written"),
    [
        ("S", "S", "S"),
        ("s", "s", "s"),
        ("?", "question_mark", "?"),
        ("[", "left_square_bracket", "["),
        (",", "comma", ","),
        ("+", "plus", "+"),
        ("-", "minus", "-"),
        ("ctrl+S", "ctrl+s", "^S"),
        ("Ctrl+Shift+F5", "ctrl+shift+f5", "Ctrl-Shift-F5"),
        ("shift+ctrl+left", "ctrl+shift+left", "Ctrl-Shift-←"),
        ("shift+a", "A", "A"),
        ("alt++", None, ""),
        ("space", "space", "space"),
        ("PageDown", "pagedown", "PgDn"),
        ("escape", "escape", "Esc"),
        ("F1", "f1", "F1"),
        ("é", "é", "é"),
        ("", None, ""),
        (" ", None, ""),
        ("ctl+s", None, ""),
        ("ctrl+ctrl+s", None, ""),
        ("ctrl+", None, ""),
        ("shift+1", None, ""),
        ("f25", None, ""),
        ("a,b", None, ""),
        ("\x1b", None, ""),
    ],
)
def test_names_of_keys(text: str, key: str | None, written: str):
    if key is None:
        with pytest.raises(ValueError):  # noqa: PT011
            key_of(text)
    else:
        assert key_of(text) == key
        assert shown(key) == written


@pytest.mark.parametrize("key", [key for action in ACTIONS for key in action.keys])
def test_every_key_can_be_typed_in_a_file(key: str, file: Path):
    text = keys_of(file, f'[keys]\nhelp = "{typed(key)}"')["help"]
    assert key_of(str(text)) == key


def test_the_example_changes_nothing_with_and_without_its_remarks(file: Path):
    assert rebound(keys_of(file, example_text())).actions == ACTIONS
    lines = example_text().splitlines()
    keys = lines[lines.index("[keys]") :]
    asked = "\n".join(line.removeprefix("# ") if " = " in line else line for line in keys)
    table = rebound(keys_of(file, asked))
    assert len(keys_of(file, asked)) == len(ACTIONS)
    assert table.keymap() == {}


BAD = [
    ('compakt = "f20"', 1, "keys.compakt: no such action; did you mean compact?"),
    ('qqq = "f20"', 1, "keys.qqq: no such action; kvtop export config lists them"),
    ('compact = "ctl+k"', 1, 'keys.compact "ctl+k": a character, space, enter'),
    ("\ncompact = 3", 2, "keys.compact: a key in quotes, or several in brackets"),
    ('compact = ["C", 3]', 1, "keys.compact: a key in quotes"),
    ("compact = true", 1, "keys.compact: a key in quotes"),
    ("\n\ncompact = 'e'", 3, 'keys.compact "e": also the key of expand; give expand another one too'),
    ("compact = 'f20'\nfork = 'f20'", 2, 'keys.fork "F20": also the key of compact; give one of the two another'),
    ("swap_out = 'q'", 1, 'keys.swap_out "q": also the key of quit'),
    ("compact = 'ctrl+c'", 1, 'keys.compact "ctrl+c": always leaves the console'),
]


@pytest.mark.parametrize(("text", "line", "told"), BAD, ids=[told for _, _, told in BAD])
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, told: str, file: Path):
    with pytest.raises(UserError) as error:
        rebound(keys_of(file, f"[keys]\n{text}"))
    assert str(error.value).startswith(f"{file}:{line + 1}: {told}")
    assert "\n" not in str(error.value)


def test_two_actions_may_swap_their_keys(file: Path):
    table = rebound(keys_of(file, "[keys]\nexpand = 'c'\ncolour = 'e'"))
    assert (table.key("expand"), table.key("colour")) == ("c", "e")


def test_the_line_that_covers_an_action_names_its_key(file: Path):
    table = rebound(keys_of(file, "[keys]\nhistory-forward = 'f19'\njump-next = 'f16'"))
    assert table.of("history('back')").shown == "{ F19 0"
    assert table.of("jump('next')").shown == "F16 b"
    assert table.of("move").shown == USUAL.of("move").shown


def test_without_a_key_an_action_is_named_by_its_line(file: Path):
    table = rebound(keys_of(file, "[keys]\ncompact = []\nevict = ''"))
    assert (table.key("compact"), table.key("evict")) == (":compact", ":evict")
    assert table.of("compact").shown == ""


KEYS = "[keys]\ncompact = ['f20', 'f19']\nhelp = 'f18'\npause = 'f21'\nshow-prefix = 'f17'\nadvice = []\nhold = 'f22'\n"


async def test_the_keys_do_what_the_file_says(file: Path):
    async with console(settings=Settings(rebound(keys_of(file, KEYS)))) as c:
        await c.press("C")
        assert len(c.app.screen_stack) == 1
        for key in ("f20", "f19"):
            await c.press(key)
            sheet = c.app.screen
            assert isinstance(sheet, ActionSheet)
            assert isinstance(sheet.command, Compact)
            await c.press("escape")
        await c.press("a", "4")
        assert len(c.app.screen_stack) == 1
        assert c.app.panel == "map"
        await c.press("f17")
        assert c.app.panel == "prefix"
        assert "F17 Prefix cache" in c.text_of("#stage")
        await c.press("f22")
        assert "F22 goes on" in c.note()


async def test_an_action_without_a_key_can_be_typed(file: Path):
    async with console(settings=Settings(rebound(keys_of(file, KEYS)))) as c:
        await c.press("colon", *"advice", "enter")
        assert isinstance(c.app.screen, AdviceScreen)
        await c.press("escape")
        assert [words for name, words in c.app.suggest("compact")] == ["Move blocks towards goal.  (F20)"]


async def test_footer_tabs_and_help_name_the_keys(file: Path):
    async with console(size=(160, 50), settings=Settings(rebound(keys_of(file, KEYS)))) as c:
        assert "F17 prefix" in c.text_of("Tabs")
        footer = c.text_of("Footer")
        assert "F20 compact" in footer
        assert "F18 help" in footer
        assert "F21 pause" in footer
        assert "advice" not in footer
        await c.press("f18")
        screen = c.app.screen
        assert isinstance(screen, HelpScreen)
        said = screen.text().plain
        assert "  F20     " in said
        assert "  :advice " in said
        await c.press("question_mark")
        assert isinstance(c.app.screen, HelpScreen)
        await c.press("f18")
        assert not isinstance(c.app.screen, HelpScreen)


def test_the_guide_shows_a_file_that_can_be_used(file: Path):
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = (text for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[keys]" in text)
    file.write_text(example, encoding="utf-8")
    found = read_options_file(str(file), {"theme": "theme", "refresh": "refresh_s"}, frozenset())
    settings = read_settings(found.tables)
    assert settings.table.key("compact") == "^K"
    assert settings.table.of("inject").keys == ()
    assert settings.arrangement.beside == "tiers"
