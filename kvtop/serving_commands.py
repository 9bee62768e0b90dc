"""Serving commands: the closed set of what may be asked of an inference server that is not ours. Frozen; no behaviour.

What they mean is the same for every engine that has them; which engine has which is told by
``RemoteFacts.capabilities``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from allocator.commands import Command

#: What becomes of requests that are being served: they end with an error, are finished first, stand still with what
#: they hold, or are put back into the queue without it.
PauseMode = Literal["keep", "wait", "abort", "retract"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]

#: A name that no path can be made of.
FileName = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_-][0-9A-Za-z._-]{0,99}$")]
SlotId = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Serving(msgspec.Struct, frozen=True, tag=True):
    """Base of all of them: frozen, comparable, and tagged by class name like the engine's own commands."""


class ResetPrefixCache(_Serving, frozen=True, tag=True):
    """Drop everything that is cached for reuse.

    Attributes:
        running: Take running requests off their blocks for it; they are computed again.
    """

    running: bool = False


class Sleep(_Serving, frozen=True, tag=True):
    """Put the engine to sleep.

    Attributes:
        level: 0 only stops scheduling; 1 drops the cache and moves the weights to the host; 2 drops both.
        mode: What becomes of requests that are being served.
    """

    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    mode: Literal["wait", "keep", "abort"] = "wait"


class Wake(_Serving, frozen=True, tag=True):
    """Wake the engine: all of it, or only what ``tags`` name."""

    tags: tuple[WakeTag, ...] = ()


class PauseGeneration(_Serving, frozen=True, tag=True):
    """Stop serving requests until ``ContinueGeneration``."""

    mode: PauseMode = "keep"


class ContinueGeneration(_Serving, frozen=True, tag=True):
    """Go on after ``PauseGeneration``."""


class ReleaseMemory(_Serving, frozen=True, tag=True):
    """Give device memory back, with what is in it, until ``ResumeMemory``."""

    tags: tuple[MemoryTag, ...] = ("kv_cache",)


class ResumeMemory(_Serving, frozen=True, tag=True):
    """Take the memory again that ``ReleaseMemory`` gave back."""

    tags: tuple[MemoryTag, ...] = ("kv_cache",)


class EraseSlot(_Serving, frozen=True, tag=True):
    """Drop what one slot holds."""

    slot_id: SlotId


class SaveSlot(_Serving, frozen=True, tag=True):
    """Write what one slot holds to a file in the server's folder for that."""

    slot_id: SlotId
    filename: FileName


class RestoreSlot(_Serving, frozen=True, tag=True):
    """Fill one slot from a file in the server's folder for that; what it holds is dropped."""

    slot_id: SlotId
    filename: FileName


class SetMemoryLimit(_Serving, frozen=True, tag=True):
    """Let a pool hold this much memory at most, in MiB."""

    limit_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


ServingCommand: TypeAlias = (
    ResetPrefixCache
    | Sleep
    | Wake
    | PauseGeneration
    | ContinueGeneration
    | ReleaseMemory
    | ResumeMemory
    | EraseSlot
    | SaveSlot
    | RestoreSlot
    | SetMemoryLimit
)

#: Whatever goes through the one door.
AnyCommand: TypeAlias = Command | ServingCommand
