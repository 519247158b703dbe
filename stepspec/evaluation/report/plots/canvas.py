"""A small matplotlib figure as SVG for a page, with the page's colors and with text kept as text."""

import io
import re
import textwrap
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepspec.evaluation.report.colours import css, placeholder, placeholders

WIDTH, HEIGHT = 400, 300
"""CSS pixels at scale 1. Small, so that text stays legible on a phone that is 320 pixels wide."""
FONT_SIZE = 12.0
MAX_LABEL = 22
CAPTION_WIDTH = 66
"""Characters in a line of the caption of a file."""
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
_COORDINATES = {"d", "x", "y", "transform", "width", "height", "points"}
_TIP = "tip:"


Value = tuple[float, tuple[float, float] | None]
"""A figure and its interval; None if it has none."""


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    key: str
    title: str
    caption: str
    svg: str

    def image(self) -> str:
        """Return the SVG as a file of its own: with its caption, and with the page's colors in both themes."""
        themes = f":root{{{css(dark=False)}}}@media (prefers-color-scheme:dark){{:root{{{css(dark=True)}}}}}"
        page = "svg{background:var(--card);font-family:system-ui,sans-serif}"
        root = ElementTree.fromstring(self.svg)
        root.attrib.pop("aria-describedby", None)
        *_, width, height = root.attrib["viewBox"].split()
        lines = textwrap.wrap(self.caption, CAPTION_WIDTH)
        for number, line in enumerate(lines, 1):
            place = {"x": "8", "y": f"{float(height) + 15 * number:g}", "style": "font-size: 11px; fill: var(--muted)"}
            ElementTree.SubElement(root, f"{SVG}text", place).text = line
        height = f"{float(height) + 15 * len(lines) + (10 if lines else 0):g}"
        root.attrib |= {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
        style = ElementTree.Element(f"{SVG}style")
        style.text = themes + page
        root.insert(0, style)
        return ElementTree.tostring(root, encoding="unicode") + "\n"


class Canvas:
    """A figure to draw on, in the page's style."""

    def __init__(self, height: int = HEIGHT) -> None:
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        self.axes: Axes = self.figure.add_subplot()

    def tip(self, artist: Any, text: str) -> None:
        """Add a tooltip to an artist."""
        artist.set_gid(f"{_TIP}{text}")

    def lines(
        self,
        unit: str,
        points: Mapping[str, Sequence[tuple[int, Value]]],
        colours: Mapping[str, str],
        tip: Callable[[str, int, float], str],
    ) -> None:
        """Draw a line for each name through values from 0 up, with their intervals, tooltips and a legend.

        Args:
            unit: label of the values.
            points: places and values, by name.
            colours: the page's color of each name.
            tip: returns the tooltip for a name, a place and a value.
        """
        for name, known in points.items():
            shade = colour(colours[name])
            places, values = [place for place, _ in known], [value for _, (value, _) in known]
            self.axes.plot(places, values, "o-", color=shade, markersize=4, label=label(name))
            for place, (value, interval) in known:
                if interval is not None:
                    self.axes.plot([place] * 2, interval, color=shade, linewidth=1.2, alpha=0.6)
                self.tip(self.axes.plot(place, value, "o", color=shade, markersize=5)[0], tip(name, place, value))
        self.axes.set_ylabel(unit)
        self.axes.set_ylim(bottom=0)
        self.figure.legend(loc="outside upper left", ncols=3)

    def only_left_labels(self) -> None:
        """Show only names at the left, without a line and ticks. For rows of bars."""
        self.axes.spines["left"].set_visible(False)
        self.axes.tick_params(axis="y", length=0)

    def plot(self, key: str, title: str, caption: str) -> Plot:
        """Return the finished plot. `key` must be unique on the page."""
        file = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": key}):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return Plot(key, title, caption, _for_page(file.getvalue(), key, title))


@contextmanager
def canvas(height: int = HEIGHT) -> Generator[Canvas]:
    """Yield a canvas. The matplotlib settings apply only inside the context."""
    with mpl.rc_context(_STYLE):
        yield Canvas(height)


def label(name: str) -> str:
    """Return a name that fits beside a figure. A long name keeps only its beginning and its end."""
    return name if len(name) <= MAX_LABEL else f"{name[:8]}…{name[9 - MAX_LABEL :]}"


def colour(name: str) -> str:
    """Return a color of the page in a form for matplotlib."""
    return placeholder(name)


def _style() -> Any:
    ink, muted, line = (placeholder(name) for name in ("ink", "muted", "line"))
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,  # names of policies and judges are not formulas
        "font.family": "DejaVu Sans",  # wider than the fonts of browsers, so that nothing overlaps there
        "font.size": FONT_SIZE,
        "axes.labelsize": FONT_SIZE,
        "xtick.labelsize": FONT_SIZE - 1,
        "ytick.labelsize": FONT_SIZE - 1,
        "legend.fontsize": FONT_SIZE - 1,
        "legend.frameon": False,
        "legend.handlelength": 1.0,
        "legend.handleheight": 1.0,
        "legend.columnspacing": 1.2,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": line,
        "axes.linewidth": 1.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": line,
        "grid.linewidth": 0.7,
        "xtick.color": line,
        "ytick.color": line,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "lines.linewidth": 2.0,
        "patch.linewidth": 0.0,
    }


_STYLE = _style()


def _for_page(svg: bytes, key: str, title: str) -> str:
    """Return the SVG for embedding: no metadata and styles, with the page's colors and font, and with ARIA labels."""
    ElementTree.register_namespace("", SVG[1:-1])
    root = ElementTree.fromstring(svg)
    for child in list(root):
        # A style sheet in the SVG would apply to the whole page.
        if child.tag == f"{SVG}metadata" or child.find(f"{SVG}style") is not None:
            root.remove(child)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", title)
    root.set("aria-describedby", f"{key}-caption")
    _replace_links(root)
    _replace_ids(root)
    for element in root.iter():
        for name in _COORDINATES & element.attrib.keys():
            element.set(name, _slim(element.attrib[name]))
        if "style" in element.attrib:
            element.set("style", re.sub(r"font: ([\d.]+)px [^;]*", r"font-size: \1px", element.attrib["style"]))
    text = ElementTree.tostring(root, encoding="unicode")
    for hexadecimal, variable in placeholders().items():
        text = text.replace(hexadecimal, variable)
    return text


def _replace_links(root: ElementTree.Element) -> None:
    for element in root.iter():
        link = element.attrib.pop(f"{XLINK}href", None)
        if link is not None:
            element.set("href", link)


def _replace_ids(root: ElementTree.Element) -> None:
    """Remove ids without references, and replace the ids of tips by `title` elements, the tooltips of browsers."""
    referred = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name is None:
            continue
        if name.startswith(_TIP):
            tip = ElementTree.Element(f"{SVG}title")
            tip.text = name.removeprefix(_TIP)
            element.insert(0, tip)
        elif name in referred:
            element.set("id", name)


def _slim(text: str) -> str:
    """Round coordinates to a tenth of a pixel."""
    shortened = re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), text)
    return re.sub(r"\s+", " ", shortened).strip()
