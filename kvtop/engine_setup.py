"""EngineOptions, and how they become a running engine: the one place that reads traces and checks sizes.

Options travel as MessagePack to the process that builds the engine, so they hold plain values only.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from allocator.config import MAX_BLOCKS, CompactMode, EngineConfig, Eviction, ExecutorMode, Policy, PreemptMode
from allocator.errors import ConfigError
from allocator.fault_kinds import FaultRates
from allocator.geometry import find_geometry
from kvtop.errors import UserError

if TYPE_CHECKING:
    from allocator.compute import Compute
    from allocator.content import Request
    from allocator.engine import Engine
    from allocator.manager import BlockManager
    from allocator.storage import Storage
    from kvtop.workloads.load import Load

DEFAULT_BLOCK_SIZE: Final = 16
#: The workload without requests of its own.
ATTACHED: Final = "attached"
#: What drives an engine that is given its requests one by one, as it is shown.
SCRIPTED: Final = "scripted"
DEFAULT_GEOMETRY: Final = "tiny"
#: The workload that computes, and its geometry.
MODEL: Final = "model"
#: Share of the device pool that swap space should have, so that preemption by swap rarely falls back to recompute.
MIN_SWAP_RATIO: Final = 0.5
#: What the allocator keeps about a block, roughly, while nothing is cached. [bytes]
BOOK_BYTES: Final = 50


class EngineOptions(msgspec.Struct, frozen=True):
    """What the command line asks of an engine. ``None`` means not asked for.

    Attributes:
        num_blocks, device, slab_blocks, policy, prefill_tokens, preempt, eviction, prefix_cache, reuse_distances,
            watermark_ratio, compact, compact_threshold_ratio, compact_budget, copy_gb_per_s, executor, max_running,
            serial, stamp, seed, inject: As in ``EngineConfig``.
        geometry: As in ``EngineConfig``; ``None`` takes the workload's own, else ``DEFAULT_GEOMETRY``.
        block_size: Tokens a block; ``None`` takes the trace's own, else ``DEFAULT_BLOCK_SIZE``.
        num_swap_blocks: Host pool size; ``None`` derives it from ``swap_ratio``.
        swap_ratio: Host pool size ÷ device pool size.
        workload: Synthetic workloads put together, used when there is neither a trace nor a workload file.
        workload_file: File that describes a synthetic load.
        num_requests: Requests after which a synthetic load ends; ``None`` is never.
        rate_scale, size_scale: Factors on its rate and on its lengths.
        verify: Compute everything with a contiguous cache too, and compare; for the workload ``model``.
        trace: File of requests to replay.
        trace_format: Its format, or ``auto``.
        skip_bad: Leave out bad rows of the trace instead of refusing it.
        speed: Virtual seconds a real second; ``None`` is as fast as possible.
    """

    num_blocks: int = 4096
    block_size: int | None = None
    geometry: str | None = None
    device: str = "auto"
    num_swap_blocks: int | None = None
    swap_ratio: float = 0.5
    slab_blocks: int | None = None
    policy: Policy = "fcfs"
    prefill_tokens: int = 8192
    preempt: PreemptMode = "swap"
    eviction: Eviction = "lru"
    prefix_cache: bool = True
    reuse_distances: bool = True
    watermark_ratio: float = 0.01
    compact: CompactMode = "manual"
    compact_threshold_ratio: float = 0.5
    compact_budget: int = 256
    copy_gb_per_s: float = 16.0
    executor: ExecutorMode = "thread"
    max_running: int = 256
    serial: bool = False
    stamp: bool = False
    seed: int = 0
    inject: FaultRates = ()
    workload: str = "chat"
    workload_file: str | None = None
    num_requests: int | None = None
    rate_scale: float = 1.0
    size_scale: float = 1.0
    verify: bool = False
    trace: str | None = None
    trace_format: str = "auto"
    skip_bad: bool = False
    speed: float | None = None

    @property
    def is_endless(self) -> bool:
        """Whether requests keep coming for ever."""
        return self.trace is None and self.num_requests is None

    @property
    def takes_all_load(self) -> bool:
        """Whether attached programs are all the load there is."""
        return self.trace is None and self.workload_file is None and self.workload == ATTACHED

    @property
    def has_model(self) -> bool:
        """Whether a model computes the keys and values."""
        return self.trace is None and self.workload_file is None and self.workload == MODEL

    @property
    def load_name(self) -> str:
        """What drives the engine, as it is shown."""
        if self.trace is not None:
            return f"trace {Path(self.trace).name}"
        return self.workload if self.workload_file is None else Path(self.workload_file).name

    def with_all_checks(self) -> EngineOptions:
        """Return these options with contents that can be checked: the model's, or stamps where there is storage."""
        if self.has_model:
            return msgspec.structs.replace(self, verify=True)
        return msgspec.structs.replace(self, stamp=self.stamp or self.geometry != "none")


