"""One onlooker of ``kvtop bench overhead``: watches a published engine as a console does, when it is told to."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from kvtop.targets import open_target


def main(arguments: Sequence[str]) -> int:
    """Watch ``local:NAME`` at ``RATE_HZ``, for as many seconds as each line of standard input says; tell how often.

    Args:
        arguments: ``NAME RATE_HZ``.
    """
    name, rate_hz = arguments[0], float(arguments[1])
    attachment = open_target(f"local:{name}")
    print("ready", flush=True)
    for line in sys.stdin:
        due_s, seen = time.perf_counter(), 0
        end_s = due_s + float(line)
        # As a console: the next reading is due a while after the last one, or at once when that took longer.
        while (due_s := max(due_s + 1 / rate_hz, time.perf_counter())) < end_s:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            view = attachment.poll()
            if view.error is not None:
                print(f"lost: {view.error}", flush=True)
                return 1
            seen += 1
        print(seen, flush=True)
    attachment.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
