"""The report in a real browser: it needs the extra `browser`, chromium and its driver."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from flows.report.html import write_report
from tests.support.synthetic import write_experiment

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_experiment(tmp_path_factory.mktemp("results") / "demo")
    return write_report(folder, folder / "report.html")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_opens_without_an_error_and_fits(
    browser: Any, page: Path, width: int, colours: str
) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": colours}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    sizes = browser.execute_script(PICTURES)
    assert len(sizes) == 5
    assert all(min(size["width"], size["height"]) > 100 for size in sizes)
    assert all(size["texts"] > 3 for size in sizes)


def test_the_first_screen_has_verdicts_and_the_table(browser: Any, page: Path) -> None:
    screen = {"width": 1280, "height": SCREEN, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    assert 0 < browser.execute_script(GLANCE_END) <= SCREEN


def test_the_page_is_short_until_it_is_unfolded(browser: Any, page: Path) -> None:
    screen = {"width": 1280, "height": SCREEN, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    assert browser.execute_script(HEIGHT) <= MAX_SCREENS * SCREEN
    browser.execute_script(UNFOLD)
    assert browser.execute_script(HEIGHT) > MAX_SCREENS * SCREEN


def test_links_of_the_contents_lead_somewhere(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    found = browser.execute_script(CONTENTS)
    assert len(found) == 5
    assert all(height > 0 for height in found.values()), found


def test_what_is_folded_is_printed(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    folded = printed_pages(browser)
    browser.execute_script(UNFOLD)
    assert folded == printed_pages(browser) > 5


def printed_pages(browser: Any) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(browser.print_page())))


SCREEN, MAX_SCREENS = 800, 8
GLANCE_END = "return document.querySelector('#glance table').getBoundingClientRect().bottom"
HEIGHT = "return document.documentElement.scrollHeight"
CONTENTS = """
    const links = [...document.querySelectorAll("nav a")];
    const target = link => document.querySelector(link.getAttribute("href"));
    return Object.fromEntries(
        links.map(link => [link.textContent, target(link)?.getBoundingClientRect().height ?? 0])
    );
"""
UNFOLD = "document.querySelectorAll('details').forEach(part => part.open = true)"
# Those in closed parts of the page have no size; they are opened first.
PICTURES = """
    document.querySelectorAll("details").forEach(part => part.open = true);
    return [...document.querySelectorAll("figure svg")].map(svg => {
        const box = svg.getBoundingClientRect();
        return {
            width: box.width, height: box.height, right: box.right,
            texts: svg.querySelectorAll("text").length,
        };
    });
"""
