"""Pictures of pages for the docs, made by a headless Chromium.

python benchmarks/screenshots.py classification=runs/first/report.html runs=runs.html ...

Writes docs/images/report-<name>.png, the top of the page at 1280 px, and of `phone=<page>` at 360 px. A name with `#`, such as
segmentation#test=<page>, starts at the section of that id.
"""

import sys
from pathlib import Path

import browser

from lockstep import ROOT
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code

FOLDER = ROOT / "docs/images"
LARGEST = 350_000  # bytes


def main() -> None:
    if why := browser.missing():
        raise UserError(why)
    FOLDER.mkdir(exist_ok=True)
    with browser.browser() as driver:
        for each in sys.argv[1:]:
            name, _, page = each.partition("=")
            name, _, section = name.partition("#")
            width, height = (360, 800) if name == "phone" else (1280, 1180)
            browser.show(driver, Path(page), width=width, height=height, dark=name.endswith("dark"))
            if section:
                driver.execute_script("document.documentElement.style.scrollPaddingTop = 0")
                driver.execute_script(f"document.getElementById('{section}').scrollIntoView()")
                driver.execute_script("document.querySelector('nav').style.position = 'static'")
            top = driver.execute_script("return scrollY")
            path = FOLDER / f"report-{name}.png"
            browser.screenshot(driver, path, width=width, height=height, top=top)
            print(path, path.stat().st_size)
            assert path.stat().st_size < LARGEST, path


if __name__ == "__main__":
    sys.exit(exit_code(main))
