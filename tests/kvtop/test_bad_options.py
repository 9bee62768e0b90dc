"""Every engine option refuses what it does not allow, in one line. An option without a case here fails a test."""

from __future__ import annotations

import os

import click
import pytest

from kvtop.cli import cli, run

#: Least and greatest value of each number; for others also two that are too small and too large, and what is said.
WHOLE = {
    "--blocks": (1, 67108864),
    "--block-size": (1, 1024),
    "--swap-blocks": (0, 67108864),
    "--slab-blocks": (1, 67108864),
    "--seed": (0, 9223372036854775807),
    "--max-running": (1, 65536),
    "--prefill-tokens": (0, 1073741824),
    "--compact-budget": (1, 67108864),
    "--metrics-port": (0, 65535),
    "--steps": (1, 9007199254740992),
    "--threads": (1, 64),
    "--requests": (1, 9007199254740992),
    "--record-every": (1, 1099511627776),
}
REAL = {
    "--swap-ratio": ("0", "64", "-0.001", "64.001", "a number from 0 to 64"),
    "--watermark": ("0", "1", "-0.001", "1.001", "a number from 0 to 1"),
    "--compact-threshold": ("0", "1", "-0.001", "1.001", "a number from 0 to 1"),
    "--copy-bandwidth": ("1e-6", "1000000", "0", "1000001", "a number of GB/s from 0.000001 to 1000000"),
    "--speed": ("1e-6", "1000000", "0", "1000001", "a number above 0 and at most 1000000, or max"),
    "--rate": ("0.01", "100", "0.009", "100.1", "a number from 0.01 to 100"),
    "--size": ("0.01", "100", "0.009", "100.1", "a number from 0.01 to 100"),
    "--refresh": ("0.02", "60", "0.019", "60.1", "a number of seconds from 0.02 to 60"),
    "--duration": ("0.001", "1e9", "0", "1e10", "a number of seconds above 0"),
}
NAMED = {
    "--geometry": "one of none, tiny, llama-3-8b, llama-3-70b, qwen-2.5-7b, mistral-7b, deepseek-v3, model",
    "--policy": "one of fcfs, priority, sjf",
    "--executor": "one of thread, inline",
    "--log-format": "one of text, json",
    "--preempt": "one of swap, recompute",
    "--eviction": "one of lru, fifo, lfu",
    "--compact": "one of off, manual, auto",
    "--compat": "only vllm",
    "--panel": "one of prefix, fragmentation, tiers, locks, history, audit, details, block, gpu, alerts",
    "--theme": "one of dark, light, contrast, colour-blind",
    "--inject": "KIND or KIND:RATE, KIND one of failing-copy, slow-copy, stuck-executor, lost-client, host-tier-full, "
    "flipped-bit, leaked-reference, RATE above 0 and at most 1",
}
#: Options whose value is looked at later, or only beside another one: whole lines.
OTHER = {
    "--device": [
        (["--device", "tpu"], "--device tpu: auto, cpu, cuda or cuda:INDEX"),
        (["--device", "cuda:x"], "--device cuda:x: auto, cpu, cuda or cuda:INDEX"),
        (["--device", "cpu:0"], "--device cpu:0: auto, cpu, cuda or cuda:INDEX"),
        (["--device", "cuda:4096"], "--device cuda:4096: this machine has "),
    ],
    "--workload": [(["--workload", "nope"], "--workload nope: one of chat")],
    "--workload-file": [
        (["--workload-file", "/no/such/file"], "--workload-file /no/such/file: No such file or directory"),
        (["--workload-file", "x", "--trace", "y"], "--workload-file x and --trace y: one of the two, not both"),
        (
            ["--workload-file", "x", "--workload", "rag"],
            "--workload rag and --workload-file x: one of the two, not both",
        ),
    ],
    "--config": [(["--config", "/nowhere.toml"], "--config /nowhere.toml: no such file")],
    "--publish": [
        (["--publish", "a/b"], "--publish a/b: an engine's name is 1 to 40 letters, digits, '.', '_' and '-'"),
    ],
    "--record": [
        (["--record", __file__], f"--record {__file__}: exists already; choose another name"),
        (["--record", "/no/such/folder/x"], "--record /no/such/folder/x: there is no folder /no/such/folder"),
    ],
    "--trace": [
        (["--trace", "/no/such/file"], "--trace /no/such/file: no such file"),
        (["--trace", "x", "--workload", "chat"], "--workload chat and --trace x: one of the two, not both"),
    ],
    "--trace-format": [
        (["--trace-format", "azure"], "--trace-format azure: only together with --trace FILE"),
        (["--trace-format", "csv", "--trace", __file__], "--trace-format csv: one of auto, "),
    ],
    "--metrics-host": [
        (["--metrics-host", "::1"], "--metrics-host ::1: only together with --metrics-port N"),
        (["--metrics-host", "no host", "--metrics-port", "0"], "--metrics-port 0 (host no host): cannot listen there"),
    ],
}
for _option, _other in (("--metrics-tls-cert", "--metrics-tls-key"), ("--metrics-tls-key", "--metrics-tls-cert")):
    OTHER[_option] = [
        ([_option, "x.pem"], f"{_option} x.pem: only together with --metrics-port N"),
        ([_option, "x.pem", "--metrics-port", "0"], f"{_option} x.pem: only together with {_other} FILE"),
    ]
