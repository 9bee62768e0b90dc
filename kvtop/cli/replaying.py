"""``kvtop replay``: recordings, looked at, marked, cut, drawn, compared and run again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from kvtop.cli.asked import console_options, metrics_address
from kvtop.cli.file import Command, with_look
from kvtop.cli.options import CONFIG_OPTION, LOG_OPTION, LOOK_OPTIONS, with_options
from kvtop.cli.values import SPEED, STEPS, WORD, one_of, whole
from kvtop.errors import UserError

#: What can be done with a recording, one at a time: option → parameter.
_WAYS: Final = {
    "--report": "as_text",
    "--export": "form",
    "--cut": "piece",
    "--mark": "mark",
    "--marks": "is_marks",
    "--diff": "is_diff",
    "--verify": "is_verify",
    "--headless": "headless",
    "--plain": "plain",
}
#: Options that only go with some of these: option → (parameter, those).
_ONLY_WITH: Final = {
    "--steps": ("span", ("--export",)),
    "--frames": ("frames", ("--export",)),
    "--out": ("out", ("--export", "--cut")),
    "--once": ("once", ("--plain",)),
}


@click.command("replay", cls=Command)
@click.argument("files", metavar="FILE", nargs=-1, required=True)
@click.option("--at", type=whole(0, 2**63 - 1), metavar="STEP", help="Begin there, or take that step (the last one).")
@click.option("--speed", type=SPEED, metavar="X|max", default="1", help="Virtual seconds a real second (1).")
@click.option("--report", "as_text", is_flag=True, help="Print the report as of a step instead of the screen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen.")
@click.option("--plain", is_flag=True, help="Print lines of text instead of the screen, as it plays.")
@click.option("--once", is_flag=True, help="With --plain: print one reading and end.")
@click.option(
    "--export",
    "form",
    type=one_of("svg", "png", "gif", "html"),
    help="Write a picture of a step (svg, png), a moving one (gif; svg with --steps), or a report of the run (html).",
)
@click.option("--steps", "span", type=STEPS, metavar="FROM..TO", help="With --export: only this part of the run.")
@click.option("--frames", type=whole(2, 1000), metavar="N", help="With --export: pictures in a moving one (60).")
@click.option(
    "--cut", "piece", type=STEPS, metavar="FROM..TO", help="Write this part as a recording of its own (--out)."
)
@click.option("--out", type=WORD, metavar="FILE", help="Where --export and --cut write, a new file.")
@click.option("--mark", metavar="TEXT", help="Set a mark at a step (--at); the recording itself stays as it is.")
@click.option("--marks", "is_marks", is_flag=True, help="List the marks.")
@click.option("--diff", "is_diff", is_flag=True, help="Print the first step at which two recordings differ.")
@click.option("--verify", "is_verify", is_flag=True, help="Run it again, and compare moment for moment.")
@click.option("--headless", is_flag=True, help="No screen: serve its metrics as it plays (--metrics-port).")
@click.option("--metrics-port", type=whole(0, 65535), help="Where to serve them; 0 takes a free port.")
@click.option("--metrics-host", metavar="H", help="Address to serve them on (127.0.0.1).")
@LOG_OPTION
@with_options(LOOK_OPTIONS)
@CONFIG_OPTION
@click.pass_context
def replay_command(ctx: click.Context, /, files: tuple[str, ...], as_json: bool, **params: Any) -> int:
    """Open a recording in the console, to be played, stopped and wound back.

    space stops and goes on, [ and ] go a second back and on, comma and full stop a moment; n and b go to the next and
    the last preemption, eviction, fault, command or mark, of the kind that i chooses; M sets a mark, ' lists them.

    Exit code 1: --diff or --verify found a difference.
    """
    way = _way(params)
    if len(files) != (2 if way == "--diff" else 1):
        raise UserError(f"FILE: {len(files)} given; --diff takes two, everything else one")
    address = metrics_address(
        {**params, "metrics_tls_cert": None, "metrics_tls_key": None, "metrics_auth": None, "compat": None}
    )
    if (way == "--headless") != (address is not None):
        raise UserError("--headless and --metrics-port N: only together")
    from kvtop import replay

    path, at, speed = files[0], params["at"], params["speed"]
    match way:
        case "--diff":
            return replay.diff(path, files[1], as_json=as_json)
        case "--verify":
            return replay.verify(path, as_json=as_json)
        case "--cut":
            if params["out"] is None:
                raise UserError("--cut: --out FILE says where to")
            return replay.cut_out(path, params["piece"], params["out"])
        case "--mark":
            return replay.mark(path, at, params["mark"])
        case "--marks":
            return replay.list_marks(path, as_json=as_json)
        case "--export":
            return replay.export(
                path, at=at, form=params["form"], span=params["span"], frames=params["frames"], out=params["out"]
            )
        case "--headless":
            assert address is not None
            return replay.serve(path, at=at, speed=speed, address=address, log_format=params["log_format"])
        case "--plain":
            return replay.show_plain(path, at=at, speed=speed, once=params["once"], every_s=params["refresh_s"])
    if as_json or way == "--report":
        return replay.tell(path, at=at, as_json=as_json)
    return replay.show(path, console_options(with_look(ctx)), at=at, speed=speed)


def _way(params: Mapping[str, Any]) -> str | None:
    """Return what is to be done with the recording; ``None`` is to look at it.

    Raises:
        UserError: Two things at once, or an option that goes with something else.
    """
    asked = [option for option, name in _WAYS.items() if params[name]]
    if len(asked) > 1:
        raise UserError(f"{asked[0]} and {asked[1]}: one of the two, not both")
    way = asked[0] if asked else None
    for option, (name, ways) in _ONLY_WITH.items():
        if params[name] and way not in ways:
            raise UserError(f"{option}: only together with {' or '.join(ways)}")
    return way
