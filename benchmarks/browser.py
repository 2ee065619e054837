"""Opens HTML files in a headless Chromium, for tests of the report and screenshots in the docs.

python benchmarks/browser.py classification=runs/first/report.html runs=runs.html ...

Writes docs/images/report-<name>.png: the top of the page, 1280 px wide, or 390 px for `phone=<page>`. With a `#` in the name, such as
segmentation#test=<page>, the screenshot starts at the section with that id.
"""

import base64
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measuring
from PIL import Image

from lockstep import ROOT
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code

FOLDER = ROOT / "docs/images"
LARGEST = 150_000  # bytes


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("pages", nargs="+", metavar="name=page")
    pages = parser.parse_args().pages
    if reason := missing():
        raise UserError(reason)
    FOLDER.mkdir(exist_ok=True)
    with browser() as driver:
        for pair in pages:
            name, _, page = pair.partition("=")
            name, _, section = name.partition("#")
            if not Path(page).is_file():
                raise UserError(
                    f"{pair}: the page {page!r} does not exist; expected <name>=<page>, such as runs=runs.html"
                )
            width, height = (390, 800) if name == "phone" else (1280, 1180)
            show(driver, Path(page), width=width, height=height, dark=name.endswith("dark"))
            if section:
                driver.execute_script("document.documentElement.style.scrollPaddingTop = 0")
                driver.execute_script(f"document.getElementById('{section}').scrollIntoView()")
                driver.execute_script("document.querySelector('nav').style.position = 'static'")
            path = FOLDER / f"report-{name}.png"
            screenshot(driver, path, width=width, height=height)
            print(path, path.stat().st_size)
            assert path.stat().st_size < LARGEST, path


NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why no browser is available; None if one is."""
    if not any(map(shutil.which, NAMES)) or not shutil.which("chromedriver"):
        return "chromium or chromedriver is missing (scripts/install_test_systems.sh installs them)"
    return None if find_spec("selenium") else "selenium is missing (uv sync installs it)"


@contextmanager
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(path for path in map(shutil.which, NAMES) if path)
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def show(driver: Any, page: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
    """Opens a page in a window of `width` pixels. Narrow windows emulate a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    driver.get(page.resolve().as_uri())


def screenshot(driver: Any, path: Path, *, width: int, height: int) -> None:
    """Saves a screenshot of the window."""
    clip = {"x": 0, "y": driver.execute_script("return scrollY"), "width": width, "height": height, "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # a third of the bytes
    few.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
