"""What runs on this machine that can be attached to: published engines, and servers on ports that engines take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvtop.errors import SourceError, UserError
from kvtop.local_socket import listeners
from kvtop.sources.remote.fetch import Fetcher, FetchError, Remote
from kvtop.sources.remote.probe import Probe

#: Ports of this machine that are looked at: vLLM, SGLang, llama.cpp and TGI, Triton, and where kvtop's exporter is
#: put in our own examples.
PORTS: Final = (8000, 30000, 8080, 3000, 8002, 9400)
_ANSWER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """Something to attach to.

    Attributes:
        target: As ``kvtop attach`` takes it.
        kind: What it is.
    """

    target: str
    kind: str


def discover(ports: Iterable[int] = PORTS) -> tuple[Found, ...]:
    """Return what can be attached to here: published engines first, then servers in the order of ``ports``."""
    local = [Found(f"local:{engine.name}", "kvtop") for engine in listeners()]
    wanted = tuple(ports)
    if not wanted:
        return tuple(local)
    with ThreadPoolExecutor(max_workers=len(wanted), thread_name_prefix="kvtop-look") as pool:
        return (*local, *(found for found in pool.map(_look_at, wanted) if found is not None))


def choose(found: Sequence[Found], ask: Callable[[str], str] | None) -> str:
    """Return the target to attach to.

    Args:
        found: What there is.
        ask: Asks the user and returns what was typed; ``None`` where nobody can be asked.

    Raises:
        SourceError: There is nothing.
        UserError: There are several and nobody to ask, or the answer is none of them.
    """
    if not found:
        ports = ", ".join(map(str, PORTS))
        raise SourceError(
            f"nothing to attach to: no engine is published on this machine, and none answers on its ports {ports}; "
            "kvtop attach http://HOST:PORT"
        )
    if len(found) == 1:
        return found[0].target
    if ask is None:
        raise UserError(f"several engines run here: {', '.join(f.target for f in found)}; name one")
    lines = [f"{i}  {f.target}  {f.kind}" for i, f in enumerate(found, 1)]
    text = ask("\n".join([*lines, f"which one (1 to {len(found)})? "])).strip()
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= len(found)):
        raise UserError(f"{text or 'nothing'}: a number from 1 to {len(found)}")
    return found[int(text) - 1].target


def _look_at(port: int) -> Found | None:
    url = f"http://127.0.0.1:{port}"
    fetcher = Fetcher(Remote(url), answer_s=_ANSWER_S)
    try:
        facts = Probe(fetcher, url).read()
    except FetchError:
        return None
    finally:
        fetcher.close()
    return Found(url, f"{facts.kind} {facts.version}" if facts.version else facts.kind)
