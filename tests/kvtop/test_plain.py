"""Lines of text in place of a screen."""

from __future__ import annotations

import io

import msgspec
import pytest
from fake_nvml import NO_LIBRARY, FakeNvml

from allocator.ids import BlockState
from allocator.snapshot import Counters, SequenceRow, Snapshot
from kvtop.alerting import Alerting
from kvtop.attachment import Attachment
from kvtop.cli import run
from kvtop.cli.options import PANEL_NAMES
from kvtop.exporter import start_exporter
from kvtop.metrics_address import MetricsAddress
from kvtop.model.observation import Observation, RemoteObservation
from kvtop.model.remote import Capability, EngineRow, RemoteFacts
from kvtop.monitoring.rules import RuleSettings
from kvtop.operations import ReadOnly
from kvtop.panels.catalog import CONTENTS
from kvtop.panels.content import Asked
from kvtop.plain import lines, print_views
from kvtop.sources.scripted import ScriptedSource, block_arrays

_ROW = SequenceRow(7, 0, "chat", "running", "", 30, 40, 64, 3, 1, 0, 1, 2)
_SNAPSHOT = Snapshot(
    step=40, time_s=1.0, phase="running", speed=1.0, steps_per_s=40.0, source="fake", workload="chat",
    geometry="tiny", device="cpu", block_size=16, block_bytes=1024, slab_size=8, eviction="lru", preempt="swap",
    policy="fcfs", compact="manual", compact_threshold_ratio=0.5, watermark_ratio=0.01, num_running=1,
    num_waiting=0, num_swapped=0, counters=Counters(), sequences=(_ROW,),
)  # fmt: skip


def _attachment(*observations: Observation) -> Attachment:
    return Attachment(ScriptedSource(observations), ReadOnly("only looking"), lambda: 1.0)


def _observation(snapshot: Snapshot = _SNAPSHOT) -> Observation:
    states = [BlockState.ACTIVE] * 3 + [BlockState.FREE] * 5
    return Observation(snapshot, block_arrays(states, fill=16), None)


def test_every_line_is_a_number_with_its_name():
    attachment = _attachment(_observation())
    said = lines(attachment.poll())
    assert "device, used: 37.5% (3 held)" in said
    assert "prefix cache, hit ratio, since start: not known" in said
    assert "sequence 7: running, 40 tokens of 64, 3 blocks, 1 shared" in said
    assert all(line.isprintable() and ": " in line for line in said)


def test_an_engine_without_tensors_keeps_books_only():
    bare = msgspec.structs.replace(_SNAPSHOT, geometry="none", device="none", block_bytes=0)
    assert "engine, engine: scripted (cpu tiny)" in lines(_attachment(_observation()).poll())
    assert "engine, engine: scripted (books only)" in lines(_attachment(_observation(bare)).poll())


def test_control_signs_in_data_do_not_steer_the_terminal():
    row = msgspec.structs.replace(_ROW, status="waiting", reason="\x1b[31mred")
    attachment = _attachment(_observation(msgspec.structs.replace(_SNAPSHOT, sequences=(row,), phase="stuck: \x07")))
    assert all(line.isprintable() for line in lines(attachment.poll()))


def test_once_prints_one_reading_after_a_while():
    out, slept = io.StringIO(), []
    later = msgspec.structs.replace(_SNAPSHOT, step=80)
    attachment = _attachment(_observation(), _observation(later))
    assert print_views(attachment, every_s=3.0, once=True, out=out, sleep=slept.append) == 0
    assert "step: 80" in out.getvalue()
    assert slept == [3.0]


def test_a_lost_engine_ends_it_with_the_reason():
    out = io.StringIO()
    attachment = _attachment(_observation())
    readings = []

    def sleep(seconds: float) -> None:
        readings.append(seconds)
        attachment.source.failure = "ended by signal 9"

    assert print_views(attachment, every_s=0.0, once=False, out=out, sleep=sleep) == 1
    assert "engine lost: ended by signal 9" in out.getvalue()
    assert len(readings) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--once"], "--once: only together with --plain"),
        (["--panel", "gpu"], "--panel: only together with --plain"),
        (["--plain", "--theme", "light"], "--theme: not together with --plain"),
        (["--theme", "pink"], "--theme pink: one of dark, light, contrast, colour-blind"),
        (["--refresh", "0"], "--refresh 0: a number of seconds from 0.02 to 60"),
    ],
)
def test_bad_options_are_told_in_one_line(options, complaint, capsys):
    assert run(options) == 2
    assert capsys.readouterr().err == f"kvtop: {complaint}\n"


