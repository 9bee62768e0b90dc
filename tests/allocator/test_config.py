"""EngineConfig: what is allowed, and one clear line for what is not."""

from __future__ import annotations

import dataclasses

import pytest

from allocator.config import MAX_BLOCKS, EngineConfig, check_ratio
from allocator.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_blocks", 0, f"--blocks 0: a whole number from 1 to {MAX_BLOCKS}"),
        ("num_blocks", MAX_BLOCKS + 1, f"--blocks {MAX_BLOCKS + 1}: a whole number from 1 to {MAX_BLOCKS}"),
        ("num_blocks", 2.5, "--blocks 2.5: a whole number"),
        ("num_blocks", True, "--blocks True: a whole number"),
        ("block_size", -1, "--block-size -1: a whole number from 1 to 1024"),
        ("block_size", 1025, "--block-size 1025: a whole number from 1 to 1024"),
        ("num_swap_blocks", -1, f"--swap-blocks -1: a whole number from 0 to {MAX_BLOCKS}"),
        ("slab_blocks", 0, "--slab-blocks 0: a whole number from 1"),
        ("max_running", 0, "--max-running 0: a whole number from 1 to 65536"),
        ("geometry", "huge", "--geometry huge: one of none, tiny, llama-3-8b"),
        ("device", "tpu", "--device tpu: auto, cpu, cuda or cuda:INDEX"),
        ("device", "cpu:1", "--device cpu:1: auto"),
        ("device", "cuda:x", "--device cuda:x: auto"),
        ("device", "cuda:-1", "--device cuda:-1: auto"),
        ("prefill_tokens", -1, "--prefill-tokens -1: a whole number from 0"),
        ("compact_budget", 0, "--compact-budget 0: a whole number from 1"),
        ("policy", "lifo", "--policy lifo: one of fcfs, priority, sjf"),
        ("preempt", "kill", "--preempt kill: one of swap, recompute"),
        ("eviction", "mru", "--eviction mru: one of lru, fifo, lfu"),
        ("compact", "on", "--compact on: one of off, manual, auto"),
        ("watermark_ratio", 1.1, "--watermark 1.1: a number from 0 to 1"),
        ("watermark_ratio", float("nan"), "--watermark nan: a number from 0 to 1"),
        ("compact_threshold_ratio", -0.1, "--compact-threshold -0.1: a number from 0 to 1"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(setting, value, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{setting: value})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_the_limits_themselves_are_allowed():
    EngineConfig(num_blocks=1, block_size=1, num_swap_blocks=0, slab_blocks=1, max_running=1, watermark_ratio=0)
    EngineConfig(num_blocks=MAX_BLOCKS, block_size=1024, watermark_ratio=1, compact_threshold_ratio=0, device="cuda:3")


def test_stamps_need_storage():
    with pytest.raises(ConfigError, match="--stamp with --geometry none"):
        EngineConfig(geometry="none", stamp=True)


def test_defaults_are_those_of_the_command_line():
    config = EngineConfig()
    assert (config.num_blocks, config.block_size, config.num_swap_blocks, config.geometry) == (4096, 16, 2048, "tiny")
    assert (config.preempt, config.eviction, config.compact, config.watermark_ratio) == ("swap", "lru", "manual", 0.01)
    assert (config.slab_size, EngineConfig(slab_blocks=7).slab_size) == (4096, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 1  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_ratios_in_range(value):
    check_ratio("--x", value)


@pytest.mark.parametrize("value", [-1, 2, float("inf"), "0.5", None])
def test_ratios_out_of_range(value):
    with pytest.raises(ConfigError, match="a number from 0 to 1"):
        check_ratio("--x", value)
