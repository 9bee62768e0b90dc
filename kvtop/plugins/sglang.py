"""The SGLang plugin: entry point ``sglang.srt.plugins``. Publishes a scheduler's page pool if asked to.

SGLang calls ``register`` once in each of its processes. Unless ``KVTOP_PUBLISH`` is set that does nothing. If it is, a
hook after the scheduler's construction is registered with SGLang, which only scheduler processes act on. The first
tensor-parallel rank publishes; all have the same pages. A release that was not tried is left as it is.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any, Final

from kvtop.plugins.hooks import Careful, Hooks, asked_name, release

_DEFAULT_NAME: Final = "sglang"
_SCHEDULER: Final = "sglang.srt.managers.scheduler"
#: What changes the pool, and where it may be read: before the next batch is made, all results of the last are in.
_CHANGES: Final[dict[str, dict[str, Any]]] = {
    "get_next_batch_to_run": {"read": "before"},
    "process_batch_result": {"is_step": True},
    "process_input_requests": {},
    "flush_cache": {},
}
_careful = Careful(logging.getLogger("sglang.kvtop"))


def register() -> None:
    """Do what the environment asks for. Never raises."""
    if asked_name(_DEFAULT_NAME) is not None:
        _careful.safely(_hook)()


def _hook() -> None:
    """Register the hook, if the release is one that was tried."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvtop.plugins.sglang_pool import SUPPORTED

    version = str(getattr(sys.modules.get("sglang"), "__version__", "of unknown release"))
    number, (first, last) = release(version, 3), SUPPORTED
    if number is None or not first <= number <= last:
        names = " to ".join(".".join(map(str, end)) for end in SUPPORTED)
        _careful.decline(f"SGLang {version} is none of the releases {names} that it was tried with")
        return
    publish = _careful.safely(lambda scheduler: _publish(scheduler, version))

    def constructed(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        publish(scheduler)

    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", constructed, HookType.AFTER)


def _publish(scheduler: Any, version: str) -> None:
    """Publish a scheduler's pool until the scheduler is gone."""
    if _rank("tp_rank") or _rank("pp_rank"):
        return
    from kvtop.plugins.publisher import PoolPublisher
    from kvtop.plugins.sglang_pool import SglangPool
    from kvtop.plugins.step_gate import StepGate

    pool = SglangPool(scheduler, version, lambda: gate.steps)
    gate: StepGate[Any] = StepGate(pool.collect, pool.is_idle, by_engine_only=True)
    hooks = Hooks()
    name, rank = asked_name(_DEFAULT_NAME) or _DEFAULT_NAME, _rank("dp_rank")
    name = name if rank is None or (_rank("dp_size") or 1) < 2 else f"{name}-dp{rank}"
    publisher = PoolPublisher(name, pool, gate, log=_careful.log.warning, on_failure=hooks.remove)
    try:
        for method, how in _CHANGES.items():
            hooks.put(scheduler, method, partial(gate.guard, **how))
    except BaseException:
        hooks.remove()
        publisher.close()
        raise
    _careful.close_with(scheduler, publisher.close)
    _careful.log.info("kvtop: page pool published; kvtop attach local:%s", publisher.name)


def _rank(name: str) -> int | None:
    """Return one of the process's ranks or their number; ``None`` where SGLang does not tell."""
    try:
        value = getattr(sys.modules[_SCHEDULER].get_parallel(), name)
    except Exception:
        return None
    return value if isinstance(value, int) else None
