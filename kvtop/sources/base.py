"""Source: what every kind of engine looks like to the console. Protocol and capabilities only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from kvtop.model.observation import Focus, Observation, RemoteObservation
from kvtop.model.what_if import WhatIf


@runtime_checkable
class Estimates(Protocol):
    """A source that can estimate what other caches would have made of its engine's traffic."""

    def what_if(self) -> WhatIf | None:
        """Return the newest estimates, ``None`` before the first; asking has newer ones made."""


class Source(Protocol):
    """Gives observations of one engine.

    Attributes:
        name: The target's name, the ``source`` label of metrics.
        missing: capability → why this source does not offer it; empty when all is offered. Capabilities are
            ``block-map``, ``sequences``, ``events``, ``host-tier`` and ``operations``.
    """

    name: str

    @property
    def missing(self) -> Mapping[str, str]: ...

    def read(self, focus: Focus, timeout_s: float) -> Observation | RemoteObservation:
        """Return the newest observation.

        Raises:
            SourceError: The far end failed, is gone, or did not answer in ``timeout_s``.
        """

    def close(self) -> None:
        """Let go of the far end; ends what this source started. Safe to call twice."""