OTHER["--metrics-auth"] = [
    (["--metrics-auth", "x"], "--metrics-auth x: only together with --metrics-port N"),
    (
        ["--metrics-auth", "/no/such/file", "--metrics-port", "0"],
        "--metrics-auth /no/such/file: no such file",
    ),
]
FLAGS = {
    "--skip-bad",
    "--serial",
    "--no-prefix-cache",
    "--no-remember",
    "--no-reuse-distances",
    "--stamp",
    "--verify",
    "--until-done",
    "--json",
    "--in-process",
    "--list-workloads",
    "--ascii",
    "--plain",
    "--once",
}
#: Options of the program, not of an engine.
NO_ENGINE = {"--help", "--version"}

COMMANDS: dict[str, click.Command] = {"": cli, "run": cli.commands["run"], "check": cli.commands["check"]}
OPTIONS = sorted(
    {param.opts[0] for command in COMMANDS.values() for param in command.params if isinstance(param, click.Option)}
    - NO_ENGINE
)
NUMBERS = {**WHOLE, **REAL}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVTOP_")]:
        monkeypatch.delenv(name)


def homes(option: str) -> list[list[str]]:
    """The commands that have an option, as first words of a command line."""
    return [[name] if name else [] for name, command in COMMANDS.items() if find(command, option)]


def find(command: click.Command, option: str) -> click.Option | None:
    return next((p for p in command.params if isinstance(p, click.Option) and option in p.opts), None)


def of(option: str) -> click.Option:
    return next(found for command in COMMANDS.values() if (found := find(command, option)))


