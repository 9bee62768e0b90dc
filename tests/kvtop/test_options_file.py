"""``kvtop.toml``: what it may hold, who wins over it, and one line for whatever is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtop.cli import run
from kvtop.cli.file import with_file
from kvtop.cli.running import run_command
from kvtop.options_file import OptionsFile, default_path

RUN = ["run", "--geometry", "none", "--steps", "3", "--json"]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my.toml"


def total(capsys: pytest.CaptureFixture[str]) -> int:
    return int(json.loads(capsys.readouterr().out)["blocks"]["total"])


def test_a_value_from_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("blocks = 48\n")
    assert run([*RUN, "--config", str(file)]) == 0
    assert total(capsys) == 48


def test_the_file_in_its_usual_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_text("blocks = 40\n")
    assert run(RUN) == 0
    assert total(capsys) == 40
    # The environment wins over the file, the command line over both.
    monkeypatch.setenv("KVTOP_BLOCKS", "41")
    assert run(RUN) == 0
    assert total(capsys) == 41
    assert run([*RUN, "--blocks", "42"]) == 0
    assert total(capsys) == 42


def test_the_file_named_in_the_environment(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("blocks = 44\n")
    monkeypatch.setenv("KVTOP_CONFIG", str(file))
    assert run(RUN) == 0
    assert total(capsys) == 44


def test_every_kind_of_value(file: Path) -> None:
    file.write_text(
        'speed = "max"\nwatermark = 0.25\nno-prefix-cache = true\nserial = false\n'
        'inject = ["slow-copy", "lost-client:0.5"]\nsteps = 9\nlog-format = "json"\n'
    )
    context = run_command.make_context("run", ["--config", str(file)])
    params = with_file(context).params
    assert (params["speed"], params["watermark_ratio"], params["steps"]) == (None, 0.25, 9)
    assert (params["no_prefix_cache"], params["serial"]) == (True, False)
    assert [kind for kind, _ in params["inject"]] == ["slow-copy", "lost-client"]
    assert params["log_format"] == "json"


def test_one_value_of_an_option_that_may_have_several(file: Path) -> None:
    file.write_text('inject = "slow-copy"\n')
    params = with_file(run_command.make_context("run", ["--config", str(file)])).params
    assert [kind for kind, _ in params["inject"]] == ["slow-copy"]


def test_what_contradicts_the_file_wins_over_it(file: Path) -> None:
    file.write_text("swap-blocks = 7\n")
    assert run([*RUN, "--config", str(file), "--swap-ratio", "1"]) == 0
    file.write_text("swap-blocks = 7\nswap-ratio = 0.5\n")
    assert run([*RUN, "--config", str(file)]) == 2


BAD = [
    ("blockz = 1", "blockz: no such option; did you mean blocks?"),
    ("xyzzy = 1", "xyzzy: no such option; kvtop --help lists them"),
    ("num_blocks = 1", "num_blocks: no such option"),
    ("config = 'a'", "config: no such option"),
    ("threads = 2", "threads: no such option"),
    ("blocks = 0", "blocks 0: a whole number from 1 to 67108864"),
    ("blocks = 1.5", "blocks 1.5: a whole number"),
    ("blocks = true", "blocks true: a whole number"),
    ("blocks = [1]", "blocks: a text, a number, true or false"),
    ("blocks = {a = 1}", "blocks: a text, a number, true or false"),
    ("blocks = 1979-05-27", "blocks: a text, a number, true or false"),
    ("[run]\nblocks = 1", "run: no such table; kvtop --help lists them"),
    ("[key]\nhelp = 'x'", "key: no such table; did you mean keys?"),
    ("keys = 'x'", "keys: a table: [keys]"),
    ("serial = 3", "serial 3: 1, true, yes or on"),
    ("watermark = nan", "watermark nan: a number from 0 to 1"),
    ("inject = ['earthquake']", "inject earthquake: KIND or KIND:RATE"),
    ("blocks = ", "no TOML: Invalid value"),
    ("blocks = 1\nblocks = 2", "no TOML: Cannot overwrite a value"),
]


#: What only a console reads.
BAD_LOOKS = [
    ("theme = 'pink'", "theme pink: one of dark, light"),
    ("refresh = 0", "refresh 0: a number of seconds from 0.02 to 60"),
    ("no-remember = 'perhaps'", "no-remember perhaps: 1, true"),
]


@pytest.mark.parametrize(("text", "told"), BAD_LOOKS, ids=[text for text, _ in BAD_LOOKS])
@pytest.mark.parametrize("command", [(), ("attach", "local:nobody"), ("replay", "none.kvrec")], ids=" ".join)
def test_a_wrong_look_is_told_by_every_console(
    command: tuple[str, ...], text: str, told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert run([*command, "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"kvtop: {file}:1: {told}")


@pytest.mark.parametrize("command", [("attach", "local:nobody"), ("replay", "none.kvrec")], ids=" ".join)
def test_what_the_file_says_of_an_engine_is_not_for_others(
    command: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("metrics-port = 0\nspeed = 3\nlog-format = 'json'\nblocks = 0\n")
    assert run([*command, "--config", str(file)]) != 0
    told = capsys.readouterr().err
    assert command[1] in told or "terminal" in told


@pytest.mark.parametrize(("text", "told"), BAD, ids=[text for text, _ in BAD])
def test_a_wrong_file_is_one_line_that_names_it(
    text: str, told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert _refused(file, told, capsys) in ("", ":1", ":2")


def _refused(file: Path, told: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that the file is refused in one line, and return its part between file and reason."""
    assert run([*RUN, "--config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {file}")
    assert f": {told}" in err
    assert err.count("\n") == 1
    return err.removeprefix(f"kvtop: {file}").partition(": ")[0]


def test_a_complaint_names_the_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, told, where in (
        ("# blocks\n\nblocks = 0\n", "blocks 0", ":3"),
        ("seed = 1\n'blockz' = 1", "blockz: no", ":2"),
        ("[keys]\nhelp = 'x'\n\n [run]", "run: no such table", ":4"),
        ("x.y = 1", "x: no such table", ""),
    ):
        file.write_text(text)
        assert _refused(file, told, capsys) == where


def test_tables_are_for_the_console_and_do_not_stop_a_run(file: Path) -> None:
    file.write_text("theme = 'light'\nrefresh = 1\nblocks = 40\n[keys]\nhelp = 'H'\n[panels]\n")
    assert run([*RUN, "--config", str(file)]) == 0
    found = with_file(run_command.make_context("run", ["--config", str(file)])).default_map
    assert isinstance(found, OptionsFile)
    assert found.tables["keys"] == {"help": "H"}
    assert found.tables["keys"].place("help") == f"{file}:5: keys.help"
    assert found.tables["panels"] == {}


def test_a_file_that_cannot_be_read(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, told in ((file, "no such file"), (tmp_path, "Is a directory"), ("a\0b", "embedded null")):
        assert run([*RUN, "--config", str(path)]) == 2
        assert told in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe")
    assert run([*RUN, "--config", str(file)]) == 2
    assert "no TOML" in capsys.readouterr().err
    file.write_bytes(b"#" * (2 << 20))
    assert run([*RUN, "--config", str(file)]) == 2
    assert "larger than" in capsys.readouterr().err
