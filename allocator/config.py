"""EngineConfig: every setting of the embedded engine, checked when built. Frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from allocator.errors import ConfigError
from allocator.fault_kinds import FAULT_KINDS, FAULTS, FaultKind, FaultRates, is_rate
from allocator.geometry import find_geometry

MAX_BLOCK_SIZE: Final = 1024
MAX_BLOCKS: Final = 1 << 26
MAX_PREFILL_TOKENS: Final = 1 << 30
#: Virtual seconds of one engine step: one decode iteration.
STEP_S: Final = 0.025
#: How far a load's rate and size can be turned down and up.
MIN_LOAD_SCALE: Final = 0.01
MAX_LOAD_SCALE: Final = 100.0

KeyHash = Literal["xxh3", "sha256"]
PreemptMode = Literal["swap", "recompute"]
Eviction = Literal["lru", "fifo", "lfu"]
ExecutorMode = Literal["thread", "inline"]
CompactMode = Literal["off", "manual", "auto"]
Policy = Literal["fcfs", "priority", "sjf"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; the names are those of the command line.

    Attributes:
        num_blocks: Device pool size, 1 to ``MAX_BLOCKS``.
        block_size: Tokens a block, 1 to ``MAX_BLOCK_SIZE``.
        geometry: Preset name, or ``none`` for bookkeeping only.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:i``.
        num_swap_blocks: Host pool size; 0 means no host tier.
        slab_blocks: Blocks a storage slab; ``None`` is the whole first pool. Small slabs let a shrink give memory back.
        policy: Who is admitted first: by arrival, by class, or who has the fewest tokens left.
        prefill_tokens: Prompt tokens computed a step, at most; 0 is no limit. Serial runs have none.
        preempt: How a running sequence gives its blocks back.
        eviction: Which cached block goes first.
        prefix_cache: Whether full blocks are kept and found again by content.
        key_hash: How blocks are named: ``xxh3``, or ``sha256`` where keys leave the process.
        reuse_distances: Whether the hits at other pool sizes are predicted from the live requests.
        optimistic_lookup: Whether prefixes are matched before the allocator lock is taken, and validated under it.
        sequence_locks: Whether copies take the sequences they use and let go of the allocator lock.
        executor: Whether copies run in a thread of their own (``thread``) or at submission (``inline``); the run is
            the same.
        copy_gb_per_s: Speed of copies in virtual time. [10^9 bytes a second]
        watermark_ratio: Share of the pool kept allocatable when admitting.
        compact: ``off`` refuses compaction, ``manual`` waits for the operator, ``auto`` acts at the threshold.
        compact_threshold_ratio: External fragmentation at which ``auto`` compacts.
        compact_budget: Blocks that ``auto`` moves a step, at most.
        max_running: Sequences that may run at once.
        serial: Each request alone, in file order, arrival times ignored.
        stamp: Write a pattern into every slot and check it.
        verify: What is computed is compared, so that a changed slot is found without stamps.
        seed: Seed of everything random.
        inject: Faults to strike at random, each kind once, with its probability at each step or copy.
    """

    num_blocks: int = 4096
    block_size: int = 16
    geometry: str = "tiny"
    device: str = "auto"
    num_swap_blocks: int = 2048
    slab_blocks: int | None = None
    policy: Policy = "fcfs"
    prefill_tokens: int = 8192
    preempt: PreemptMode = "swap"
    eviction: Eviction = "lru"
    prefix_cache: bool = True
    key_hash: KeyHash = "xxh3"
    reuse_distances: bool = True
    optimistic_lookup: bool = True
    sequence_locks: bool = True
    executor: ExecutorMode = "thread"
    copy_gb_per_s: float = 16.0
    watermark_ratio: float = 0.01
    compact: CompactMode = "manual"
    compact_threshold_ratio: float = 0.5
    compact_budget: int = 256
    max_running: int = 256
    serial: bool = False
    stamp: bool = False
    verify: bool = False
    seed: int = 0
    inject: FaultRates = ()

    def __post_init__(self) -> None:
        _whole("--blocks", self.num_blocks, 1, MAX_BLOCKS)
        _whole("--block-size", self.block_size, 1, MAX_BLOCK_SIZE)
        _whole("--swap-blocks", self.num_swap_blocks, 0, MAX_BLOCKS)
        _whole("--max-running", self.max_running, 1, 65536)
        _whole("--prefill-tokens", self.prefill_tokens, 0, MAX_PREFILL_TOKENS)
        _whole("--compact-budget", self.compact_budget, 1, MAX_BLOCKS)
        if self.slab_blocks is not None:
            _whole("--slab-blocks", self.slab_blocks, 1, MAX_BLOCKS)
        _choice("--policy", self.policy, ("fcfs", "priority", "sjf"))
        _choice("--preempt", self.preempt, ("swap", "recompute"))
        _choice("--eviction", self.eviction, ("lru", "fifo", "lfu"))
        _choice("--key-hash", self.key_hash, ("xxh3", "sha256"))
        _choice("--compact", self.compact, ("off", "manual", "auto"))
        _choice("--executor", self.executor, ("thread", "inline"))
        if not 1e-6 <= self.copy_gb_per_s <= 1e6:
            raise ConfigError("--copy-bandwidth", self.copy_gb_per_s, "a number of GB/s from 0.000001 to 1000000")
        check_ratio("--watermark", self.watermark_ratio)
        check_ratio("--compact-threshold", self.compact_threshold_ratio)
        device, _, index = self.device.partition(":")
        if device not in ("auto", "cpu", "cuda") or (index and (device != "cuda" or not index.isdigit())):
            raise ConfigError("--device", self.device, "auto, cpu, cuda or cuda:INDEX")
        geometry = find_geometry(self.geometry)
        if self.stamp and geometry is None:
            raise ConfigError("--stamp", "with --geometry none", "stamps need storage; choose a geometry, such as tiny")
        self._check_inject()

    def _check_inject(self) -> None:
        kinds = [kind for kind, _ in self.inject]
        for kind, rate in self.inject:
            _choice("--inject", kind, FAULT_KINDS)
            if not is_rate(rate):
                raise ConfigError("--inject", f"{kind}:{rate}", "a rate above 0 and at most 1")
            if kinds.count(kind) > 1:
                raise ConfigError("--inject", kind, "given twice; once, with its rate")
            refusal = self.fault_refusal(kind)
            if refusal is not None:
                raise ConfigError("--inject", kind, refusal)

    def fault_refusal(self, kind: FaultKind) -> str | None:
        """Return why a fault of this kind would mean nothing with these settings; ``None`` when it can strike."""
        if kind == "host-tier-full" and self.num_swap_blocks == 0:
            return "there is no host tier (--swap-blocks 0)"
        if FAULTS[kind].caught_by == 5 and self.geometry == "none":
            return "--geometry none keeps no contents; choose a geometry, such as tiny"
        if FAULTS[kind].caught_by == 5 and not (self.stamp or self.verify):
            return "nothing could catch it without --stamp"
        return None

    @property
    def slab_size(self) -> int:
        """Blocks a slab: as asked, else the whole first pool, so that slab ends cut no run short in it."""
        return self.slab_blocks or self.num_blocks


def check_ratio(option: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number from 0 to 1."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= 1:
        raise ConfigError(option, value, "a number from 0 to 1")


def _whole(option: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(option, value, f"a whole number from {low} to {high}")


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(option, value, f"one of {', '.join(allowed)}")
