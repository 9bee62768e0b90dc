"""Pictures of a moment: well-formed, self-contained, and true to the blocks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from recorded_runs import opened, record

from allocator.ids import BlockState
from kvtop import cli
from kvtop.recording.picture import cell_kinds, to_html, to_svg
from kvtop.recording.reader import Moment
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


def test_a_page_loads_nothing_and_holds_its_text(moment: Moment) -> None:
    strange = replace(moment, snapshot=msgspec.structs.replace(moment.snapshot, workload="<script>alert(1)</script>"))
    page = to_html(strange, "run.kvrec", "blocks <b>")
    assert "<script" not in page
    assert "blocks &lt;b&gt;" in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_command_line_exports_a_step(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.kvrec"
    path.write_bytes(record(200))
    assert cli.run(["replay", str(path), "--at", "101", "--export", "svg"]) == 0
    assert "run.kvrec: step 100" in (ET.fromstring(capsys.readouterr().out).findtext(f"{SVG}title") or "")
    assert cli.run(["replay", str(path), "--export", "html"]) == 0
    assert "200 steps in —" in capsys.readouterr().out
    assert cli.run(["replay", str(path), "--export", "gif"]) == 2
    assert capsys.readouterr().err == "kvtop: --export gif: one of svg, html\n"
