"""Picture: the screen as a PNG, drawn cell by cell with Pillow. Only letters need a font."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from textual.strip import Strip

from kvtop.errors import UserError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Rgb = tuple[int, int, int]

_SIZE: Final = 20
#: Fonts with letters of one width, the first that is installed; with each its bold one.
_FONTS: Final = (
    ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"),
    ("LiberationMono-Regular.ttf", "LiberationMono-Bold.ttf"),
    ("NotoSansMono-Regular.ttf", "NotoSansMono-Bold.ttf"),
    ("UbuntuMono-R.ttf", "UbuntuMono-B.ttf"),
    ("FreeMono.ttf", "FreeMonoBold.ttf"),
    ("Menlo.ttc", "Menlo.ttc"),
    ("consola.ttf", "consolab.ttf"),
)
#: Fonts for what those have not: characters of two cells.
_WIDE_FONTS: Final = ("NotoSansCJK-Regular.ttc", "DroidSansFallbackFull.ttf", "wqy-microhei.ttc", "unifont.ttf")
#: Block signs as (left, top, right, bottom) in eighths of a cell.
_BLOCKS: Final = {
    "█": (0, 0, 8, 8),
    "▀": (0, 0, 8, 4),
    "▌": (0, 0, 4, 8),
    "▐": (4, 0, 8, 8),
    **{sign: (0, 7 - i, 8, 8) for i, sign in enumerate("▁▂▃▄▅▆▇")},
}
_SHADES: Final = {"░": 0.25, "▒": 0.5, "▓": 0.75}
#: Lines as the sides that they reach from the middle: left, right, up, down.
_LINES: Final = {
    "─": "lr", "━": "lr", "│": "ud", "╭": "rd", "╮": "ld", "╰": "ru", "╯": "lu", "┌": "rd", "┐": "ld",
    "└": "ru", "┘": "lu", "├": "rud", "┤": "lud", "┬": "lrd", "┴": "lru", "┼": "lrud",
}  # fmt: skip


def to_png(strips: Sequence[Strip], background: Rgb) -> bytes:
    """Return lines of a screen as a PNG.

    Args:
        strips: The lines, from the top.
        background: Where a cell has none of its own.

    Raises:
        UserError: There is no font to write letters with.
    """
    from PIL import Image, ImageDraw

    fonts = _Fonts()
    columns = max((strip.cell_length for strip in strips), default=1)
    image = Image.new("RGB", (columns * fonts.width, len(strips) * fonts.height), background)
    pen = ImageDraw.Draw(image)
    for y, strip in enumerate(strips):
        x = 0
        for text, style, _ in strip:
            ink, paper = _colours(style or Style.null(), background)
            cells = cell_len(text)
            left, top = x * fonts.width, y * fonts.height
            if cells and paper != background:
                pen.rectangle((left, top, left + cells * fonts.width - 1, top + fonts.height - 1), paper)
            _write(pen, fonts, text, (left, top), ink, paper, style or Style.null())
            x += cells
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class _Fonts:
    """The fonts, and the size of a cell in dots."""

    def __init__(self) -> None:
        for plain, bold in _FONTS:
            self.plain = _load(plain)
            if self.plain is not None:
                self.bold = _load(bold) or self.plain
                break
        else:
            names = ", ".join(name.partition(".")[0].partition("-")[0] for name, _ in _FONTS[:3])
            raise UserError(f"export png: no font of one width is installed, such as {names}; export svg needs none")
        ascent, descent = self.plain.getmetrics()
        self.width, self.height = round(self.plain.getlength("M")), ascent + descent
        self._wide: Any = None

    def of(self, sign: str, *, bold: bool) -> Any:
        """Return the font for a sign."""
        if cell_len(sign) == 2:
            if self._wide is None:
                self._wide = next((font for name in _WIDE_FONTS if (font := _load(name)) is not None), self.plain)
            return self._wide
        return self.bold if bold else self.plain


def _load(name: str) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.truetype(name, _SIZE)
    except OSError:
        return None


def _colours(style: Style, background: Rgb) -> tuple[Rgb, Rgb]:
    """Return ink and paper of a style."""
    ink = _rgb(style.color, _triple(SVG_EXPORT_THEME.foreground_color), is_ink=True)
    paper = _rgb(style.bgcolor, background, is_ink=False)
    if style.reverse:
        ink, paper = paper, ink
    return (_mix(ink, paper, 0.6), paper) if style.dim else (ink, paper)


def _rgb(color: Color | None, usual: Rgb, *, is_ink: bool) -> Rgb:
    if color is None or color.is_default:
        return usual
    return _triple(color.get_truecolor(SVG_EXPORT_THEME, foreground=is_ink))


def _triple(colour: ColorTriplet) -> Rgb:
    return colour.red, colour.green, colour.blue


def _mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    r, g, b = (round(share * a + (1 - share) * z) for a, z in zip(one, other, strict=True))
    return r, g, b


def _write(pen: ImageDraw, fonts: _Fonts, text: str, at: tuple[int, int], ink: Rgb, paper: Rgb, style: Style) -> None:
    """Write a text of one style, each sign into its own cell."""
    left, top = at
    for sign in text:
        width = fonts.width * max(1, cell_len(sign))
        box = (left, top, left + width - 1, top + fonts.height - 1)
        if sign in _BLOCKS:
            a, b, c, d = _BLOCKS[sign]
            edges = (left + width * a // 8, top + fonts.height * b // 8)
            pen.rectangle((*edges, left + width * c // 8 - 1, top + fonts.height * d // 8 - 1), ink)
        elif sign in _SHADES:
            pen.rectangle(box, _mix(ink, paper, _SHADES[sign]))
        elif sign in _LINES:
            _line(pen, box, _LINES[sign], ink)
        elif not sign.isspace():
            pen.text((left, top), sign, ink, fonts.of(sign, bold=bool(style.bold)))
        if style.underline:
            pen.line((left, top + fonts.height - 2, left + width - 1, top + fonts.height - 2), ink)
        left += width


def _line(pen: ImageDraw, box: tuple[int, int, int, int], sides: str, ink: Rgb) -> None:
    left, top, right, bottom = box
    x, y = (left + right) // 2, (top + bottom) // 2
    arms = {
        "l": (left, y, x + 1, y + 1),
        "r": (x, y, right, y + 1),
        "u": (x, top, x + 1, y + 1),
        "d": (x, y, x + 1, bottom),
    }
    for side in sides:
        pen.rectangle(arms[side], ink)
