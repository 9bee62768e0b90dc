"""Make the pictures in ``screenshots/`` from real runs: ``make screenshots``.

Each picture is the real console on a real engine, stepped by hand, so that the same command draws
the same picture. SVG always; PNG too when a Chromium is found.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from allocator import work
from allocator.commands import Annotate, Command, Compact, Step
from kvtop.attachment import Attachment
from kvtop.engine_setup import EngineOptions, build_engine
from kvtop.learn.catalog import find_lesson
from kvtop.learn.progress import Played, Progress
from kvtop.learn.school import School
from kvtop.pictures.moving import to_moving_svg
from kvtop.pictures.page import to_page
from kvtop.pictures.raster import to_gif
from kvtop.recording.reader import Recording
from kvtop.recording.writer import RecordOrder, record_engine
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource
from kvtop.sources.recorded import RecordedOperations, RecordedSource
from kvtop.tui.app import KvtopApp
from kvtop.tui.lesson_app import LessonApp

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
#: Readings before the picture, one virtual second of the clock apart, so that the trends have something to show.
READINGS = 60


@dataclass(frozen=True)
class Shot:
    """One picture: which engine, how far it has run, how large the screen is, which keys were pressed, on which TERM.

    Only ``xterm-256color`` is taken to have all colours. With ``marks``, it is the console on a recording of that run,
    stopped three quarters through, with a mark at each of these steps.
    """

    name: str
    options: EngineOptions
    steps: int
    size: tuple[int, int] = (120, 40)
    keys: tuple[str, ...] = ()
    term: str = "xterm-256color"
    marks: tuple[tuple[int, str], ...] = ()
    #: Seconds of the clock between two readings.
    every_s: float = 1.0
    #: A command that is in progress when the picture is taken.
    under_way: Command | None = None


@dataclass(frozen=True)
class LessonShot:
    """One picture of a lesson, when a learner who answers everything with ``answer`` comes to a step.

    Attributes:
        lesson: Which; ``None`` is the course.
        step: The step's id, its task undone.
        typed: Keys pressed there.
    """

    name: str
    lesson: str | None = None
    step: str = ""
    answer: str = "1"
    typed: tuple[str, ...] = ()
    size: tuple[int, int] = (80, 24)


CHAT = EngineOptions()
TIGHT = EngineOptions(num_blocks=1024, seed=3)
MARKS = ((1200, "nothing is free: evictions go on"), (2000, "few requests"), (3000, "before the rush"))
BEAM = EngineOptions(num_blocks=2048, seed=3, workload="beam")
MOONCAKE = EngineOptions(num_blocks=8192, block_size=512, trace=str(TRACE))
SHOTS = (
    Shot("overview", CHAT, 6000),
    Shot("overview-80x24", CHAT, 6000, (80, 24)),
    Shot("mooncake", MOONCAKE, 24_000, (120, 40)),
    Shot("mooncake-240x70", MOONCAKE, 24_000, (240, 70)),
    Shot("plan-resize", TIGHT, 4000, keys=("R", *"900", "tab", "tab")),
    Shot("plan-compact", TIGHT, 4000, keys=("C",)),
    Shot("selected", TIGHT, 4000, keys=("2", "down", "down", "enter")),
    Shot("map-owner", TIGHT, 4000, keys=("c", "c")),
    Shot("map-age", MOONCAKE, 24_000, keys=("c", "c", "c")),
    Shot("map-contiguity-zoomed", TIGHT, 4000, keys=("c", "c", "c", "c", "c", "z", "z")),
    Shot("map-range-80x24", CHAT, 6000, (80, 24), keys=("down", "v", *["right"] * 30)),
    Shot("panel-sequences", TIGHT, 4000, keys=("2", "s", "s", "s", "e")),
    Shot("panel-prefix", TIGHT, 4000, keys=("4",)),
    Shot("panel-fragmentation", TIGHT, 4000, keys=("5",)),
    Shot("panel-tiers", TIGHT, 4000, keys=("6",)),
    Shot("panel-locks", TIGHT, 4000, keys=("7",)),
    Shot("panel-history", TIGHT, 4000, keys=("8",)),
    Shot("panel-details", TIGHT, 4000, keys=("2", "down", "down", "enter", "d")),
    Shot("sequences-tree", BEAM, 2000, keys=("2", "backslash")),
    Shot("block-history", EngineOptions(num_blocks=512, seed=3), 3000, keys=("semicolon",)),
    Shot("arrange", TIGHT, 4000, keys=("f4", "down", "down", "down")),
    Shot("arranged", TIGHT, 4000, keys=("f4", *["down"] * 3, "u", "down", "b", "s", *["plus"] * 7, "escape")),
    Shot("panel-alerts", TIGHT, 4000, keys=("exclamation_mark",), every_s=15.0),
    Shot("panel-alerts-80x24", TIGHT, 4000, (80, 24), keys=("exclamation_mark",), every_s=15.0),
    Shot("panel-gpu", TIGHT, 4000, keys=("u",)),
    Shot("panel-audit", TIGHT, 4000, keys=("O", "right", "y", "R", *"900", "y", "E", *"40", "y", "C", "y", "9")),
    Shot("undo-resize", TIGHT, 4000, keys=("R", *"900", "y", "U")),
    Shot("progress", TIGHT, 4000, under_way=Compact()),
    Shot("progress-80x24", TIGHT, 4000, (80, 24), under_way=Compact(), keys=("A",)),
    Shot("panel-prefix-80x24", TIGHT, 4000, (80, 24), keys=("4",)),
    Shot("command-line", TIGHT, 4000, keys=("colon", *"com")),
    Shot("light", CHAT, 6000, keys=("t",)),
    Shot("contrast", CHAT, 6000, keys=("t", "t")),
    Shot("colour-blind", CHAT, 6000, keys=("t", "t", "t")),
    Shot("sixteen-colours", CHAT, 6000, term="xterm"),
    Shot("help", CHAT, 6000, keys=("question_mark",)),
    Shot("replay", TIGHT, 4000, marks=MARKS),
    Shot("replay-marks", TIGHT, 4000, keys=('"',), marks=MARKS),
    Shot("replay-marks-80x24", TIGHT, 4000, (80, 24), keys=('"', "up"), marks=MARKS),
    Shot("small-pool", EngineOptions(num_blocks=256, seed=1), 1500),
)


def record(shot: Shot, path: Path) -> None:
    """Record one engine's run, with its marks."""
    engine, _ = build_engine(shot.options)
    recorded = record_engine(engine, shot.options, RecordOrder(str(path), 20))
    try:
        for step, text in (*shot.marks, (shot.steps, "")):
            while recorded.step < step and recorded.advance(step - recorded.step):
                pass
            if text:
                recorded.apply(Annotate(text))
    finally:
        recorded.close()


