"""Mutation check: plants one bug at a time in a copy of the tree, and requires that a test turns red for each.

    python tests/mutation/run.py [WORD …]     only mutants whose name or module holds one of the words

Exit status: 0 if every bug was found, 1 if one survived or could not be planted, 2 if the tests fail without one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from mutants import MUTANTS, Mutant

ROOT: Final = Path(__file__).resolve().parents[2]
#: Bound on one mutant; a bug that makes a test hang has been found. [s]
TIMEOUT_S: Final = 240.0
#: Copies of the tree that are worked in at once.
WORKERS: Final = min(4, len(os.sched_getaffinity(0)))
#: Shrinking a failing example explains a bug; here it only takes time.
_NO_SHRINKING: Final = """
from hypothesis import Phase
settings.register_profile("mutation", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutation")
"""


class Result(NamedTuple):
    """What became of one mutant.

    Attributes:
        verdict: ``found``, ``hangs`` (found too), ``SURVIVED``, ``STALE`` or ``NO TEST RAN``.
        by: The test that found it, or what is wrong.
        took_s: Time it took. [s]
    """

    verdict: str
    by: str
    took_s: float

    @property
    def good(self) -> bool:
        return self.verdict in ("found", "hangs")


def main(words: list[str]) -> int:
    """Check the mutants whose name or module holds one of ``words``, or all; return the exit status."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name or word in m.module for word in words)]
    if not chosen:
        print(f"no mutant is called anything like {' '.join(words)}", file=sys.stderr)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtop-mutation-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            trees.put(_copy_tree(Path(folder) / str(number)))
        every = " ".join(dict.fromkeys(" ".join(m.tests for m in chosen).split()))
        whole = trees.get()
        code, output = _run_tests(whole, every, 4 * TIMEOUT_S)
        if code != 0:
            print(output[-4000:], "\nthe tests fail without any planted bug", file=sys.stderr)
            return 2
        trees.put(whole)

        def check(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return _check(mutant, tree)
            finally:
                trees.put(tree)

        results = []
        with ThreadPoolExecutor(WORKERS) as workers:
            for mutant, result in zip(chosen, workers.map(check, chosen), strict=True):
                results.append(result)
                print(
                    f"{result.verdict:11} {result.took_s:5.0f} s  {mutant.module:16} {mutant.name:52} {result.by}",
                    flush=True,
                )
    missed = sum(not result.good for result in results)
    print(f"{len(results) - missed} of {len(results)} planted bugs found in {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


def _copy_tree(tree: Path) -> Path:
    """Copy what the allocator's tests need."""
    for folder in ("allocator", "kvtop", "tests/allocator", "tests/data"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / file, tree / file)
    with (tree / "tests/conftest.py").open("a") as conftest:
        conftest.write(_NO_SHRINKING)
    return tree


def _check(mutant: Mutant, tree: Path) -> Result:
    started = time.monotonic()
    path = tree / "allocator" / mutant.module
    original = path.read_text()
    try:
        path.write_text(mutant.planted_in(original))
    except ValueError as error:
        return Result("STALE", str(error), 0.0)
    try:
        code, output = _run_tests(tree, mutant.tests, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Result("hangs", f"no end within {TIMEOUT_S:g} s", time.monotonic() - started)
    finally:
        path.write_text(original)
    took_s = time.monotonic() - started
    if code == 0:
        return Result("SURVIVED", mutant.tests, took_s)
    red = re.search(r"^(?:FAILED|ERROR) tests/allocator/(\S+)", output, re.MULTILINE)
    if red is None:
        return Result("NO TEST RAN", output[-300:], took_s)
    return Result("found", red[1], took_s)


def _run_tests(tree: Path, tests: str, timeout_s: float) -> tuple[int, str]:
    """Run test files up to the first failure; return pytest's exit status and its output."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(tree), HYPOTHESIS_PROFILE="default")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    # Tests that plant bugs themselves look at the source, and would call any change of it a failure.
    command += ["-k", "not planted"]
    files = [f"tests/allocator/test_{name}.py" for name in tests.split()]
    done = subprocess.run(
        [*command, *files], cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
