"""The pages in a real browser: nothing is wider than a desktop's or a phone's window, nothing fails, and what can be clicked works."""

from pathlib import Path

import browser
import pytest
from your_own import Page, forget

import lockstep

why = browser.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why is not None, reason=str(why)),
    pytest.mark.xdist_group("browser"),
    pytest.mark.filterwarnings("ignore"),  # of selenium
]
QUICK = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=null", "trainer.max_steps=8",
    "trainer.log_every_n_steps=2", "data.batch_size=8", "data.limit_train=48",
)  # fmt: skip
PAGES = {
    "folder": ("data.image_size=16", "data.cache_dir={cache}"),
    "multilabel": ("data.image_size=16", "data.cache_dir={cache}"),
    "regression": ("model.width=8",),
    "segmentation": ("data.count=70", "data.image_size=16", "model.width=4"),
    "language-model": ("model.width=16", "data.sequence_length=16"),
}
WINDOWS = [(1280, False), (1280, True), (360, False), (360, True)]
WIDER = """
const inside = element => element.closest(".scroll, nav .in, pre, svg, .tip");
return [...document.querySelectorAll("body *")].filter(e => !inside(e) || inside(e) === e)
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def driver():
    with browser.browser() as found:
        yield found


@pytest.fixture(scope="module", params=[*PAGES, "lightning-module", "failed", "runs"])
def page(request, tmp_path_factory, mnist, cache, run_folder) -> Path:
    name = request.param
    if name in ("failed", "runs"):
        return run_folder / ("bad/report.html" if name == "failed" else "runs.html")
    root = tmp_path_factory.mktemp(name)
    page = Page(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(page.write(root))
        if name in PAGES:
            more = [text.format(cache=cache) for text in PAGES[name]]
            lockstep.train(["run=x", *page.typed[0], *QUICK, *more])
        else:
            options = [f"data.root={mnist}", f"data.cache_dir={cache}", "data.batch_size=48", "trainer.accelerator=cpu"]
            lockstep.train(["run=x", "task=lit_classifier", *options, "trainer.log_every_n_steps=2"])
    forget()
    return root / "runs/x/report.html"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, mnist, cache) -> Path:
    """Two runs that differ, one that failed, and the page of all three."""
    import runs as ledger

    from lockstep.callbacks import FiniteLoss

    folder = tmp_path_factory.mktemp("runs")
    places = [f"data.root={mnist}", f"data.cache_dir={cache}", f"runs_dir={folder}"]
    options = [*places, "data.image_size=12", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1"]

    def crash(self, trainer, *_) -> None:
        raise RuntimeError("as it happens" * 20)

    for lr in (1e-3, 1e-5):
        lockstep.train([f"run=lr-{lr}", f"optim.lr={lr}", "data.batch_size=48", *options])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FiniteLoss, "on_train_end", crash)
        with pytest.raises(RuntimeError):
            lockstep.train(["run=bad", "data.batch_size=64", *options])
        patch.setattr("sys.argv", ["runs.py", "html", "--runs-dir", str(folder), "-o", str(folder / "runs.html")])
        ledger.main()
    return folder


def texts(driver, selector: str) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
    )


@pytest.mark.parametrize(("width", "dark"), WINDOWS)
def test_a_page_fits_its_window(driver, page, width, dark):
    browser.show(driver, page, width=width, dark=dark)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(WIDER) == []
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(18, 20, 24)" if dark else "rgb(255, 255, 255)")
    assert texts(driver, ".headline h1")[0]


def test_tables_are_sorted_by_a_click(driver, page):
    browser.show(driver, page, width=1280)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    table = "table.sortable" if page.name == "runs.html" else "#figures table.sortable"
    for column, order in (("1", sorted), ("1", lambda found: sorted(found, reverse=True))):
        driver.execute_script(f"document.querySelector('{table} th:nth-child({column}) button').click()")
        found = texts(driver, f"{table} tbody td:nth-child({column})")
        keys = [text.casefold() for text in found]
        assert len(found) > 2 and set(keys) == set(order(keys))
        state = driver.execute_script(
            f"return document.querySelector('{table} th:nth-child({column})').getAttribute('aria-sort')"
        )
        first = driver.execute_script(
            "return arguments[0].localeCompare(arguments[1], undefined, {numeric: true})", found[0], found[-1]
        )
        assert (first < 0) == (state == "ascending")


def test_the_axis_switches_and_the_pointer_shows_values(driver, page):
    browser.show(driver, page, width=1280)
    axes = """return [...document.querySelectorAll('.in-per, .in-x')].filter(e => e.closest('.chart').offsetParent || e.offsetParent)
      .filter(e => getComputedStyle(e).display != 'none').map(e => e.classList.contains('in-per'))"""
    assert set(driver.execute_script(axes)) == {False}
    driver.execute_script("document.querySelector('[data-unit-to=per]').click()")
    assert set(driver.execute_script(axes)) == {True}
    tip = driver.execute_script("""
      const svg = [...document.querySelectorAll('.chart svg')].filter(e => e.parentNode.offsetParent && e.querySelector('polyline'))[0];
      svg.scrollIntoView();
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 30, clientY: box.top + 40}));
      return svg.parentNode.querySelector('.tip').innerText""")
    assert "seen" in tip and len(tip.splitlines()) >= 2
    assert driver.get_log("browser") == []


def test_commands_are_copied(driver, page):
    browser.show(driver, page, width=1280)
    commands = texts(driver, ".command code")
    if page.name == "runs.html":
        assert commands == []
        return
    assert len(commands) == len(texts(driver, "button.copy")) >= 1
    assert all(command.startswith(("python ", "lockstep ")) for command in commands)
    driver.execute_script("document.querySelector('button.copy').click()")
    copied = "setTimeout(() => arguments[0](document.querySelector('button.copy').textContent), 300)"
    assert driver.execute_async_script(copied) == "Copied"