async def take_recorded(shot: Shot, folder: Path) -> Path:
    """Record one engine, draw the picture of its replay, and return the SVG's path."""
    with tempfile.TemporaryDirectory() as place:
        record(shot, Path(place) / "run.kvrec")
        now = 0.0
        source = RecordedSource(Recording.open(Path(place) / "run.kvrec"), name="run.kvrec", paused=True)
        attachment = Attachment(source, RecordedOperations(source), clock=lambda: now)
        app = KvtopApp(lambda: attachment, auto_poll=False, clock=lambda: now)
        try:
            async with app.run_test(size=shot.size) as pilot:
                await pilot.pause()
                for reading in range(READINGS):
                    now += 1.0
                    source.go_to(shot.steps * 3 // 4 * (reading + 1) // READINGS)
                    await app.poll_once()
                for key in shot.keys:
                    await pilot.press(key)
                    await pilot.pause(0.5)
                await pilot.pause(0.3)
                path = folder / f"{shot.name}.svg"
                path.write_text(offline(app.export_screenshot(title="kvtop")), encoding="utf-8")
                return path
        finally:
            attachment.close()


def draw_run(folder: Path) -> None:
    """Draw what ``kvtop replay --export`` makes of a run, and photograph its report in a browser."""
    shot = next(shot for shot in SHOTS if shot.marks)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run.kvrec"
        record(shot, path)
        recording = Recording.open(path)
        try:
            numbers = recording.sample(0, shot.steps, 60)
            moments = [recording.moment(number) for number in numbers]
            (folder / "run-moving.svg").write_text(to_moving_svg(moments, "run.kvrec") + "\n", encoding="utf-8")
            (folder / "run.gif").write_bytes(to_gif(moments, "run.kvrec"))
            page = folder / "run-report.html"
            page.write_bytes(to_page(recording, "run.kvrec", (0, shot.steps)))
        finally:
            recording.close()
    photograph(page, folder / "run-report.png", (1140, 2600))


async def take(shot: Shot, folder: Path) -> Path:
    """Run one engine, draw its picture, and return the SVG's path."""
    if shot.marks:
        return await take_recorded(shot, folder)
    engine, notes = build_engine(shot.options)
    now = 0.0
    looks_cost_s = 0.0

    def clock() -> float:
        nonlocal now
        now += looks_cost_s
        return now

    runner = EngineRunner(engine, speed=1.0, paused=True, notes=notes, clock=clock)
    attachment = Attachment(InProcessSource(runner), InProcessOperations(runner), clock=lambda: now)
    os.environ.update(TERM=shot.term, COLORTERM="truecolor" if shot.term == "xterm-256color" else "")
    app = KvtopApp(lambda: attachment, auto_poll=False, clock=lambda: now)
    try:
        async with app.run_test(size=shot.size) as pilot:
            await pilot.pause()
            for _ in range(READINGS):
                now += shot.every_s
                attachment.operations.apply(Step(max(1, shot.steps // READINGS)))
                await app.poll_once()
            await pilot.pause()
            if shot.under_way is not None:
                looks_cost_s = 0.02  # so that a turn is over after one slice
                begin(runner, shot.under_way)
                await app.poll_once()
            for key in shot.keys:
                await pilot.press(key)
                await pilot.pause(0.2 if key == "y" else 0.0)
                await app.poll_once()
            await pilot.pause(0.3)
            path = folder / f"{shot.name}.svg"
            path.write_text(offline(app.export_screenshot(title="kvtop")), encoding="utf-8")
            return path
    finally:
        engine.close()


LESSON_SHOTS = (
    LessonShot("lessons"),
    LessonShot("lesson-question-80x24", "contiguous", "guess-starts", typed=("1",)),
    LessonShot("lesson-explained-80x24", "contiguous", "external"),
    LessonShot("lesson-task", "sharing", "more", size=(120, 40), typed=("i",)),
)


async def take_lesson(shot: LessonShot, folder: Path) -> Path:
    """Play a lesson up to a step, draw its picture, and return the SVG's path."""
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
    with tempfile.TemporaryDirectory() as state:
        progress = Progress(Path(state) / "lessons.json")
        for number, name in enumerate(("contiguous", "tables")):
            progress.add(name, Played(done=True, right=3 - number, predictions=3, furthest=15, steps=15))
        lesson = None if shot.lesson is None else find_lesson(shot.lesson)
        app = LessonApp(School(progress=progress, threaded=False), lesson, auto_poll=False)
        async with app.run_test(size=shot.size) as pilot:
            await pilot.pause()
            run = app.play
            while run is not None:
                while not run.ready:
                    await app.poll_once()
                    await pilot.pause(0.05)
                if run.step.id == shot.step:
                    break
                if run.step.kind == "predict":
                    app.lesson_key(shot.answer)
                for line in run.solution():
                    app.do_line(line)
                    await pilot.pause(0.3)
                    await app.poll_once()
                app.lesson_key("enter")
                await pilot.pause(0.1)
            for key in shot.typed:
                await pilot.press(key)
            await pilot.pause(0.3)
            path = folder / f"{shot.name}.svg"
            path.write_text(offline(app.export_screenshot(title="kvtop learn")), encoding="utf-8")
            return path


def begin(runner: EngineRunner, command: Command) -> None:
    """Have a command in progress, in slices that are small beside the pool of a picture."""
    work.SLICE_BLOCKS = 8  # type: ignore[misc]
    runner.claim()
    # The picture is taken midway: it is never answered, and waits until the program ends.
    threading.Thread(target=runner.apply, args=(command, 3600.0), daemon=True).start()
    while (now := runner._work[1] if runner._work else None) is None or not now.total_blocks // 3 < now.done_blocks:
        runner.turn()
        time.sleep(0.01)


def offline(svg: str) -> str:
    """Drop the web fonts that the exporter links to, so that the picture opens the same without a network."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code", "DejaVu Sans Mono")


def _browser() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def to_png(svg: Path) -> None:
    """Render an SVG with Chromium, if there is one."""
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text(encoding="utf-8")).groups()  # type: ignore[union-attr]
    photograph(svg, svg.with_suffix(".png"), (int(float(width)), int(float(height))))


def photograph(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Render a page with Chromium, if there is one."""
    browser = _browser()
    if browser is None:
        return
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--hide-scrollbars", "--no-first-run", "--disable-background-networking", "--disable-sync"]
        command += ["--disable-component-update", f"--window-size={size[0]},{size[1]}"]
        command += [f"--screenshot={picture}", page.resolve().as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)


async def take_browser(path: Path) -> None:
    """Serve a run of as many steps as the overview has, and draw what a browser shows of its end."""
    sys.path.insert(0, str(ROOT / "tests"))
    from chromium import Chromium
    from served import serving

    words = ("--steps", "6000", "--speed", "8", "--config", os.devnull)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, serving(*words) as served:
        async with Chromium(Path(profile)) as browser:
            page = await browser.open(served.url, 1280, 800)
            await page.until("DONE", timeout_s=120)
            await page.click(200, 200)
            seen = len(page.text)
            await page.press("Enter")
            await page.until("sequence", seen)
            await asyncio.sleep(2)
            path.write_bytes(await page.picture())


def main() -> None:
    """Make all pictures, or those named."""
    os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
    os.environ.pop("NO_COLOR", None)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pictures to make; all of them by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "screenshots")
    arguments = parser.parse_args()
    for shot in SHOTS:
        if arguments.names and shot.name not in arguments.names:
            continue
        if shot.options.trace and not Path(shot.options.trace).exists():
            print(f"{shot.name}: skipped, {shot.options.trace} is not here", file=sys.stderr)
            continue
        svg = asyncio.run(take(shot, arguments.folder))
        to_png(svg)
        print(svg)
    for lesson_shot in LESSON_SHOTS:
        if not arguments.names or lesson_shot.name in arguments.names:
            svg = asyncio.run(take_lesson(lesson_shot, arguments.folder))
            to_png(svg)
            print(svg)
    if not arguments.names or "run-report" in arguments.names:
        draw_run(arguments.folder)
        print(arguments.folder / "run-report.html")
    if not arguments.names or "browser" in arguments.names:
        if _browser() is None:
            print("browser: skipped, there is no Chromium", file=sys.stderr)
            return
        picture = arguments.folder / "browser.png"
        asyncio.run(take_browser(picture))
        print(picture)


if __name__ == "__main__":
    main()
