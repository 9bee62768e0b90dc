"""Pictures of a moment: well-formed, self-contained, and true to the blocks."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from recorded_runs import opened, record

from allocator.commands import Annotate, EvictCached
from allocator.ids import BlockState
from kvtop import cli
from kvtop.pictures import charts
from kvtop.pictures.heatmap import COLOURS, cell_kinds, to_svg
from kvtop.pictures.moving import to_moving_svg
from kvtop.pictures.page import _point, key_moments, to_page
from kvtop.pictures.raster import to_gif, to_png
from kvtop.recording.reader import Moment, Recording
from kvtop.sources.scripted import block_arrays

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def moment() -> Moment:
    recording = opened(record(200))
    return recording.moment(recording.last)


def test_every_block_has_its_cell(moment: Moment) -> None:
    root = ET.fromstring(to_svg(moment, "a <run> & more"))
    rows = [r for group in root.iter(f"{SVG}g") for r in group.iter(f"{SVG}rect")]
    assert sum(int(r.attrib["width"]) for r in rows) == 7 * (96 + 48)
    assert "a <run> & more: step 200" in (root.findtext(f"{SVG}title") or "")
    assert moment.host is not None
    cached = int((moment.device.state == BlockState.CACHED).sum() + (moment.host.state == BlockState.CACHED).sum())
    assert sum(int(r.attrib["width"]) for r in rows if r.attrib["fill"] == "#4f62a3") == 7 * cached
    text = "".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert "Device: 96 blocks" in text
    assert "Host: 48 blocks" in text


def test_states_and_holders_have_their_colours() -> None:
    states = [BlockState.FREE, BlockState.CACHED, BlockState.RESERVED, BlockState.RETIRED, *[BlockState.ACTIVE] * 6]
    arrays = block_arrays(states, ref_count=[0, 0, 0, 0, 1, 2, 3, 4, 9, 200])
    assert cell_kinds(arrays, 1).tolist() == [1, 2, 3, 0, 4, 5, 6, 6, 8, 9]
    assert cell_kinds(arrays, 4).tolist() == [0, 6, 8]


def test_a_large_pool_is_drawn_in_cells_of_several_blocks(moment: Moment) -> None:
    large = replace(moment, device=block_arrays(np.full(100_000, BlockState.FREE, np.uint8)), host=None)
    svg = to_svg(large, "large")
    assert "a cell is 13 blocks, as most of them are" in svg
    assert len(svg) < 20_000


def test_a_page_loads_nothing_and_tells_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.kvrec"
    path.write_bytes(
        record(600, every=5, commands={100: EvictCached(None), 200: Annotate("<script>alert(1)</script>")})
    )
    recording = Recording.open(path)
    page = to_page(recording, "<b>run</b>", (0, 10**9)).decode()
    recording.close()
    assert "<script" not in page
    assert "<b>run" not in page
    assert "Report of &lt;b&gt;run" in page
    assert "&lt;script&gt;alert(1)" in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "src=" not in page
    assert "href" not in page
    for drawn in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(drawn)
    assert "evict-cached" in page
    assert page.count("<svg") >= 8
    last = opened(path.read_bytes()).moment(opened(path.read_bytes()).last).snapshot.counters
    assert f"<b>{last.finished:,}</b>" in page


def test_key_moments_are_what_they_are_called() -> None:
    recording = opened(record(3000, every=10))
    moments = [item for item in recording.story() if isinstance(item, Moment)]
    points = [_point(moment) for moment in moments]
    found = key_moments(recording, points, [(1504, "look")])
    whys = {why: number for number, some in found for why in some}
    assert whys["the beginning"] == recording.first
    assert whys["the end"] == recording.last
    assert recording.step_of(whys["marked: look"]) == 1500
    fullest = max(moments, key=lambda m: (m.device.state == BlockState.ACTIVE).sum())
    at = recording.moment(whys["most blocks in use"])
    assert (at.device.state == BlockState.ACTIVE).sum() == (fullest.device.state == BlockState.ACTIVE).sum()
    assert [number for number, _ in found] == sorted(number for number, _ in found)


def test_a_chart_leaves_a_gap_where_nothing_is_known() -> None:
    drawn = charts.to_svg(charts.Chart("a < b", (charts.Line("x", [1.0, 2.0, None, 4.0]),)), [0.0, 1.0, 2.0, 3.0])
    root = ET.fromstring(drawn)
    lines = [p.attrib["d"] for p in root.iter(f"{SVG}path") if p.attrib.get("fill") == "none"]
    assert [line.count("M") for line in lines] == [2]
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    nothing = charts.to_svg(charts.Chart("none", (charts.Line("x", [None]),)), [5.0])
    assert "not known" in nothing


def test_a_png_has_the_colours_of_its_blocks(moment: Moment) -> None:
    image = Image.open(io.BytesIO(to_png(moment, "run")))
    assert image.width == 2 * 960
    cells = cell_kinds(moment.device, 1)
    for cell in (0, 40, 95):
        x, y = 32 + (cell % 128) * 7 + 3, 66 + 32 + 3
        dot = image.getpixel((2 * x, 2 * y))
        assert "#{:02x}{:02x}{:02x}".format(*dot) == COLOURS[cells[cell]]  # type: ignore[misc]


def test_moving_pictures_have_a_picture_a_moment() -> None:
    recording = opened(record(200, every=10))
    moments = [item for item in recording.story() if isinstance(item, Moment)]
    image = Image.open(io.BytesIO(to_gif(iter(moments), "run")))
    assert (image.format, image.n_frames, image.info["loop"]) == ("GIF", len(moments), 0)  # type: ignore[attr-defined]
    root = ET.fromstring(to_moving_svg(moments, "run"))
    shown = [a for a in root.iter(f"{SVG}animate") if a.attrib["attributeName"] == "display"]
    assert len(shown) == len(moments)
    assert all(i.attrib["href"].startswith("data:image/png;base64,") for i in root.iter(f"{SVG}image"))
    first = next(root.iter(f"{SVG}image")).attrib["href"].partition(",")[2]
    dots = np.array(Image.open(io.BytesIO(base64.b64decode(first))))
    assert dots.ravel()[:96].tolist() == cell_kinds(moments[0].device, 1).tolist()


def test_moments_are_picked_from_all_of_a_run() -> None:
    recording = opened(record(900, every=3, key_every=16))
    for at_most in (2, 3, 10, 500):
        steps = [recording.step_of(number) for number in recording.sample(0, 900, at_most)]
        assert (steps[0], steps[-1]) == (0, 900)
        assert steps == sorted(set(steps))
        assert len(steps) == min(at_most, 301)
    assert [recording.step_of(n) for n in recording.sample(100, 110, 10)] == [99, 102, 105, 108]
    assert [recording.step_of(n) for n in recording.sample(100, 100, 10)] == [99]


def test_the_command_line_exports_a_step(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.kvrec"
    path.write_bytes(record(200))
    assert cli.run(["replay", str(path), "--at", "101", "--export", "svg"]) == 0
    assert "run.kvrec: step 100" in (ET.fromstring(capsys.readouterr().out).findtext(f"{SVG}title") or "")
    assert cli.run(["replay", str(path), "--export", "html"]) == 0
    assert "as of step 200" in capsys.readouterr().out
    for form, start in (("png", b"\x89PNG"), ("gif", b"GIF89a"), ("svg", b"<svg"), ("html", b"<!doctype html>")):
        out = tmp_path / f"out.{form}"
        span = [] if form == "png" else ["--steps", "40..160"]
        assert cli.run(["replay", str(path), "--export", form, "--out", str(out), *span]) == 0
        assert out.read_bytes().startswith(start)
        assert cli.run(["replay", str(path), "--export", form, "--out", str(out)]) == 2
        assert f"--out {out}: exists already" in capsys.readouterr().err
    assert cli.run(["replay", str(path), "--export", "bmp"]) == 2
    assert capsys.readouterr().err == "kvtop: --export bmp: one of svg, png, gif, html\n"
