"""Every panel by name: the one list that keys, tabs, ``:panel`` and exports are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from kvtop.model.view import View
from kvtop.panels.alerts import alerts
from kvtop.panels.audit import audit
from kvtop.panels.cache import prefix
from kvtop.panels.content import Asked, Section
from kvtop.panels.engine import locks, tiers
from kvtop.panels.gpu import gpu
from kvtop.panels.sequence import block, details, history
from kvtop.panels.shape import fragmentation

Content: TypeAlias = Callable[[View, Asked], tuple[Section, ...]]

#: Name → content of the panels that are made of sections; the map, the sequences and the events are drawn otherwise.
CONTENTS: Final[Mapping[str, Content]] = {
    "prefix": prefix,
    "fragmentation": fragmentation,
    "tiers": tiers,
    "locks": locks,
    "history": history,
    "audit": audit,
    "details": details,
    "block": block,
    "gpu": gpu,
    "alerts": alerts,
}