def test_the_command_prints_the_embedded_engine(capsys):
    assert run(["--plain", "--once", "--refresh", "0.02", "--in-process", "--geometry", "none", "--blocks", "64"]) == 0
    said = capsys.readouterr().out
    assert "device, blocks: 64" in said


def test_panels_are_told_in_place_of_the_overview():
    out = io.StringIO()
    panels = ("alerts", "gpu", "audit", "tiers")
    print_views(_attachment(_observation()), every_s=0.0, once=True, panels=panels, out=out, sleep=lambda s: None)
    said = out.getvalue().splitlines()
    assert (
        'quiet, KvtopCacheNearlyFull: 37.5% (fires above 90.0% for 5m 00s: kvtop:cache_usage:avg{tier="device"})'
        in said
    )
    assert any(line.startswith("gpus of this machine, ") for line in said)
    assert "commands to this engine, the newest first, none: nobody has asked for anything yet" in said
    assert "device, used: 37.5% (3 held)" in said
    assert not any(line.startswith("engine, ") for line in said)


def test_what_fires_is_told_without_asking():
    attachment = _attachment(_observation())
    view = attachment.poll()
    alerting = Alerting(RuleSettings(hold="0s", thresholds={"KvtopCacheNearlyFull": 0.1}))
    alerting.follow(view, 1.0)
    told = lines(view, asked=Asked(alerts=alerting.statuses))
    assert "alert KvtopCacheNearlyFull: firing, docs/runbooks/cache-nearly-full.md" in told


def test_the_names_of_panels_are_those_there_are():
    assert set(PANEL_NAMES) == set(CONTENTS)


def _served(*rows: EngineRow, **more: object) -> RemoteObservation:
    facts = RemoteFacts("vLLM", "0.32.0", "http://127.0.0.1:8000", rows, **more)  # type: ignore[arg-type]
    return RemoteObservation(facts)


def test_a_server_is_told_in_words_and_what_it_does_not_tell_is_not_known():
    capabilities = (Capability("hit ratio"), Capability("sleep", "needs development mode"))
    row = EngineRow(model="tiny", usage_ratio=0.25, used_blocks=64, total_blocks=256, running=3)
    source = ScriptedSource((_served(row, capabilities=capabilities, notes=("one \x1b[2Jnote",)),))
    said = lines(Attachment(source, ReadOnly("only looking"), lambda: 1.0).poll())
    assert "vllm tiny rank 0, used: 25.0%" in said
    assert "vllm tiny rank 0, blocks held: 64 (of 256)" in said
    assert "vllm tiny rank 0, preemptions: not known" in said
    assert "offered, sleep: needs development mode" in said
    assert all(line.isprintable() and ": " in line for line in said)


def test_a_lost_server_of_several_is_told_and_is_no_zero():
    rows = (EngineRow(target="a:1", kind="vLLM", running=2), EngineRow(target="b:1", trouble="nothing listens there"))
    said = lines(Attachment(ScriptedSource((_served(*rows),)), ReadOnly("only looking"), lambda: 1.0).poll())
    assert "b:1, trouble: nothing listens there" in said
    assert sum(line.startswith("b:1") for line in said) == 1


def test_an_engine_that_runs_already_is_printed(capsys):
    exporter = start_exporter(
        _attachment(_observation()).poll, MetricsAddress("127.0.0.1", 0), nvml=FakeNvml({"init": NO_LIBRARY})
    )
    try:
        target = f"http://127.0.0.1:{exporter.port}"
        assert run(["attach", target, "--plain", "--once", "--refresh", "0.02"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert "kvtop scripted rank 0, running: 1" in said
        assert run(["attach", target, "--plain", "--allow-operations"]) == 2
        assert "not with --plain" in capsys.readouterr().err
        assert run(["attach", target, "--once"]) == 2
        assert "--once: only together with --plain" in capsys.readouterr().err
    finally:
        exporter.close()
