"""The command line: what is refused and how, exit codes, the environment, and whole runs of the real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import kvtop
from kvtop.cli import cli, run
from kvtop.workloads.catalog import WORKLOADS

SMALL = ("--workload", "chat", "--blocks", "64", "--geometry", "tiny", "--device", "cpu", "--seed", "3")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVTOP_")]:
        monkeypatch.delenv(name)


def kvtop_process(*args: str, **settings: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvtop", *args],
        stdin=subprocess.DEVNULL,
        stdout=settings.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


BAD = [
    # A whole number out of its range, or none at all.
    (["run", "--blocks", "0"], "--blocks 0: a whole number from 1 to 67108864"),
    (["--blocks", "0"], "--blocks 0: a whole number from 1 to 67108864"),
    (["check", "--blocks", "-3"], "--blocks -3: a whole number from 1 to 67108864"),
    (["run", "--blocks", "many"], "--blocks many: a whole number from 1 to 67108864"),
    (["run", "--blocks", "1e3"], "--blocks 1e3: a whole number from 1 to 67108864"),
    (["run", "--blocks", "67108865"], "--blocks 67108865: a whole number from 1 to 67108864"),
    (["run", "--block-size", "-1"], "--block-size -1: a whole number from 1 to 1024"),
    (["run", "--block-size", "1025"], "--block-size 1025: a whole number from 1 to 1024"),
    (["run", "--swap-blocks", "-1"], "--swap-blocks -1: a whole number from 0 to 67108864"),
    (["run", "--seed", "-1"], "--seed -1: a whole number from 0 to 9223372036854775807"),
    (["run", "--steps", "0"], "--steps 0: a whole number from 1 to 9007199254740992"),
    (["run", "--metrics-port", "65536"], "--metrics-port 65536: a whole number from 0 to 65535"),
    # Numbers that are no numbers.
    (["run", "--watermark", "1.5"], "--watermark 1.5: a number from 0 to 1"),
    (["run", "--watermark", "nan"], "--watermark nan: a number from 0 to 1"),
    (["run", "--compact-threshold", "inf"], "--compact-threshold inf: a number from 0 to 1"),
    (["run", "--speed", "0"], "--speed 0: a number above 0 and at most 1000000, or max"),
    (["run", "--speed", "nan"], "--speed nan: a number above 0 and at most 1000000, or max"),
    (["run", "--duration", "0"], "--duration 0: a number of seconds above 0"),
    # Names.
    (
        ["run", "--geometry", "huge"],
        "--geometry huge: one of none, tiny, llama-3-8b, llama-3-70b, qwen-2.5-7b, mistral-7b, deepseek-v3, model",
    ),
    (["run", "--device", "tpu"], "--device tpu: auto, cpu, cuda or cuda:INDEX"),
    (["run", "--preempt", "kill"], "--preempt kill: one of swap, recompute"),
    (["run", "--eviction", "mru"], "--eviction mru: one of lru, fifo, lfu"),
    (["run", "--compact", "on"], "--compact on: one of off, manual, auto"),
    (["run", "--policy", "lifo"], "--policy lifo: one of fcfs, priority, sjf"),
    (["run", "--prefill-tokens", "-1"], "--prefill-tokens -1: a whole number from 0 to 1073741824"),
    (["run", "--compact-budget", "0"], "--compact-budget 0: a whole number from 1 to 67108864"),
    (
        ["run", "--workload", "nope"],
        f"--workload nope: one of {', '.join(WORKLOADS)}",
    ),
    (["run", "--workload", "chat+rag:0"], "--workload chat+rag:0: weight 0: a number above 0, at most 1000"),
    (["run", "--workload-file", "/no/such"], "--workload-file /no/such: No such file or directory"),
    (["run", "--rate", "0"], "--rate 0: a number from 0.01 to 100"),
    (["run", "--rate", "nan"], "--rate nan: a number from 0.01 to 100"),
    (["check", "--size", "101"], "--size 101: a number from 0.01 to 100"),
    (["run", "--requests", "0"], "--requests 0: a whole number from 1 to 9007199254740992"),
    # Contradictions.
    (
        ["run", "--swap-blocks", "4", "--swap-ratio", "0.5"],
        "--swap-blocks 4 and --swap-ratio 0.5: one of the two, not both",
    ),
    (["run", "--workload", "chat", "--trace", "x"], "--workload chat and --trace x: one of the two, not both"),
    (
        ["run", "--workload", "chat", "--workload-file", "x"],
        "--workload chat and --workload-file x: one of the two, not both",
    ),
    (["run", "--workload-file", "y", "--trace", "x"], "--workload-file y and --trace x: one of the two, not both"),
    (
        ["run", "--trace", "x", "--rate", "2"],
        "--rate 2: only for a synthetic workload, not together with --trace",
    ),
    (
        ["run", "--trace", "x", "--requests", "2"],
        "--requests 2: only for a synthetic workload, not together with --trace",
    ),
    (["run", "--skip-bad"], "--skip-bad: only together with --trace FILE"),
    (["run", "--trace-format", "azure"], "--trace-format azure: only together with --trace FILE"),
    (["run", "--metrics-host", "::1"], "--metrics-host ::1: only together with --metrics-port N"),
    (["run", "--until-done"], "--until-done: the workload chat never ends; give --requests, --steps or --duration"),
    (
        ["run", "--stamp", "--geometry", "none"],
        "--stamp with --geometry none: stamps need storage; choose a geometry, such as tiny",
    ),
    (
        ["run", "--workload", "model", "--geometry", "none"],
        "--geometry none: with --workload model only model, its own shape",
    ),
    (
        ["run", "--workload", "model", "--stamp"],
        "--stamp with --workload model: its slots hold keys and values; --verify checks them",
    ),
    (
        ["run", "--workload", "chat+model"],
        "--workload chat+model: model only by itself, as --workload model: it computes what the pool holds",
    ),
    (["run", "--verify"], "--verify with --workload chat: only with --workload model, the one that computes"),
    (["run", "--verify", "--trace", "x"], "--verify with --trace x: only with --workload model, the one that computes"),
    (["check", "--verify", "--threads", "2"], "--verify: not together with --threads, which runs no engine"),
    # Words in the wrong place.
    (["--blocks", "5", "run"], "--blocks: options go after the command: kvtop run --blocks …"),
    (["run", "--blocks"], "--blocks: needs a value"),
    (["run", "--json=yes"], "--json: takes no value"),
    (["run", "--nonsense"], "--nonsense: no such option; --help lists them"),
    (["run", "surplus"], "got unexpected extra argument (surplus); --help says what is allowed"),
    (["nonsense"], "no such command 'nonsense'; --help says what is allowed"),
    (["bench"], "missing command; --help says what is allowed"),
    # No terminal to draw on.
    ([], "standard input is not a terminal: open kvtop in a terminal, or use kvtop run for a report without a screen"),
]


@pytest.mark.parametrize(("args", "line"), BAD, ids=[" ".join(args) or "no terminal" for args, _ in BAD])
def test_bad_input_is_one_clear_line_and_exit_2(args, line, capsys):
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"kvtop: {line}\n"


def test_a_pool_larger_than_memory_is_refused_before_it_is_allocated(capsys):
    assert run(["run", "--blocks", "67108864", "--geometry", "llama-3-70b", "--device", "cpu", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvtop: --blocks 67108864: 327680.0 GiB for the pool, 163840.0 GiB for swap space")
    assert err.count("\n") == 1


def test_the_environment_sets_options_and_is_named_when_wrong(monkeypatch, capsys):
    monkeypatch.setenv("KVTOP_BLOCKS", "0")
    assert run(["run"]) == 2
    assert capsys.readouterr().err == "kvtop: KVTOP_BLOCKS 0: a whole number from 1 to 67108864\n"
    monkeypatch.setenv("KVTOP_BLOCKS", "48")
    monkeypatch.setenv("KVTOP_SERIAL", "maybe")
    assert run(["run"]) == 2
    assert capsys.readouterr().err == "kvtop: KVTOP_SERIAL maybe: 1, true, yes or on; 0, false, no or off\n"
    monkeypatch.setenv("KVTOP_SERIAL", "off")
    monkeypatch.setenv("KVTOP_GEOMETRY", "none")
    assert run(["run", "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"]["total"] == 48


def test_a_name_in_a_message_cannot_steer_the_terminal(capsys):
    assert run(["run", "--trace", "/no\x1b[31m\x07such\x9bfile"]) == 2
    err = capsys.readouterr().err
    assert err.removesuffix("\n").isprintable()
    assert "such" in err


def test_the_command_line_beats_the_environment_where_both_cannot_be(monkeypatch, capsys):
    monkeypatch.setenv("KVTOP_SWAP_RATIO", "0.5")
    assert run(["run", "--geometry", "none", "--blocks", "48", "--swap-blocks", "0", "--steps", "5", "--json"]) == 0
    assert "one of the two" not in capsys.readouterr().err


def test_help_and_version(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--blocks" in shown
    assert "check" in shown
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtop {kvtop.__version__}\n"


def test_the_readme_names_every_option():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    options = {name for command in (cli, cli.commands["run"]) for param in command.params for name in param.opts}
    missing = {name for name in options - {"--help", "-h", "--version", "--in-process"} if f"`{name}" not in readme}
    assert missing == set()


def test_run_prints_one_json_object_and_nothing_else(capsys):
    assert run(["run", *SMALL, "--steps", "200", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["steps"] == 200
    assert report["blocks"]["total"] == 64
    assert report["requests"]["submitted"] > 0
    assert report["tokens"]["generated"] > 0
    assert 0 < report["engine_s"] <= report["wall_s"]
    assert "\r" not in err, "progress is for terminals"


def test_the_same_seed_gives_the_same_run(capsys):
    reports = []
    for _ in range(2):
        assert run(["run", *SMALL, "--steps", "300", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        del report["wall_s"], report["engine_s"]
        reports.append(report)
    assert reports[0] == reports[1]


def test_run_for_people(capsys):
    assert run(["run", *SMALL, "--steps", "50"]) == 0
    out = capsys.readouterr().out
    assert "prefix cache" in out
    assert "50 steps in" in out


def test_a_default_bound_is_said(capsys, monkeypatch):
    monkeypatch.setattr("kvtop.driving.DEFAULT_STEPS", 20)
    assert run(["run", *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"] == 20
    assert "the workload chat never ends: stopping after 20 steps" in err


def test_check_says_what_it_proved(capsys):
    assert run(["check", *SMALL, "--steps", "100", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["integrity"]["checks"] >= 100
    assert report["integrity"]["faults"] == 0
    assert "no fault in" in err
    assert "contents included" in err
    assert run(["check", "--geometry", "none", "--blocks", "64", "--steps", "20"]) == 0
    assert "books only" in capsys.readouterr().err


def test_metrics_are_served_while_it_runs():
    process = kvtop_process("run", *SMALL, "--speed", "1", "--duration", "60", "--metrics-port", "0", "--json")
    try:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if "metrics on" in line)
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        out, _err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(10)
    assert 'kvtop_pool_blocks{source="embedded",tier="device"} 64.0' in text
    assert 'kvtop_source_up{source="embedded"} 1.0' in text
    assert json.loads(out)["blocks"]["total"] == 64


def test_check_says_so_when_every_request_had_to_be_refused(tmp_path: Path, capsys):
    trace = tmp_path / "large.csv"
    rows = [f"2023-11-16 18:00:{second:02d}.0000000,500,500" for second in range(5)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert run(["check", "--trace", str(trace), "--blocks", "4", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"]["refused"] == 5
    assert "all 5 requests had to be refused" in err


def test_a_broken_law_is_exit_1_with_the_law(capsys, monkeypatch):
    from allocator.engine import Engine
    from allocator.errors import InvariantViolation

    def broken(self: Engine) -> None:
        raise InvariantViolation(2, "block 3 has 1 holder and counts 2")

    monkeypatch.setattr(Engine, "check", broken)
    assert run(["check", *SMALL, "--steps", "100", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"] >= 1
    assert "FAULT at step 1: law 2: block 3 has 1 holder and counts 2" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_run_with_its_report(number, code):
    process = kvtop_process("run", *SMALL, "--duration", "60", "--metrics-port", "0", "--json")
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "metrics on" in line:
                break
        else:
            pytest.fail("the run did not start")
        process.send_signal(number)
        out, _err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == code
    assert json.loads(out)["steps"] >= 0


def test_a_closed_stdout_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    process = kvtop_process("run", *SMALL, "--steps", "5", "--json", stdout=writer)
    os.close(writer)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_a_full_disk_is_said():
    with open("/dev/full", "w") as full:
        process = kvtop_process("run", *SMALL, "--steps", "5", "--json", stdout=full)
        _out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "kvtop: the report could not be written: No space left on device" in err
    assert "Traceback" not in err


def test_check_drives_the_allocator_from_threads(capsys):
    assert run(["check", "--blocks", "64", "--block-size", "4", "--threads", "3", "--steps", "600", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["fault"] is None
    assert sum(report["operations"].values()) + report["refused"] >= 600
    assert report["checks"] >= 1
    assert "no fault in" in err


def test_check_with_threads_runs_no_engine(capsys):
    assert run(["check", "--threads", "2", "--until-done"]) == 2
    assert capsys.readouterr().err == "kvtop: --until-done: not together with --threads, which runs no engine\n"


@pytest.mark.parametrize("command", [["run", "--verify"], ["check"]], ids=lambda words: " ".join(words))
def test_a_run_of_the_model_is_verified(command, capsys):
    args = [*command, "--workload", "model", "--blocks", "64", "--device", "cpu", "--steps", "30", "--json"]
    assert run(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]["steps"] == 30
    assert report["verified"]["tokens"] > 100
    assert report["verified"]["max_difference"] == 0
    assert report["integrity"] == {"checks": 30 if command == ["check"] else 0, "faults": 0}


def test_the_model_is_verified_with_prompts_in_chunks_and_blocks_in_motion(capsys):
    args = ["--workload", "model", "--device", "cpu", "--blocks", "48", "--steps", "120", "--rate", "3", "--json"]
    more = ["--prefill-tokens", "16", "--policy", "sjf", "--compact", "auto", "--compact-threshold", "0.1"]
    assert run(["check", *args, *more, "--inject", "failing-copy:0.1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verified"]["max_difference"], report["integrity"]) == (0, {"checks": 120, "faults": 0})


def test_a_flipped_bit_of_the_model_is_caught(capsys):
    args = ["--workload", "model", "--blocks", "64", "--device", "cpu", "--steps", "200", "--inject", "flipped-bit:0.2"]
    assert run(["check", *args]) == 1
    assert "law 5: sequence" in capsys.readouterr().err


def test_a_difference_is_a_fault_and_exit_1(monkeypatch, capsys):
    from allocator.torch_storage import Pages

    write = Pages.write

    def write_slightly_else(self, layer, position, values):
        write(self, layer, position, values * (1 + 2e-7) if (layer, position) == (1, 20) else values)

    monkeypatch.setattr(Pages, "write", write_slightly_else)
    assert run(["run", "--verify", "--workload", "model", "--blocks", "64", "--steps", "30", "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["verified"]["max_difference"] > 0
    assert report["integrity"]["faults"] == 1
    assert "kvtop: FAULT at step 1: law 5: sequence 0, token 20: its logits differ by" in err
