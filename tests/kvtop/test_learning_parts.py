"""The parts of lessons: expressions, places, progress, oracle, threads, stand-in server, plays that go astray."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import httpx
import pytest

from kvtop.errors import UserError
from kvtop.learn.catalog import find_lesson
from kvtop.learn.experiments import EXPERIMENTS, run_experiment
from kvtop.learn.expression import BadExpression, Expression, UnknownFact, Value, fill_in, write
from kvtop.learn.oracle import accesses_of, best_hits
from kvtop.learn.places import Places
from kvtop.learn.playing import LessonStuck, Playing
from kvtop.learn.progress import Played, Progress
from kvtop.learn.report import report_of
from kvtop.learn.threads import count_lock, look_up_optimistically, lose_updates
from kvtop.learn.workshop import open_engine, stream
from kvtop.model.observation import RemoteObservation
from kvtop.sources.remote.source import RemoteSource


class Known:
    """Facts of a test."""

    def __init__(self, **values: Value) -> None:
        self.values = values

    def value(self, name: str) -> Value:
        if name not in self.values:
            raise UnknownFact(name)
        return self.values[name]

    def call(self, name: str, arguments: tuple[Value, ...]) -> Value:
        return f"{name}{arguments}"


# Expressions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 - 4", 3),
        ("7 // 2 + 7 % 2 + 7 / 2", 7.5),
        ("-a < 0 <= b != 3", True),
        ("not (a == 2) or b >= 5", True),
        ("a > 1 and b > 99", False),
        ("max(a, b) - min(a, b) + abs(-1) + ceil(1.2) + floor(1.8) + round(1.6)", 9),
        ("f('x', a)", "f('x', 2)"),
        ("name == 'it'", True),
    ],
)
def test_an_expression_is_worked_out(text: str, value: Value) -> None:
    assert Expression(text).value(Known(a=2, b=5, name="it")) == value


@pytest.mark.parametrize(
    "text",
    [
        "a.b",
        "a[0]",
        "lambda: 1",
        "(1, 2)",
        "[1]",
        "{1: 2}",
        "f(x=1)",
        "f(*a)",
        "a.f()",
        "a if b else c",
        "a := 1",
        "a ** 9",
        "a << 9",
        "~a",
        "b'x'",
        "1j",
        "f'{a}'",
        "a in b",
        "a is b",
        "await a",
        "",
        "a +",
        "import os",
        "x" * 500,
        "(" * 100 + ")" * 100,
    ],
)
def test_what_is_no_expression_of_the_language_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        Expression(text)


@pytest.mark.parametrize("text", ["gone", "1 / 0", "1 // (a - a)", "'x' + 1", "a < 'x'", "min()", "max(gone, 1)"])
def test_what_cannot_be_calculated_is_not_known(text: str) -> None:
    with pytest.raises(UnknownFact):
        Expression(text).value(Known(a=2))
    assert fill_in(f"x {{{text}}} y", Known(a=2)) == "x — y"


def test_placeholders_are_written_as_asked() -> None:
    facts = Known(n=12345, half=0.5, ratio=26.17, size=131072, s=0.033, word="lru", yes=True)
    text = "{n} {n:count} {half} {ratio:percent} {ratio:tenths} {size:size} {s:seconds} {1:blocks} {word} {yes}"
    assert fill_in(text, facts) == "12,345 12,345 0.5 26 % 26.2 128.0 KiB 33 ms 1 block lru yes"
    assert write(3.0) == "3"


def test_places_are_those_of_the_text() -> None:
    text = "\n".join(
        [
            "[a.b]",  # 1
            'text = """',
            "[not.a.table]",
            "key = 1",
            '"""',
            "last = 2",  # 6
            "list = [",
            '  { x = "1" },',
            '  { x = "2" },',  # 9
            "]",
            "[[c]]",
            "one = 1",
            "[[c]]",  # 13
            "two = 2",
            "[c.d]",  # 15
        ]
    )
    places = Places(text)
    assert places.line("a", "b", "last") == 6
    assert places.line("a", "b", "list", 1) == 9
    assert places.line("a", "b", "list", 1, "x") == 9
    assert places.line("c", 1, "two") == 14
    assert places.line("c", 1, "d") == 15
    assert places.line("c", 1, "gone") == 13
    assert places.line("gone") == 1


