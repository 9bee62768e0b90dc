"""LocalSource and LocalOperations: an engine in another process on this machine, arrays through its block map."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from allocator.block_map import BlockMapError, BlockMapReader, Publication
from allocator.commands import Abort, command_name
from allocator.plans import Outcome, Plan
from allocator.snapshot import told
from kvtop.errors import SourceError
from kvtop.model.observation import Focus, Observation
from kvtop.operations import NOT_OFFERED
from kvtop.server import table_from_bytes
from kvtop.serving_commands import AnyCommand, ServingCommand
from kvtop.wire import Client, Observed, WireError, WireTimeout

NO_HOST_TIER: Final = "this engine has no host tier; --swap-blocks gives it one"


class EngineLink(Protocol):
    """A way to an engine on this machine; ``kvtop.engine_process.EngineProcess`` is one.

    Attributes:
        map_fd: Descriptor of its block map.
        observing, commanding: Connections for observations and for commands.
    """

    observing: Client

    @property
    def commanding(self) -> Client: ...

    @property
    def map_fd(self) -> int: ...

    def loss(self) -> str | None:
        """Return why the engine is gone, or ``None`` while it lives."""

    def close(self) -> None:
        """Let go of the engine; ends it if this link started it. Safe to call twice."""


class LocalSource:
    """Reads an engine through its socket and its block map. ``close`` closes the link.

    Args:
        link: The way to the engine.
        name: The target's name.
        missing: Capabilities that are not offered whatever the engine has, with the reason.
        renew: Makes the link lead to another engine in the place of one that is gone; returns whether it does.
    """

    def __init__(
        self,
        link: EngineLink,
        name: str = "embedded",
        missing: Mapping[str, str] | None = None,
        renew: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self._renew = renew
        self._notes: tuple[str, ...] = ()
        self._never: Mapping[str, str] = missing or {}
        self.missing: Mapping[str, str] = self._never
        self._link = link
        self._map: BlockMapReader | None = None
        self._last: Publication | None = None
        self._map_lock = threading.Lock()

    def read(self, focus: Focus, timeout_s: float) -> Observation:
        """Return the newest observation; snapshot and arrays are of one step unless others' readings overtook it.

        Raises:
            SourceError: The engine is starting, failed, is gone, or did not answer in ``timeout_s``.
        """
        try:
            seen = self._observe(focus, timeout_s)
        except WireTimeout as error:
            raise SourceError(f"{error}{self._last_sign()}") from None
        except WireError as error:
            raise SourceError(self._link.loss() or str(error)) from None
        blocks = self._blocks(seen.snapshot.step)
        self.missing = self._never if blocks.host is not None else {"host-tier": NO_HOST_TIER, **self._never}
        table = table_from_bytes(seen.focus_table)
        snapshot = told(seen.snapshot)
        if self._notes:
            snapshot = msgspec.structs.replace(snapshot, notes=(*snapshot.notes, *self._notes))
        return Observation(
            snapshot, blocks.device, blocks.host, table, seen.focus_block, seen.next_victims, seen.lineage
        )

    def close(self) -> None:
        """Let go of the engine; ends it if this console started it. Safe to call twice."""
        self._link.close()
        with self._map_lock:
            if self._map is not None:
                self._map.close()
                self._map = self._last = None

    def _observe(self, focus: Focus, timeout_s: float) -> Observed:
        """Ask the engine, or the one that has taken its place."""
        try:
            return self._link.observing.observe(focus, timeout_s)
        except WireTimeout:
            raise
        except WireError:
            if not self._renew():
                raise
        with self._map_lock:
            if self._map is not None:
                self._map.close()
            self._map = self._last = None
        self._notes = ("the engine was started anew; attached again",)
        return self._link.observing.observe(focus, timeout_s)

    def _blocks(self, step: int) -> Publication:
        with self._map_lock:
            try:
                if self._map is None:
                    self._map = BlockMapReader(self._link.map_fd)
                # An engine that stands still publishes nothing: what was copied out last is still the newest.
                if self._last is None or self._last.version != self._map.version:
                    self._last = self._map.read(step)
                return self._last
            except (BlockMapError, OSError) as error:
                raise SourceError(self._link.loss() or str(error)) from None

    def _last_sign(self) -> str:
        with self._map_lock:
            if self._map is None:
                return "; the engine is still starting"
            return f"; the engine's last sign of life is {self._map.heartbeat_age_s():.1f} s old"


class LocalOperations:
    """The door to an engine that takes commands, over a connection of its own."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def plan(self, command: AnyCommand, timeout_s: float = 5.0) -> Plan:
        """Return what ``command`` would do; see ``Operations``."""
        if isinstance(command, ServingCommand):
            return Plan(command_name(command), refusal=NOT_OFFERED)
        try:
            return self._link.commanding.plan(command, timeout_s)
        except WireError as error:
            raise SourceError(self._link.loss() or str(error)) from None

    def apply(self, command: AnyCommand, timeout_s: float = 60.0) -> Outcome:
        """Do ``command`` at the next step boundary; see ``Operations``."""
        if isinstance(command, ServingCommand):
            return Outcome(ok=False, message=NOT_OFFERED)
        try:
            # While a command is in progress its connection waits for the outcome: what ends it goes another way.
            way = self._link.observing if isinstance(command, Abort) else self._link.commanding
            return way.apply(command, timeout_s)
        except WireError as error:
            raise SourceError(self._link.loss() or str(error)) from None
