"""The closed set of faults that can be injected on purpose, and what each must lead to. Pure data.

Most must be *survived*: every law holds, the operation says that it failed, and every request still ends. Two break
the state itself, and must be *caught*: a check that lets one pass proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

FaultKind = Literal[
    "failing-copy",
    "slow-copy",
    "stuck-executor",
    "lost-client",
    "host-tier-full",
    "flipped-bit",
    "leaked-reference",
]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
#: Fault kinds with the probability that each strikes at a step, or at a copy.
FaultRates: TypeAlias = tuple[tuple[FaultKind, float], ...]

DEFAULT_RATE: Final = 0.01
MAX_COUNT: Final = 1_000_000
MAX_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What one kind of fault does.

    Attributes:
        effect: What happens, in a few words.
        unit: What is counted: so many copies, steps, clients, bits or references.
        count: How many when nothing is said.
        seconds: Real seconds that it takes when nothing is said; 0 where time plays no part. [s]
        caught_by: Law that the check must find broken; ``None`` where the fault must be survived.
    """

    effect: str
    unit: str
    count: int = 1
    seconds: float = 0.0
    caught_by: int | None = None

    @property
    def strikes_copies(self) -> bool:
        """Whether it strikes copies, rather than the engine between two steps."""
        return self.unit == "copy"


FAULTS: Final[dict[FaultKind, Fault]] = {
    "failing-copy": Fault("a copy fails in the middle: some of its blocks are copied", "copy"),
    "slow-copy": Fault("a copy takes longer", "copy", seconds=0.02),
    "stuck-executor": Fault("a copy does not come back, and is given up", "copy", seconds=0.5),
    "lost-client": Fault("a client goes away, and its sequences are released", "client"),
    "host-tier-full": Fault("the host tier takes no more blocks", "step", count=40),
    "flipped-bit": Fault("a bit of a held block flips", "bit", caught_by=5),
    "leaked-reference": Fault("a held block counts one holder too many", "reference", caught_by=2),
}


def parse_rate(text: str) -> tuple[FaultKind, float]:
    """Return the fault and its probability that ``KIND`` or ``KIND:RATE`` names.

    Raises:
        ValueError: No such kind, or the rate is not above 0 and at most 1.
    """
    name, colon, rate_text = text.partition(":")
    kind = next((kind for kind in FAULT_KINDS if kind == name), None)
    rate = float(rate_text) if colon else DEFAULT_RATE
    if kind is None or not is_rate(rate):
        raise ValueError(text)
    return kind, rate


def is_rate(rate: float) -> bool:
    """Return whether a fault can strike with this probability: above 0, at most 1."""
    return math.isfinite(rate) and 0 < rate <= 1
