"""Load: workloads put together, weights, files; rate and size changed while it runs; a bound on its requests."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.commands import SetLoad
from allocator.config import EngineConfig
from allocator.engine import Engine
from kvtop.cli import run
from kvtop.engine_setup import EngineOptions, build_engine, check_options
from kvtop.errors import UserError
from kvtop.workloads.catalog import WORKLOADS
from kvtop.workloads.chat import chat_requests
from kvtop.workloads.load import Load, parse_workloads
from kvtop.workloads.load_file import read_load

README = Path(__file__).parents[2] / "README.md"


def load(text: str, seed: int = 0, **more: object) -> Load:
    return Load(parse_workloads(text), seed, block_size=16, num_blocks=4096, **more)


def told(requests) -> list[tuple[object, ...]]:
    return [(r.arrival_s, r.label, r.num_prompt, r.content.num_tokens) for r in requests]


def take(count: int, text: str, **more: object):
    return list(itertools.islice(load(text, **more), count))


def arrived(requests, word: str) -> np.ndarray:
    return np.array([r.arrival_s for r in requests if r.label.startswith(word)])


# -- put together ------------------------------------------------------------------------------------


def test_one_workload_is_what_it_is_alone():
    alone = itertools.islice(chat_requests(7, block_size=16, num_blocks=4096), 100)
    assert told(take(100, "chat", seed=7)) == told(alone)
    assert [(c.workload.name, c.weight) for c in parse_workloads("chat:3 + rag:0.5+beam")] == [
        ("chat", 3.0),
        ("rag", 0.5),
        ("beam", 1.0),
    ]


def test_several_come_in_order_of_arrival_the_same_each_time():
    requests = take(600, "chat+burst+cancel-storm")
    assert told(requests) == told(take(600, "chat+burst+cancel-storm"))
    at = [r.arrival_s for r in requests]
    assert at == sorted(at)
    assert {r.label.split()[0] for r in requests} == {"chat", "burst", "storm"}
    assert requests[0].label.startswith("chat")  # all begin at 0: the first named goes first


def test_two_of_the_same_draw_apart():
    first, second = parse_workloads("rag+rag")
    assert first == second
    heads = {tuple(r.content.tokens(0, 16)) for r in take(400, "rag+rag")}
    assert len(heads) >= 12  # eight documents each


def test_weights_share_the_pool():
    requests = take(6000, "rag:3+priority:1")
    alone = {name: len(arrived(r := take(3000, name), "")) / r[-1].arrival_s for name in ("rag", "priority")}
    end_s = requests[-1].arrival_s
    high_and_low = len(arrived(requests, "high")) + len(arrived(requests, "low"))
    assert len(arrived(requests, "rag")) / end_s == pytest.approx(0.75 * alone["rag"], rel=0.1)
    assert high_and_low / end_s == pytest.approx(0.25 * alone["priority"], rel=0.2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nope", "--workload nope: one of chat, rag"),
        ("chat+nope", "--workload chat+nope: nope: one of chat, rag"),
        ("chat+", "--workload chat+: : one of chat"),
        ("", "--workload : one of chat"),
        ("chat:0", "--workload chat:0: weight 0: a number above 0, at most 1000"),
        ("chat:x+rag", "--workload chat:x+rag: weight x: a number above 0"),
        ("chat:nan", "weight nan: a number above 0"),
        ("chat:inf", "weight inf: a number above 0"),
        ("chat:", "weight : a number above 0"),
        ("+".join(["chat"] * 17), "at most 16 workloads"),
    ],
)
def test_a_bad_list_is_one_line(text, line):
    with pytest.raises(UserError, match=re.escape(line).replace(r"\ :", " ?:")) as caught:
        parse_workloads(text)
    assert "\n" not in str(caught.value)


# -- rate, size, bound -------------------------------------------------------------------------------


def test_rate_divides_all_times_and_size_lengthens():
    usual, twice = take(300, "chat+burst"), take(300, "chat+burst", rate_scale=2.0)
    assert [r.arrival_s for r in twice] == pytest.approx([r.arrival_s / 2 for r in usual])
    small = take(300, "burst", size_scale=0.5)
    assert np.mean([r.num_prompt for r in small]) == pytest.approx(np.mean([r.num_prompt for r in usual]), rel=0.8)
    assert np.mean([r.num_prompt for r in small]) < 0.7 * np.mean([r.num_prompt for r in take(300, "burst")])


@given(
    changes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0])), max_size=6),
)
def test_arrivals_stay_in_order_and_in_the_future_however_the_rate_is_turned(changes):
    loaded = load("burst+priority")
    stream = iter(loaded)
    pending = next(stream)
    now_s = 0.0
    for count, rate in changes:
        for _ in range(count):
            now_s = max(now_s, pending.arrival_s)
            following = next(stream)
            assert following.arrival_s >= pending.arrival_s
            pending = following
        due_s = pending.arrival_s
        was = loaded.rate_scale
        loaded.adjust(now_s, rate, 1.0, pending)
        assert pending.arrival_s == pytest.approx(now_s + (due_s - now_s) * was / rate)


def test_a_slow_load_that_is_turned_up_comes_at_once():
    e = Engine(
        EngineConfig(num_blocks=4096, num_swap_blocks=0, geometry="none"), load=load("priority", rate_scale=0.01)
    )
    e.advance(400)
    before = e.counters.submitted
    assert e.apply(SetLoad(rate_scale=100.0)).ok
    e.advance(40)
    assert e.counters.submitted > before + 100


def test_the_same_changes_at_the_same_steps_give_the_same_run():
    def play(chunk: int) -> Engine:
        config = EngineConfig(num_blocks=256, num_swap_blocks=128, geometry="none", compact="auto")
        loaded = Load(parse_workloads("chat+burst+beam+cancel-storm"), 3, block_size=16, num_blocks=256)
        e = Engine(config, load=loaded)
        for rate, size in ((2.0, None), (None, 3.0), (0.2, 0.5), (1.0, 1.0)):
            for _ in range(600 // chunk):
                e.advance(chunk)
            assert e.apply(SetLoad(rate, size)).ok
        e.advance(200)
        e.check()
        return e

    one, two = play(600), play(6)
    assert one.step == two.step
    assert msgspec.structs.asdict(one.counters) == msgspec.structs.asdict(two.counters)
    assert [(v.step, v.kind, v.seq_id) for v in one.events_from(0)] == [
        (v.step, v.kind, v.seq_id) for v in two.events_from(0)
    ]


def test_a_plan_of_a_load_says_both_numbers_and_an_engine_without_one_refuses():
    e = Engine(EngineConfig(geometry="none"), load=load("chat"))
    plan = e.plan(SetLoad(size_scale=0.5))
    assert plan.summary == "load: 1 times the rate, 0.5 times the size"
    assert [(f.before, f.after) for f in plan.effects] == [(1.0, 1.0), (1.0, 0.5)]
    assert e.plan(SetLoad(0.001, None)).refusal == "rate 0.001: a number from 0.01 to 100"
    assert e.plan(SetLoad()).refusal == "a rate or a size, or both"
    assert not e.apply(SetLoad(1.0, 1000.0)).ok
    assert e.snapshot(phase="paused", speed=None, steps_per_s=None).size_scale == 1.0
    without = Engine(EngineConfig(geometry="none"))
    assert without.plan(SetLoad(2.0)).refusal == "this engine has no synthetic workload"
    assert without.snapshot(phase="paused", speed=None, steps_per_s=None).rate_scale is None


def test_a_bounded_load_ends_and_may_be_run_until_done(capsys):
    args = ["run", "--workload", "chat+rag", "--requests", "40", "--blocks", "256", "--geometry", "none", "--json"]
    for more in ([], ["--until-done"]):
        assert run([*args, *more]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["requests"] == {"submitted": 40, "finished": 40, "cancelled": 0, "refused": 0}
        assert "never ends" not in err


def test_workloads_are_listed(capsys):
    for args in (["run", "--list-workloads"], ["check", "--list-workloads"], ["--list-workloads"]):
        assert run(args) == 0
        out, err = capsys.readouterr()
        assert [line.split()[0] for line in out.splitlines()] == list(WORKLOADS)
        assert err == ""


def test_the_readme_has_a_row_for_each_workload():
    text = README.read_text()
    for name in WORKLOADS:
        assert f"| `{name}` |" in text


# -- files -------------------------------------------------------------------------------------------


def readme_example() -> str:
    """The workload file that the README shows."""
    examples = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = (text for text in examples if "[keys]" not in text)
    return example


def test_the_example_in_the_readme_works(tmp_path):
    path = tmp_path / "load.toml"
    path.write_text(readme_example())
    components = read_load(str(path))
    assert len(components) >= 2
    options = EngineOptions(num_blocks=512, geometry="none", workload_file=str(path), num_requests=30)
    check_options(options)
    engine, _ = build_engine(options)
    while engine.advance(10_000):
        engine.check()
    assert engine.done
    assert engine.counters.submitted >= 30
    assert engine.workload == "load.toml"
    engine.close()


def test_a_component_with_a_rate_of_its_own_keeps_it_beside_others(tmp_path):
    path = tmp_path / "load.toml"
    path.write_text('[[component]]\nworkload = "rag"\n[[component]]\nworkload = "priority"\nrate_per_s = 5\n')
    loaded = Load(read_load(str(path)), 0, block_size=16, num_blocks=4096)
    requests = list(itertools.islice(loaded, 6000))
    own = [r for r in requests if not r.label.startswith("rag")]
    assert len(own) / requests[-1].arrival_s == pytest.approx(5, rel=0.15)
    alone = take(3000, "rag")
    rag = [r for r in requests if r.label.startswith("rag")]
    assert len(rag) / requests[-1].arrival_s == pytest.approx(3000 / alone[-1].arrival_s, rel=0.1)


C = "[[component]]\n"
BAD_FILES = [
    ("x = ", "not TOML: Invalid value (at end of document)"),
    ("\n\na == 1", "not TOML: Invalid value (at line 3, column 4)"),
    ("", "0 components; from 1 to 16 [[component]] tables"),
    ("rate = 2", "rate: unknown; only [[component]] tables"),
    ("component = 3", "component: written as [[component]]"),
    ("[component]\nworkload = 'chat'", "component: written as [[component]]"),
    (C, "component 1: workload: the name of one, as a string"),
    (f"{C}workload = 3", "component 1: workload: the name of one, as a string"),
    (f"{C}workload = 'nope'", "component 1: workload nope: one of chat"),
    (
        f"{C}workload='chat'\n{C}workload = 'rag'\ndocument = 3",
        "component 2 (rag): document: unknown; workload, weight, rate_per_s, documents, document_tokens",
    ),
    (f"{C}workload='rag'\ndocuments = 0", "component 1 (rag): documents 0: a whole number from 1 to 1000"),
    (f"{C}workload='rag'\ndocuments = 2.5", "component 1 (rag): documents 2.5: a whole number from 1 to 1000"),
    (f"{C}workload='rag'\ndocuments = true", "component 1 (rag): documents True: a whole number"),
    (f"{C}workload='beam'\nwidth = 'wide'", "component 1 (beam): width 'wide': a whole number from 2 to 64"),
    (f"{C}workload='burst'\non_s = nan", "component 1 (burst): on_s nan: a number from 0.025 to 3600"),
    (f"{C}workload='chat'\nrate_per_s = -1", "component 1 (chat): rate_per_s -1: a number from 0.001 to 10000"),
    (f"{C}workload='chat'\nweight = 0", "component 1 (chat): weight 0: a number above 0, at most 1000"),
    (f"{C}workload='chat'\nweight = 2\nrate_per_s = 1", "weight and rate_per_s: one of the two, not both"),
    (f"{C}workload='chat'\n" * 17, "17 components; from 1 to 16 [[component]] tables"),
    (f"{C}workload='chat'\nrate_per_s = {[1] * 100}", "rate_per_s [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,…: a number"),
]


@pytest.mark.parametrize(("text", "line"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_one_line_with_its_name(tmp_path, text, line, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert run(["run", "--workload-file", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: --workload-file {path}: ")
    assert line in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_load(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="Is a directory"):
        read_load(str(tmp_path))
    with pytest.raises(UserError, match="null"):
        read_load("a\0b")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a\xff")
    with pytest.raises(UserError, match="not UTF-8 at byte 1"):
        read_load(str(binary))
    binary.write_bytes(b"#" * (1 << 21))
    with pytest.raises(UserError, match="at most 1,048,576 bytes"):
        read_load(str(binary))


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_parameter_of_the_catalogue_is_one_of_the_factory_and_works_at_both_limits(name):
    workload = WORKLOADS[name]
    for parameter in workload.parameters:
        for value in (parameter.low, parameter.high):
            value = int(value) if parameter.is_whole else float(value)
            assert parameter.accepts(value)
            requests = workload.requests(0, block_size=16, num_blocks=256, **{parameter.name: value})
            for request in itertools.islice(requests, 4):
                assert -(-request.content.num_tokens // 16) <= 256