# Progress -----------------------------------------------------------------------------------------------------------


def test_progress_keeps_the_best_and_is_replaced_whole(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "state" / "lessons.json")
    assert progress.read() == {}
    progress.add("size", Played(done=False, right=0, predictions=3, furthest=4, steps=9))
    progress.add("size", Played(done=True, right=2, predictions=3, furthest=9, steps=9))
    progress.add("size", Played(done=True, right=1, predictions=3, furthest=9, steps=9))
    progress.add("size", Played(done=False, right=3, predictions=3, furthest=2, steps=9))
    assert progress.read() == {"size": Played(done=True, right=2, predictions=3, furthest=9, steps=9)}
    assert [path.name for path in progress.path.parent.iterdir()] == ["lessons.json"]
    assert progress.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ('{"version":1,"lessons":{"a":{"done":3}}}', "damaged"),
        ('{"version":9,"lessons":{}}', "version 9"),
    ],
)
def test_progress_that_is_damaged_is_one_line_and_stays(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "lessons.json"
    path.write_text(text)
    for use in (Progress(path).read, lambda: Progress(path).add("a", Played())):
        with pytest.raises(UserError, match=complaint) as error:
            use()
        assert str(error.value).startswith(str(path))
    assert path.read_text() == text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_progress_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        Progress(tmp_path / "lessons.json").add("a", Played())


# Experiments --------------------------------------------------------------------------------------------------------


def _best_by_force(accesses: str, capacity: int) -> int:
    """Try every order of evictions."""

    def go(at: int, cached: frozenset[str]) -> int:
        if at == len(accesses):
            return 0
        key = accesses[at]
        if key in cached:
            return 1 + go(at + 1, cached)
        if len(cached) < capacity:
            return go(at + 1, cached | {key})
        return max(go(at + 1, cached - {gone} | {key}) for gone in cached)

    return go(0, frozenset())


def test_nobody_hits_more_than_the_oracle() -> None:
    rng = random.Random(7)
    for _ in range(60):
        accesses = "".join(rng.choice("ABCDE") for _ in range(11))
        for capacity in (1, 2, 3):
            assert best_hits(accesses, capacity) == _best_by_force(accesses, capacity)


def test_the_lessons_engines_hit_what_a_plain_lru_and_fifo_would_and_no_order_beats_the_oracle() -> None:
    for name in ("lru", "fashion"):
        spec = find_lesson("eviction").engines[name]
        accesses, capacity = accesses_of(spec)
        found = run_experiment("policies", spec, {})
        assert (found["lru_hits"], found["fifo_hits"]) == _plain_hits(accesses, capacity)
        assert max(int(found[f"{p}_hits"]) for p in ("lru", "fifo", "lfu")) <= int(found["oracle_hits"])


def _plain_hits(accesses: list[str], capacity: int) -> tuple[int, int]:
    hits = [0, 0]
    for is_fifo in (0, 1):
        cached: list[str] = []
        for key in accesses:
            if key in cached:
                hits[is_fifo] += 1
                if not is_fifo:
                    cached.remove(key)
                    cached.append(key)
                continue
            if len(cached) == capacity:
                cached.pop(0)
            cached.append(key)
    return hits[0], hits[1]


def test_the_oracle_refuses_requests_that_are_not_alike() -> None:
    with pytest.raises(ValueError, match="not one full block in common"):
        accesses_of(find_lesson("contiguous").engines["paging"])


def test_updates_are_lost_without_a_lock_and_none_behind_one() -> None:
    for threads in (2, 4):
        found = lose_updates(threads, 20)
        assert found["taken"] == threads * 20
        assert int(found["lost"]) >= threads - 1
        assert int(found["twice"]) >= 1
        assert found["twice_locked"] == 0


def test_reservations_take_the_lock_rarely() -> None:
    found = count_lock(2, 500)
    assert found["calls"] == 2000
    assert int(found["takings"]) >= 2000
    assert int(found["takings_reserved"]) < 200
    assert int(found["refills"]) >= 2


def test_optimistic_lookups_find_prefixes_and_the_switch_interval_is_put_back() -> None:
    import sys

    before = sys.getswitchinterval()
    found = look_up_optimistically(2, 60)
    assert found["lookups"] == 120
    assert int(found["found"]) > 0
    assert sys.getswitchinterval() == before


def test_every_experiment_tells_just_what_it_says() -> None:
    spec = find_lesson("eviction").engines["lru"]
    for name, experiment in EXPERIMENTS.items():
        if name == "rerun":
            continue  # played by its lesson, whose engine has a workload
        usual = {key: low for key, (low, _, _) in experiment.parameters.items()}
        assert set(run_experiment(name, spec, usual)) == set(experiment.results), name


# Engines ------------------------------------------------------------------------------------------------------------


def test_the_stand_in_is_read_like_any_server_and_ends_with_its_attachment() -> None:
    spec = find_lesson("engines").engines["server"]
    attachment = open_engine(spec)
    try:
        assert isinstance(attachment.source, RemoteSource)
        view = attachment.poll(10.0)
        assert view.remote is not None
        assert (view.remote.kind, view.remote.rows[0].total_blocks) == ("vLLM", spec.options.num_blocks)
        url = attachment.source._stand_in.url  # type: ignore[attr-defined]
        assert httpx.get(f"{url}/version").json() == {"version": "0.33.0"}
        assert httpx.get(f"{url}/else").status_code == 404
        assert isinstance(attachment.source.read(None, 5.0), RemoteObservation)  # type: ignore[arg-type]
    finally:
        attachment.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/metrics", timeout=1.0)


def test_streams_are_the_same_every_time_and_differ_by_name() -> None:
    assert stream("A", 5).tolist() == stream("A", 5).tolist() == stream("A", 9)[:5].tolist()
    assert stream("A", 5).tolist() != stream("B", 5).tolist()


# Plays that go astray -----------------------------------------------------------------------------------------------


def _go_to(playing: Playing, step_id: str) -> None:
    run = playing.run
    for _ in itertools.count():
        step = playing.begin_step()
        if step.id == step_id:
            return
        if step.kind == "predict":
            run.press("1")
        for line in run.solution():
            playing.do(line)
        assert run.go_on(), step.id


def test_a_task_that_must_hold_is_undone_by_who_goes_on() -> None:
    playing = Playing(find_lesson("forks"))
    try:
        _go_to(playing, "boundary")
        for line in playing.run.solution():
            playing.do(line)
        assert playing.run.done
        playing.do("step 1")
        assert not playing.run.done
        assert not playing.run.go_on()
        assert "a block ends at" in playing.run.note
    finally:
        playing.close()


def test_an_explanation_tells_the_moment_at_which_the_task_was_done() -> None:
    playing = Playing(find_lesson("preemption"))
    try:
        _go_to(playing, "until-full")
        playing.do("step 32")
        assert playing.run.done
        playing.do("step 40")
        playing.run.go_on()
        playing.begin_step()
        assert "B's 12 blocks were copied to swap space, where 12 are held" in playing.run.page()
    finally:
        playing.close()


def test_an_engine_stands_still_where_its_lesson_says() -> None:
    playing = Playing(find_lesson("size"))
    try:
        _go_to(playing, "run-sixteen")
        playing.do("step 500")
        assert playing.run.done
        playing.run.go_on()
        playing.begin_step()
        assert "44 empty of 448 slots" in playing.run.page()
        with pytest.raises(LessonStuck, match="the run is done"):
            playing.do("step 1")
    finally:
        playing.close()


def test_a_report_tells_answers_hints_and_what_was_left() -> None:
    playing = Playing(find_lesson("contiguous"))
    try:
        _go_to(playing, "run-20")
        playing.run.hint()
        playing.run.go_on()
        report = report_of(playing.run, started="2026-01-01T00:00:00+00:00", seconds=12.34, is_auto=False)
    finally:
        playing.close()
    assert json.loads(json.dumps(report)) == report
    assert (report["lesson"], report["done"], report["seconds"], report["predictions"]) == (
        "contiguous",
        False,
        12.3,
        3,
    )
    assert report["steps"][3] == {
        "id": "guess-used", "kind": "predict", "done": True, "answer": "1", "right": None, "is_right": None, "hints": 0,
    }  # fmt: skip
    assert report["steps"][4] == {"id": "run-20", "kind": "do", "done": False, "hints": 1, "early_tries": 1}