def refused(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2, args
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvtop: {line}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_every_option_has_its_bad_input_here():
    assert [*OPTIONS] == sorted([*WHOLE, *REAL, *NAMED, *OTHER, *FLAGS]), "add the new option's limits above"


@pytest.mark.parametrize("option", WHOLE)
def test_a_whole_number_out_of_its_limits(option, capsys):
    low, high = WHOLE[option]
    allowed = f"a whole number from {low} to {high}"
    for value in (str(low - 1), str(high + 1), "many", "1e3", "1.0", "0x1", "1_000", "٣", "", "-", "nan", "1 2"):
        for home in homes(option):
            refused([*home, f"{option}={value}"], f"{option} {value or repr('')}: {allowed}\n", capsys)


@pytest.mark.parametrize("option", REAL)
def test_a_number_out_of_its_limits(option, capsys):
    *_, below, above, allowed = REAL[option]
    for value in (below, above, "nan", "inf", "-inf", "many", "0x1", "1_0", "", "1,5"):
        for home in homes(option):
            refused([*home, f"{option}={value}"], f"{option} {value or repr('')}: {allowed}\n", capsys)


@pytest.mark.parametrize("option", NUMBERS)
def test_the_limits_themselves_are_taken(option):
    param = of(option)
    for value in NUMBERS[option][:2]:
        assert param.type.convert(str(value), param, None) == (value if option in WHOLE else float(value))


@pytest.mark.parametrize("option", NAMED)
def test_a_name_that_is_none(option, capsys):
    for value in ("nonsense", "", of(option).type.name.split("|")[0].upper() + "!"):
        for home in homes(option):
            refused([*home, f"{option}={value}"], f"{option} {value or repr('')}: {NAMED[option]}\n", capsys)


@pytest.mark.parametrize("option", OTHER)
def test_a_value_that_cannot_be_used(option, capsys):
    for home in homes(option):
        refused([*home, option, ""], f"{option} '': needs a value\n", capsys)
        for args, line in OTHER[option] if home else ():
            refused([*home, *args], line, capsys)


@pytest.mark.parametrize("option", sorted(FLAGS))
def test_a_flag_takes_no_value(option, capsys, monkeypatch):
    for home in homes(option):
        refused([*home, f"{option}=yes"], f"{option}: takes no value\n", capsys)
    if (variable := of(option).envvar) is not None:
        monkeypatch.setenv(variable, "maybe")
        refused(homes(option)[-1], f"{variable} maybe: 1, true, yes or on; 0, false, no or off\n", capsys)


@pytest.mark.parametrize("option", [*WHOLE, *REAL, *NAMED])
def test_the_environment_is_named_when_it_is_wrong(option, capsys, monkeypatch):
    variable = of(option).envvar
    if variable is None:
        pytest.skip("not read from the environment")
    assert variable == "KVTOP_" + option.strip("-").replace("-", "_").upper()
    monkeypatch.setenv(variable, "nonsense")
    refused([*homes(option)[-1]], f"{variable} nonsense: ", capsys)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in FLAGS])
def test_an_option_at_the_end_needs_its_value(option, capsys):
    for home in homes(option):
        refused([*home, option], f"{option}: needs a value\n", capsys)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--swap-blocks", "4", "--swap-ratio", "0.5"],
            "--swap-blocks 4 and --swap-ratio 0.5: one of the two, not both",
        ),
        (
            ["--blocks", "67108864", "--swap-ratio", "64"],
            "--swap-ratio 64 of 67108864 blocks: at most 67108864 blocks in the host pool",
        ),
        (["--stamp", "--geometry", "none"], "--stamp with --geometry none: stamps need storage"),
        (["--until-done"], "--until-done: the workload chat never ends; give --requests, --steps or --duration"),
        (["--requests", "5", "--trace", "x"], "--requests 5: only for a synthetic workload, not together with --trace"),
        (["--record-every", "2"], "--record-every 2: only together with --record FILE"),
        (["--skip-bad"], "--skip-bad: only together with --trace FILE"),
    ],
)
def test_options_that_contradict_each_other(args, line, capsys):
    for home in ("run", "check"):
        refused([home, *args], line, capsys)


@pytest.mark.parametrize("none", [("--swap-blocks", "0"), ("--swap-ratio", "0")])
def test_preemption_by_swap_without_swap_space_is_explained_and_recomputes(none, capsys):
    args = ["check", "--preempt", "swap", *none, "--blocks", "48", "--device", "cpu", "--steps", "400"]
    assert run(args) == 0
    out, err = capsys.readouterr()
    assert "kvtop: --preempt swap with 0 swap blocks: preempted sequences are recomputed instead" in err
    assert "0 by swap" in out
    assert "0 by recompute" not in out