def build_config(options: EngineOptions, block_size: int | None = None) -> EngineConfig:
    """Return the engine configuration that ``options`` ask for.

    Args:
        options: The options.
        block_size: The trace's own block size, used when the options name none. [tokens]

    Raises:
        ConfigError: A value is outside what is allowed, or contradicts the workload.
    """
    _check_model(options)
    num_swap = options.num_swap_blocks
    if num_swap is None:
        num_swap = round(options.num_blocks * options.swap_ratio)
        if num_swap > MAX_BLOCKS:
            value = f"{options.swap_ratio:g} of {options.num_blocks} blocks"
            raise ConfigError("--swap-ratio", value, f"at most {MAX_BLOCKS} blocks in the host pool")
    return EngineConfig(
        num_blocks=options.num_blocks,
        block_size=_first(options.block_size, block_size, DEFAULT_BLOCK_SIZE),
        geometry=options.geometry or (MODEL if options.has_model else DEFAULT_GEOMETRY),
        device=options.device,
        num_swap_blocks=num_swap,
        slab_blocks=options.slab_blocks,
        policy=options.policy,
        prefill_tokens=options.prefill_tokens,
        preempt=options.preempt,
        eviction=options.eviction,
        prefix_cache=options.prefix_cache,
        reuse_distances=options.reuse_distances,
        watermark_ratio=options.watermark_ratio,
        compact=options.compact,
        compact_threshold_ratio=options.compact_threshold_ratio,
        compact_budget=options.compact_budget,
        copy_gb_per_s=options.copy_gb_per_s,
        executor=options.executor,
        max_running=options.max_running,
        serial=options.serial,
        stamp=options.stamp,
        verify=options.verify,
        seed=options.seed,
        inject=options.inject,
    )


def _check_model(options: EngineOptions) -> None:
    """Raise ``ConfigError`` where an option does not go with a model, or needs one."""
    if options.has_model:
        if options.geometry not in (None, MODEL):
            raise ConfigError("--geometry", options.geometry, f"with --workload {MODEL} only {MODEL}, its own shape")
        if options.stamp:
            raise ConfigError(
                "--stamp", f"with --workload {MODEL}", "its slots hold keys and values; --verify checks them"
            )
    elif options.verify:
        driver = f"--workload {options.load_name}" if options.trace is None else f"--trace {options.trace}"
        raise ConfigError("--verify", f"with {driver}", f"only with --workload {MODEL}, the one that computes")


def check_options(options: EngineOptions) -> None:
    """Raise what ``build_engine`` would raise for these options, as far as that takes no time to find out.

    Raises:
        ConfigError: A value is outside what is allowed.
        UserError: No such workload or file, or the pools do not fit in memory.
    """
    config = build_config(options)
    if options.trace is None:
        _synthetic(config, options)
        check_memory(config, available_memory())
    else:
        _require_file(options.trace)


def build_engine(
    options: EngineOptions,
    *,
    requests: Iterable[Request] | None = None,
    make_request: Callable[[int, int, int], Request] | None = None,
) -> tuple[Engine, tuple[str, ...]]:
    """Return a new engine and what its user should know about it, one line each.

    Args:
        options: The options.
        requests: What it serves, in order of arrival; ``None`` takes what the options say.
        make_request: Makes what is submitted by hand, as in ``Engine``; ``None`` takes the workload's own.

    Cost: reads the trace, allocates the pools, and loads torch unless the geometry is ``none``.

    Raises:
        ConfigError: A value is outside what is allowed.
        UserError: The trace cannot be used, or the pools do not fit in memory.
    """
    build_config(options)  # a wrong option is said before a trace is read
    load: Load | None = None
    notes: tuple[str, ...] = ()
    name = options.load_name
    if requests is not None:
        config, name = build_config(options), SCRIPTED
    elif options.trace is None:
        config = build_config(options)
        load = _synthetic(config, options)
    else:
        config, requests, notes = _trace(options, options.trace)
    check_memory(config, available_memory())
    from allocator.engine import Engine
    from kvtop.workloads import chat, model

    engine = Engine(
        config,
        requests or (),
        workload=name,
        make_request=make_request or (model.make_request if options.has_model else chat.make_request),
        load=load,
        make_compute=_make_compute(options) if options.has_model else None,
    )
    return engine, notes + swap_notes(config) + idle_notes(config)


