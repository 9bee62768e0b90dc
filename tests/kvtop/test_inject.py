"""``--inject``: what a check must survive and what it must catch; a sample, and the whole grid among the slow tests."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from allocator.fault_kinds import FAULT_KINDS, FAULTS
from kvtop.cli import cli, run
from kvtop.workloads.catalog import WORKLOADS

SURVIVED = [kind for kind in FAULT_KINDS if FAULTS[kind].caught_by is None]
CAUGHT = [kind for kind in FAULT_KINDS if FAULTS[kind].caught_by is not None]
#: Rates at which each kind strikes often in a few hundred steps, without taking long.
RATES = {"failing-copy": 0.2, "slow-copy": 0.01, "stuck-executor": 0.005, "lost-client": 0.02, "host-tier-full": 0.01}
SMALL = ("--blocks", "64", "--device", "cpu", "--json")


def _names(option: str) -> tuple[str, ...]:
    """What an option with a closed set of names takes, whoever added them."""
    return next(tuple(param.type.name.split("|")) for param in cli.params if option in param.opts)


POLICIES, PREEMPTS, COMPACTS = _names("--policy"), _names("--preempt"), _names("--compact")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVTOP_")]:
        monkeypatch.delenv(name)


def _inject(*kinds: str) -> list[str]:
    return [word for kind in kinds for word in ("--inject", f"{kind}:{RATES.get(kind, 0.02)}")]


def _check(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, object], str]:
    code = run(["check", *SMALL, *args])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


# -- a sample ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preempt", "compact"), itertools.product(PREEMPTS, COMPACTS))
def test_check_survives_every_fault_at_once(preempt, compact, capsys):
    args = ("--preempt", preempt, "--compact", compact, "--compact-threshold", "0.2", "--steps", "300")
    code, report, err = _check(capsys, *args, *_inject(*SURVIVED))
    assert code == 0, err
    assert report["integrity"]["faults"] == 0
    assert report["requests"]["finished"] > 0
    assert report["injected"]["lost-client"] > 0
    assert "lost-client" in err.partition("survived")[0]
    if preempt == "swap":
        assert report["injected"]["failing-copy"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_every_request_of_a_trace_ends_whatever_fails(seed, capsys):
    trace = Path(__file__).parents[1] / "data/traces/azure.csv"
    args = ("--trace", str(trace), "--blocks", "300", "--seed", str(seed), "--compact", "auto", "--until-done")
    code, report, err = _check(capsys, *args, *_inject(*SURVIVED))
    assert code == 0, err
    requests = report["requests"]
    assert requests["finished"] + requests["cancelled"] + requests["refused"] == requests["submitted"] > 0
    assert requests["finished"] > 0


@pytest.mark.parametrize("kind", CAUGHT)
def test_check_catches_what_breaks_a_law(kind, capsys):
    code, report, err = _check(capsys, "--steps", "2000", "--inject", kind)
    assert code == 1
    assert report["injected"][kind] == 1
    assert report["integrity"]["faults"] == 1
    assert f": law {FAULTS[kind].caught_by}: " in err
    assert f"1 {kind} had been injected, to be caught: it was" in err


def test_a_fault_that_never_struck_is_said(capsys):
    code, _, err = _check(capsys, "--steps", "20", "--inject", "flipped-bit:1e-9")
    assert code == 0
    assert "flipped-bit never struck, so nothing is proved of it" in err


def test_a_check_that_misses_a_fault_fails(capsys, monkeypatch):
    monkeypatch.setattr("allocator.invariants.check_contents", lambda manager, sequences: None)
    code, report, err = _check(capsys, "--steps", "200", "--inject", "flipped-bit:0.1")
    assert report["injected"]["flipped-bit"] > 0
    assert code == 1
    assert "IT WAS NOT" in err


def test_a_run_survives_and_reports_it(capsys):
    assert run(["run", *SMALL, "--steps", "400", *_inject("failing-copy", "lost-client")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["injected"]["lost-client"] == report["requests"]["cancelled"] > 0
    assert run(["run", "--blocks", "64", "--device", "cpu", "--steps", "400", *_inject("lost-client")]) == 0
    assert f"injected       {report['injected']['lost-client']} lost-client" in capsys.readouterr().out


def test_the_same_seed_meets_the_same_faults(capsys):
    reports = []
    for _ in range(2):
        assert run(["run", *SMALL, "--seed", "4", "--steps", "600", *_inject(*SURVIVED)]) == 0
        report = json.loads(capsys.readouterr().out)
        del report["wall_s"], report["engine_s"]
        reports.append(report)
    assert reports[0] == reports[1]


def test_the_environment_names_several_faults(capsys, monkeypatch):
    monkeypatch.setenv("KVTOP_INJECT", "lost-client:0.05 leaked-reference:0.05")
    code, report, _ = _check(capsys, "--steps", "400")
    assert code == 1
    assert report["injected"]["leaked-reference"] == 1
    monkeypatch.setenv("KVTOP_INJECT", "lost-client nonsense")
    assert run(["check"]) == 2
    assert capsys.readouterr().err.startswith(
        "kvtop: KVTOP_INJECT nonsense: KIND or KIND:RATE, KIND one of failing-copy,"
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--inject", "failing-copy", "--inject", "failing-copy:0.5"), "--inject failing-copy: given twice"),
        (("--inject", "host-tier-full", "--swap-blocks", "0"), "--inject host-tier-full: there is no host tier"),
        (("--inject", "flipped-bit", "--geometry", "none"), "--inject flipped-bit: --geometry none keeps no contents"),
    ],
)
def test_contradictions_are_one_line(args, line, capsys):
    assert run(["check", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {line}")
    assert err.count("\n") == 1


def test_a_run_without_stamps_has_nothing_to_catch_a_flipped_bit_with(capsys):
    assert run(["run", "--inject", "flipped-bit"]) == 2
    assert "--inject flipped-bit: nothing could catch it without --stamp" in capsys.readouterr().err
    assert run(["check", "--threads", "2", "--inject", "slow-copy"]) == 2
    assert "--inject: not together with --threads" in capsys.readouterr().err


# -- the whole grid ----------------------------------------------------------------------------------

_STEPS = ("--steps", "400", "--compact-threshold", "0.2")


@pytest.mark.slow
@pytest.mark.parametrize("compact", COMPACTS)
@pytest.mark.parametrize("preempt", PREEMPTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_combination_survives_every_fault(workload, policy, preempt, compact, capsys):
    args = ("--workload", workload, "--policy", policy, "--preempt", preempt, "--compact", compact, *_STEPS)
    code, report, err = _check(capsys, *args, *_inject(*SURVIVED))
    assert code == 0, err
    assert report["integrity"]["faults"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", SURVIVED)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_fault_alone_is_survived(workload, policy, kind, capsys):
    args = ("--workload", workload, "--policy", policy, "--compact", "auto", *_STEPS)
    code, report, err = _check(capsys, *args, *_inject(kind))
    assert code == 0, err
    assert report["integrity"]["faults"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUGHT)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_fault_that_breaks_a_law_is_caught_in_every_workload(workload, kind, capsys):
    code, report, err = _check(capsys, "--workload", workload, "--steps", "4000", *_inject(kind))
    assert report["injected"][kind] == 1, "it never struck"
    assert code == 1
    assert f": law {FAULTS[kind].caught_by}: " in err
