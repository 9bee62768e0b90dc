"""The command line: options, exit codes, and one clear line for whatever is wrong. Everything heavy is imported late.

Every failure ends here: a ``KvtopError`` carries its exit code, the allocator's errors map to
"wrong request" or "failed", and click's own messages are rewritten to the same one-line form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from allocator.errors import AllocatorError, ConfigError
from kvtop.cli.options import Messages
from kvtop.cli.root import cli
from kvtop.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, KvtopError
from kvtop.log import Log

__all__ = ["cli", "main", "run"]


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every failure is one line on stderr."""
    messages = Messages()

    def fail(text: str, code: int) -> int:
        Log(messages.form).error(" ".join(text.split()))
        return code

    try:
        result = cli.main(args=args, prog_name="kvtop", standalone_mode=False, obj=messages)
    except click.Abort:
        return fail("interrupted", EXIT_INTERRUPTED)
    except KvtopError as error:
        return fail(str(error), error.exit_code)
    except click.ClickException as error:
        return fail(_one_line(error), EXIT_USAGE)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    except AllocatorError as error:
        return fail(str(error), EXIT_FAILED)
    except MemoryError:
        return fail("out of memory: fewer --blocks, a smaller --geometry, or --geometry none", EXIT_FAILED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _one_line(error: click.ClickException) -> str:
    """Return click's complaint in our form: what, then what is allowed."""
    match error:
        case click.NoSuchOption(option_name=name, possibilities=near):
            alike = [option for option in near or () if option[:4] == name[:4]]
            hint = f"did you mean {' or '.join(sorted(alike))}?" if alike else "--help lists them"
            return f"{name}: no such option; {hint}"
        case click.BadOptionUsage(option_name=name):
            return f"{name}: {'takes no value' if 'not take' in error.message else 'needs a value'}"
        case _:
            text = " ".join(error.format_message().split()).rstrip(".")
            return f"{text[:1].lower()}{text[1:]}; --help says what is allowed"


def main() -> NoReturn:
    """Entry point of the scripts ``kvtop`` and ``kvtop-console``."""
    sys.exit(run())