def _make_compute(options: EngineOptions) -> Callable[[BlockManager, Storage], Compute]:
    from kvtop.workloads.transformer import ModelCompute

    return lambda manager, storage: ModelCompute(manager, storage, seed=options.seed, verify=options.verify)


def _require_file(trace: str) -> None:
    if not os.path.exists(trace):  # unlike Path's, false too for a name that no file can have
        raise UserError(f"--trace {trace}: no such file")


def _synthetic(config: EngineConfig, options: EngineOptions) -> Load:
    from kvtop.workloads.load import Load, parse_workloads
    from kvtop.workloads.load_file import read_load

    path = options.workload_file
    components = parse_workloads(options.workload) if path is None else read_load(path)
    if not options.has_model and any(component.workload.name == MODEL for component in components):
        where = f"--workload {options.workload}" if path is None else f"--workload-file {path}"
        raise UserError(f"{where}: {MODEL} only by itself, as --workload {MODEL}: it computes what the pool holds")
    return Load(
        components,
        config.seed,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        rate_scale=options.rate_scale,
        size_scale=options.size_scale,
        num_requests=options.num_requests,
    )


def _trace(options: EngineOptions, path: str) -> tuple[EngineConfig, Iterable[Request], tuple[str, ...]]:
    from kvtop.workloads.trace import open_trace

    _require_file(path)
    trace = open_trace(Path(path), options.trace_format, block_size=options.block_size, skip_bad=options.skip_bad)
    config = build_config(options, trace.block_size)
    requests = trace.file_order if config.serial else trace.requests
    return config, requests, tuple(trace.notes)


def swap_notes(config: EngineConfig) -> tuple[str, ...]:
    """Return a warning when preemption by swap has too little room; empty when it has enough."""
    if config.preempt != "swap" or config.serial or config.num_swap_blocks >= MIN_SWAP_RATIO * config.num_blocks:
        return ()
    if config.num_swap_blocks == 0:
        return ("--preempt swap with 0 swap blocks: preempted sequences are recomputed instead (--swap-blocks N)",)
    return (
        f"swap space of {config.num_swap_blocks} blocks is below {MIN_SWAP_RATIO:.0%} of the device pool "
        f"({config.num_blocks}): preempted sequences that do not fit are recomputed",
    )


def idle_notes(config: EngineConfig) -> tuple[str, ...]:
    """Return one line for each setting that another one makes meaningless."""
    usual, notes = EngineConfig(), []
    if config.eviction != usual.eviction and not config.prefix_cache:
        notes.append(f"--eviction {config.eviction} has no effect: with --no-prefix-cache there is nothing to evict")
    if config.max_running != usual.max_running and config.serial:
        notes.append(f"--max-running {config.max_running} has no effect: with --serial one sequence runs at a time")
    if config.compact_threshold_ratio != usual.compact_threshold_ratio and config.compact != "auto":
        notes.append(
            f"--compact-threshold {config.compact_threshold_ratio:g} has no effect yet: "
            f"--compact {config.compact} does not compact by itself"
        )
    if config.device.startswith("cuda") and config.geometry == "none":
        notes.append(f"--device {config.device} has no effect: --geometry none keeps no tensors")
    return tuple(notes)


def check_memory(config: EngineConfig, available_bytes: int | None, has_gpu: Callable[[], bool] | None = None) -> None:
    """Raise unless the pools fit in this machine's memory.

    The device pool counts only where it lies in main memory; a GPU refuses by itself what it cannot hold.

    Raises:
        UserError: They do not fit; says how much is needed and there.
    """
    if available_bytes is None:
        return
    geometry = find_geometry(config.geometry)
    block_bytes = geometry.block_bytes(config.block_size) if geometry else 0
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and (has_gpu or _has_gpu)())
    device_bytes = 0 if on_gpu else config.num_blocks * block_bytes
    host_bytes = config.num_swap_blocks * block_bytes
    book_bytes = (config.num_blocks + config.num_swap_blocks) * BOOK_BYTES
    if device_bytes + host_bytes + book_bytes > available_bytes:
        raise UserError(
            f"--blocks {config.num_blocks}: {_gib(device_bytes)} for the pool, {_gib(host_bytes)} for swap space "
            f"({block_bytes:,} bytes a block) and {_gib(book_bytes)} for the books do not fit in the "
            f"{_gib(available_bytes)} of memory available; fewer blocks, a smaller --geometry, or --geometry none"
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes this process could still take, ``None`` where the system does not say.

    The lesser of what the machine has and what the control group allows.
    """
    found = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((root / "sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or no control group: what was found so far is what can be known
    return max(0, min(found)) if found else None


def _has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
