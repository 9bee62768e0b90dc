"""The library's page: its examples run as they stand, alone, and print what it says; its names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import allocator
from allocator import errors

PAGE = (Path(allocator.__file__).parent / "README.md").read_text(encoding="utf-8")
#: Each example with the output that follows it.
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def run_alone(code: str) -> str:
    """Return what ``code`` prints in a fresh interpreter, which must not load the console."""
    program = f"{code}\nimport sys\nassert 'kvtop' not in sys.modules and 'textual' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_has_ten_lines_and_prints_what_the_page_says():
    code, output = EXAMPLES[0]
    statements = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(statements) <= 10
    assert run_alone(code) == output


def test_every_example_prints_what_the_page_says():
    assert len(EXAMPLES) == PAGE.count("```python")
    assert run_alone("\n".join(code for code, _ in EXAMPLES)) == "".join(output for _, output in EXAMPLES)


def test_every_public_name_can_be_had():
    for name in allocator.__all__:
        assert getattr(allocator, name) is not None
    assert set(allocator.__all__) <= set(dir(allocator))


def test_every_exception_is_public_and_on_the_page():
    tree = PAGE[PAGE.index("AllocatorError\n") :]
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AllocatorError):
            assert getattr(allocator, name) is value
            assert re.search(rf"\b{name}\b", tree)


def test_every_name_in_the_table_is_public():
    table = PAGE[PAGE.index("| Name | Is |") : PAGE.index("`help(name)`")]
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`(\w+)", cell):
            assert name in allocator.__all__
