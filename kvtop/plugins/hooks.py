"""What plugins share inside another engine: the name asked for, wrapped methods, and calls that cannot do harm.

Imports nothing but the standard library: it is loaded in every process of the engine.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

VARIABLE: Final = "KVTOP_PUBLISH"
_OFF: Final = ("", "0", "false", "no", "off")
_ON: Final = ("1", "true", "yes", "on")


def asked_name(default: str) -> str | None:
    """Return the name to publish by, ``default`` where only on or off was said; ``None`` when not asked to publish."""
    value = os.environ.get(VARIABLE, "").strip()
    if value.lower() in _OFF:
        return None
    return default if value.lower() in _ON else value


def release(version: str, parts: int) -> tuple[int, ...] | None:
    """Return the first numbers of a release; ``None`` where there are no such numbers."""
    numbers = version.partition("+")[0].split(".")[:parts]
    if len(numbers) < parts or not all(number.isdigit() for number in numbers):
        return None
    return tuple(map(int, numbers))


class Hooks:
    """Methods that were wrapped on objects; ``remove`` puts their classes' own back. Refers to the objects weakly."""

    def __init__(self) -> None:
        self._put: list[tuple[weakref.ref[Any], str]] = []

    def put(self, target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Wrap one method of one object; return whether it has such a method."""
        method = getattr(target, name, None)
        if not callable(method):
            return False
        setattr(target, name, wrap(method))
        self._put.append((weakref.ref(target), name))
        return True

    def remove(self) -> None:
        """Put all methods back. Safe to call twice."""
        for reference, name in self._put:
            target = reference()
            if target is not None:
                vars(target).pop(name, None)
        self._put.clear()


class Careful:
    """Does things inside another engine so that nothing that goes wrong in them reaches it.

    Args:
        log: Told in one line what went wrong.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log

    def safely(self, act: Callable[..., None]) -> Callable[..., None]:
        """Return ``act`` so that it never raises; it is not done again once it failed."""
        is_over = False

        def acting(*args: Any) -> None:
            nonlocal is_over
            if not is_over:
                try:
                    act(*args)
                except Exception as error:
                    is_over = True
                    self.decline(error)

        return acting

    def decline(self, reason: object) -> None:
        """Say why nothing is published."""
        text = str(reason) or type(reason).__name__
        self.log.warning("kvtop: the block pool is not published: %s", text)

    def close_with(self, owner: Any, close: Callable[[], None]) -> None:
        """Have ``close`` called when nobody refers to ``owner`` any more."""
        weakref.finalize(owner, _close_apart, self.safely(close)).atexit = False


def after(method: Callable[..., Any], act: Callable[[Any], None]) -> Callable[..., Any]:
    """Return ``method`` followed by ``act``, which is given its result and must not raise."""

    @wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        act(result)
        return result

    return followed


def _close_apart(close: Callable[[], None]) -> None:
    """Close in a thread of its own: a finaliser may run in the middle of anything."""
    threading.Thread(target=close, name="kvtop-close", daemon=True).start()
