"""The console in a real Chromium: it loads, draws, takes keys, refuses or does operations, and leaves no process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chromium import Chromium, Page, find_chromium
from published import own_directories
from served import Served, serving, wait_gone

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")

_ENGINE = ("--blocks", "1024", "--geometry", "none")
#: Counts the colours of a picture, at every fourth point.
_COLOURS = """
(async () => {{
  const image = new Image();
  image.src = 'data:image/png;base64,{picture}';
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, image.width, image.height).data, seen = new Set();
  for (let i = 0; i < data.length; i += 16) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
}})()
"""


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    own_directories(monkeypatch, tmp_path_factory.mktemp("s"))


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    async with Chromium(tmp_path) as found:
        yield found


async def _colours(page: Page) -> int:
    return int(await page.evaluate(_COLOURS.format(picture=base64.b64encode(await page.picture()).decode())))


async def _opened(browser: Chromium, served: Served) -> Page:
    page = await browser.open(served.url)
    await page.until("RUNNING")
    await page.click(300, 300)
    return page


async def test_a_page_draws_takes_keys_refuses_and_leaves_no_process(browser):
    with serving(*_ENGINE) as served:
        page = await _opened(browser, served)
        assert await _colours(page) > 40
        assert page.complaints == []
        assert all(url.startswith((served.url, "data:")) for url in page.urls)
        (process,) = served.tabs()

        seen = len(page.text)
        await page.press("?")
        await page.until("Esc closes", seen)
        await page.press("Escape")
        await asyncio.sleep(0.5)  # with a key at its heels it would be Alt and that key
        for key, words in (("8", "over time"), ("R", "refused: attached to look only")):
            seen = len(page.text)
            await page.press(key)
            await page.until(words, seen)
        await page.press("s")
        await page.until("sequences: by", seen)  # so that the next refusal is a text to be drawn
        seen = len(page.text)
        await page.press(":", *"resize 900", "Enter")
        await page.until("refused: attached to look only", seen)

        await page.press("1")
        seen = len(page.text)
        await page.resize(1800, 900)
        await page.until("Sequences", seen)
        await page.close()
        await asyncio.to_thread(wait_gone, [process], 10.0)
        assert "Traceback" not in served.said


async def test_an_operation_is_done_where_browsers_may_and_shown_in_every_tab(browser):
    with serving(*_ENGINE, "--allow-operations") as served:
        first, second = await _opened(browser, served), await _opened(browser, served)
        seen = len(first.text), len(second.text)
        await first.press(" ")
        await first.until("PAUSED", seen[0])
        await second.until("PAUSED", seen[1])
        await first.press("R", *"512")
        await first.until("512")
        await first.press("Tab", "y")
        await second.until("512 blocks")
        await second.press("q")
        await second.until_closed()
        assert await second.evaluate("document.body.classList.contains('-closed')")
        assert len(served.tabs()) == 1
        assert served.end() == 0
