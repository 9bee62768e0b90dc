"""The synthetic workloads by name. Add one by adding its line to ``WORKLOADS``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from allocator.content import Request
from kvtop.errors import UserError
from kvtop.workloads.chat import chat_requests


class WorkloadFactory(Protocol):
    """Makes a workload's requests for a pool: lazily, in order of arrival, the same for the same arguments."""

    def __call__(self, seed: int, *, block_size: int, num_blocks: int) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """One synthetic workload: its name on the command line, one line of help, and its requests."""

    name: str
    help: str
    requests: WorkloadFactory


def _no_requests(seed: int, *, block_size: int, num_blocks: int) -> Iterator[Request]:
    return iter(())


_ALL: Final = (
    Workload("chat", "conversations in turns over a few shared system prompts, without end", chat_requests),
    Workload("attached", "nothing by itself: programs that attach are all the load (needs --publish)", _no_requests),
)
WORKLOADS: Final = {workload.name: workload for workload in _ALL}


def find_workload(name: str) -> Workload:
    """Return the workload called ``name``.

    Raises:
        UserError: No such workload.
    """
    try:
        return WORKLOADS[name]
    except KeyError:
        raise UserError(f"--workload {name}: one of {', '.join(WORKLOADS)}") from None
