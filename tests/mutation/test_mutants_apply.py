"""Every planted bug of the mutation check still fits the source."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_its_module_into_another_that_compiles(mutant: Mutant) -> None:
    text = (ROOT / "allocator" / mutant.module).read_text()
    planted = mutant.planted_in(text)
    assert planted != text
    compile(planted, mutant.module, "exec")
    for name in mutant.tests.split():
        assert (ROOT / f"tests/allocator/test_{name}.py").exists()


def test_a_stale_mutant_is_refused() -> None:
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="'never' is stale"):
            Mutant("never", "pool.py", "", (("x = 1", "x = 2"),)).planted_in(text)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
