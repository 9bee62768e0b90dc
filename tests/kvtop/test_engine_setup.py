"""Engine options: how they become a configuration, travel, and are refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allocator.config import EngineConfig
from allocator.errors import ConfigError
from kvtop.engine_setup import (
    BOOK_BYTES,
    EngineOptions,
    available_memory,
    build_config,
    check_memory,
    check_options,
    idle_notes,
    swap_notes,
)
from kvtop.errors import UserError

GIB = 2**30


def test_defaults_are_the_promised_ones():
    config = build_config(EngineOptions())
    assert config == EngineConfig(num_blocks=4096, block_size=16, geometry="tiny", num_swap_blocks=2048)
    assert (config.preempt, config.eviction, config.compact) == ("swap", "lru", "manual")
    assert (config.watermark_ratio, config.seed, config.serial, config.stamp) == (0.01, 0, False, False)


def test_options_survive_the_way_to_another_process():
    options = EngineOptions(num_blocks=7, trace="a.jsonl", speed=2.5, compact="auto", num_swap_blocks=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=EngineOptions) == options


@pytest.mark.parametrize(
    ("options", "swap"),
    [
        (EngineOptions(num_blocks=100), 50),
        (EngineOptions(num_blocks=100, swap_ratio=0.0), 0),
        (EngineOptions(num_blocks=100, swap_ratio=1.25), 125),
        (EngineOptions(num_blocks=100, num_swap_blocks=3), 3),
    ],
)
def test_swap_space_by_ratio_or_in_blocks(options, swap):
    assert build_config(options).num_swap_blocks == swap


def test_the_block_size_is_the_asked_one_else_the_traces_else_16():
    assert build_config(EngineOptions(block_size=7), 512).block_size == 7
    assert build_config(EngineOptions(), 512).block_size == 512
    assert build_config(EngineOptions()).block_size == 16


def test_little_swap_space_is_said():
    assert swap_notes(build_config(EngineOptions(num_blocks=100, num_swap_blocks=50))) == ()
    (note,) = swap_notes(build_config(EngineOptions(num_blocks=100, num_swap_blocks=49)))
    assert "49 blocks is below 50% of the device pool (100)" in note
    assert swap_notes(build_config(EngineOptions(num_swap_blocks=0))) == (
        "--preempt swap with 0 swap blocks: preempted sequences are recomputed instead (--swap-blocks N)",
    )
    assert swap_notes(build_config(EngineOptions(num_swap_blocks=0, preempt="recompute"))) == ()
    assert swap_notes(build_config(EngineOptions(num_swap_blocks=0, serial=True))) == (), "nobody is preempted"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (EngineOptions(eviction="lfu", prefix_cache=False), "--eviction lfu has no effect"),
        (EngineOptions(max_running=7, serial=True), "--max-running 7 has no effect"),
        (EngineOptions(compact_threshold_ratio=0.3, compact="off"), "--compact-threshold 0.3 has no effect yet"),
        (EngineOptions(device="cuda:1", geometry="none"), "--device cuda:1 has no effect"),
    ],
)
def test_a_setting_that_means_nothing_beside_another_is_said(options, note):
    (line,) = idle_notes(build_config(options))
    assert line.startswith(note)
    assert idle_notes(build_config(EngineOptions())) == ()


def test_a_pool_larger_than_memory_is_refused_with_the_numbers():
    config = EngineConfig(num_blocks=1 << 20, num_swap_blocks=1 << 19, geometry="llama-3-8b", device="cpu")
    with pytest.raises(UserError) as caught:
        check_memory(config, 16 * GIB)
    text = str(caught.value)
    assert text.startswith("--blocks 1048576: 2048.0 GiB for the pool, 1024.0 GiB for swap space")
    assert "16.0 GiB" in text
    needed = 3072 * GIB + 3 * (1 << 19) * BOOK_BYTES
    check_memory(config, needed)
    with pytest.raises(UserError):
        check_memory(config, needed - 1)


def test_memory_counts_only_what_lies_there():
    config = EngineConfig(num_blocks=1 << 20, num_swap_blocks=0, geometry="llama-3-8b", device="cuda")
    check_memory(config, GIB)  # the GPU refuses by itself
    check_memory(EngineConfig(num_blocks=1 << 24, geometry="none"), GIB)  # only the books
    with pytest.raises(UserError, match="for the books"):
        check_memory(EngineConfig(num_blocks=1 << 26, geometry="none"), GIB)
    check_memory(config, None)  # nobody knows
    auto = EngineConfig(num_blocks=1 << 20, num_swap_blocks=0, geometry="llama-3-8b", device="auto")
    check_memory(auto, GIB, has_gpu=lambda: True)
    with pytest.raises(UserError):
        check_memory(auto, GIB, has_gpu=lambda: False)


def test_available_memory_is_the_lesser_of_machine_and_control_group(tmp_path: Path):
    assert available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8388608 kB\nMemAvailable:    4194304 kB\n")
    assert available_memory(tmp_path) == 4 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 4 * GIB
    (group / "memory.max").write_text(f"{3 * GIB}\n")
    (group / "memory.current").write_text(f"{GIB}\n")
    assert available_memory(tmp_path) == 2 * GIB


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (EngineOptions(num_blocks=0), ConfigError, "--blocks 0"),
        (EngineOptions(workload="nope"), UserError, "--workload nope: one of chat"),
        (EngineOptions(trace="/no/such/file"), UserError, "--trace /no/such/file: no such file"),
        (EngineOptions(trace="x" * 5000), UserError, "x: no such file"),
        (EngineOptions(num_blocks=1 << 26, geometry="llama-3-70b", device="cpu"), UserError, "GiB"),
    ],
)
def test_what_can_be_known_at_once_is_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        check_options(options)


def test_the_model_brings_its_geometry():
    assert build_config(EngineOptions(workload="model")).geometry == "model"
    assert build_config(EngineOptions(workload="model", geometry="model")).geometry == "model"
    assert build_config(EngineOptions(workload="model", trace="x")).geometry == "tiny"
    assert build_config(EngineOptions(geometry="model")).geometry == "model"


@pytest.mark.parametrize(
    ("options", "stamp", "verify"),
    [
        (EngineOptions(), True, False),
        (EngineOptions(geometry="none"), False, False),
        (EngineOptions(workload="model"), False, True),
        (EngineOptions(workload="model", trace="x"), True, False),
    ],
)
def test_all_checks_are_those_that_the_load_allows(options, stamp, verify):
    checked = options.with_all_checks()
    assert (checked.stamp, checked.verify) == (stamp, verify)
