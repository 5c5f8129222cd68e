"""The colours of a batch's timeline: none is taken for another, all are seen on both panels."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

PAGE = files("easyrl.report").joinpath("page.html.j2").read_text()
# CIE 1976 difference: 2.3 is just noticed side by side; thin bars far apart need much more
LEAST_DIFFERENCE = 30.0
LEAST_CONTRAST = 1.7  # of luminances, as WCAG 2 defines it; a bar is no text

OF_RANKS = (
    "begin, settle, report, save, first group, starved, look_ahead, pack, train, evaluation, "
    "check, ranks, step, sync, ledger, unexplained"
)
OF_ENDPOINTS = "push, proof, canary, probe, failed request"


def palette() -> dict[str, str]:
    (text,) = re.findall(r"const palette = \{(.*?)\};", PAGE, re.DOTALL)
    return {a or b: c for a, b, c in re.findall(r'(?:"([^"]+)"|(\w+)): "(#[0-9a-f]{6})"', text)}


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of an sRGB colour, white D65."""
    r, g, b = linear(colour)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_every_name_has_a_colour_far_from_all_others() -> None:
    found = palette()
    assert set(found) == {*OF_RANKS.split(", "), *OF_ENDPOINTS.split(", ")}
    for one, other in itertools.combinations(found, 2):
        difference = sum(
            (a - b) ** 2 for a, b in zip(lab(found[one]), lab(found[other]), strict=True)
        )
        assert difference**0.5 >= LEAST_DIFFERENCE, (one, other, difference**0.5)


def test_every_colour_is_seen_on_the_light_and_on_the_dark_panel() -> None:
    panels = set(re.findall(r"--panel: (#[0-9a-f]{6})", PAGE))
    assert len(panels) == 2
    for name, colour in palette().items():
        for panel in panels:
            dark, light = sorted((luminance(colour), luminance(panel)))
            assert (light + 0.05) / (dark + 0.05) >= LEAST_CONTRAST, (name, panel)
