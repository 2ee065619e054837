"""The pages in a real browser: they fit a desktop's and a phone's window, axe-core finds no barrier, and what can be clicked works."""

import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import lightning.pytorch as pl
import pytest
from your_own import Page, forget

import lockstep
from lockstep.config.draft import Draft, values_of
from lockstep.extras import page as pages
from lockstep.run import RunFolder

why = browser.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why is not None, reason=str(why)),
    pytest.mark.xdist_group("browser"),
    pytest.mark.filterwarnings("ignore"),  # of selenium
]
QUICK = (
    "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=null", "trainer.max_steps=8",
    "trainer.log_every_n_steps=2", "loader.batch_size=8", "loader.limit_train=48",
)  # fmt: skip
PAGES = {
    "folder": ("data.image_size=16", "data.cache_dir={cache}"),
    "multilabel": ("data.image_size=16", "data.cache_dir={cache}"),
    "regression": ("model.width=8",),
    "segmentation": ("data.count=70", "data.image_size=16", "model.width=4"),
    "language-model": ("model.width=16", "data.sequence_length=16"),
}
WINDOWS = [(1280, False), (1280, True), (390, False), (390, True)]
WIDER = """
const inside = element => element.closest(".scroll, nav .in, pre, svg, .tip");
return [...document.querySelectorAll("body *")].filter(e => !inside(e) || inside(e) === e)
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))
"""
# The words of labels that stand on two lines; a line may end after a hyphen or a slash.
BROKEN = """
const broken = [];
for (const label of document.querySelectorAll("th, dt, h1, h2, h3, button, nav a, summary, .key, .chip, .plain td:first-child:not(.mono), figcaption b")) {
  const texts = document.createTreeWalker(label, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s\\-\\/]+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index); range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
  }
}
return broken;
"""
AXE = """
const done = arguments[0];
axe.run().then(found => done(found.violations.map(each => `${each.id}: ${each.nodes[0].html}`)));
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
            options = f"data.root={mnist} data.cache_dir={cache} loader.batch_size=48 trainer.accelerator=cpu"
            lockstep.train(["run=x", "task=lit_classifier", *options.split(), "trainer.log_every_n_steps=2"])
    forget()
    return root / "runs/x/report.html"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, mnist, cache) -> Path:
    """Two runs that differ, one that failed, and the page of all three."""
    import runs as ledger

    from lockstep.callbacks import FiniteLoss

    folder = tmp_path_factory.mktemp("runs")
    data = f"data.root={mnist} data.cache_dir={cache} data.image_size=12 trainer.accelerator=cpu"
    options = f"{data} runs_dir={folder} trainer.log_every_n_steps=1".split()

    def crash(self, trainer, *_) -> None:
        raise RuntimeError("as it happens" * 20)

    for lr in (1e-3, 1e-5):
        lockstep.train([f"run=lr-{lr}", f"optim.lr={lr}", "loader.batch_size=48", *options])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FiniteLoss, "on_train_end", crash)
        with pytest.raises(RuntimeError):
            lockstep.train(["run=bad", "loader.batch_size=64", *options])
        patch.setattr("sys.argv", ["runs.py", "html", "--runs-dir", str(folder), "-o", str(folder / "runs.html")])
        ledger.main()
    return folder


@pytest.fixture
def js(driver):
    return driver.execute_script


def texts(driver, selector: str) -> list[str]:
    found = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return driver.execute_script(found, selector)


@pytest.mark.parametrize(("width", "dark"), WINDOWS)
def test_a_page_fits_its_window_and_axe_finds_no_barrier(driver, js, page, width, dark):
    browser.show(driver, page, width=width, dark=dark)
    js("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert driver.get_log("browser") == []
    assert js("return document.documentElement.scrollWidth") <= width
    assert js(WIDER) == []
    assert js(BROKEN) == []
    paper = js("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(18, 20, 24)" if dark else "rgb(255, 255, 255)")
    assert texts(driver, ".headline h1")[0]
    axe = find_spec("axe_core_python")
    if axe is None:
        pytest.skip("all but axe is checked: no axe-core-python (uv sync installs it)")
    js("[...document.querySelectorAll('input[name=compare]')].slice(0, 2).forEach(box => box.click())")
    js(Path(axe.origin).with_name("axe.min.js").read_text())
    assert driver.execute_async_script(AXE) == []


def test_samples_are_filtered_and_enlarged(driver, js, page):
    browser.show(driver, page, width=1280)
    shown = "return [...document.querySelectorAll('#samples figure')].filter(e => e.offsetParent).map(e => [e.dataset.class ?? '', e.dataset.right ?? ''])"
    everything = js(shown)
    for name, place in (("class", 0), ("right", 1)):
        for value in texts(driver, f"select[data-filters={name}] option")[1:]:
            select = f"const e = document.querySelector('select[data-filters={name}]')"
            js(f"{select}; e.value = arguments[0]; e.onchange()", value)
            wanted = [each for each in everything if value in each[place].split("\n")]
            assert js(shown) == wanted
        js("document.querySelectorAll('select[data-filters]').forEach(e => { e.value = ''; e.onchange() })")
    buttons = js("return document.querySelectorAll('button.zoom').length")
    if buttons:
        js("document.querySelector('button.zoom').click()")
        wide = "return document.querySelector('dialog[open] img')?.clientWidth"
        first = js("return document.querySelector('dialog img').src")
        assert js(wide) > 400
        js("document.querySelector('dialog').onkeydown({key: 'ArrowRight'})")
        assert (js("return document.querySelector('dialog img').src") != first) == (buttons > 1)
        js("document.querySelector('dialog').click()")
        assert js(wide) is None
    assert driver.get_log("browser") == []


def test_two_runs_are_compared(driver, js, run_folder):
    browser.show(driver, run_folder / "runs.html", width=1280)
    boxes = "[...document.querySelectorAll('input[name=compare]')]"
    names = js(f"return {boxes}.map(e => e.value)")
    js(f"{boxes}.forEach(e => e.click())")  # of three, the last two
    chosen = js(f"return {boxes}.filter(e => e.checked).map(e => e.value)")
    assert chosen == names[-2:] and len(names) == 3
    js(f"{boxes}.filter(e => e.value == 'bad').forEach(e => e.click())")
    assert texts(driver, ".compare *") == []
    js(f"{boxes}.filter(e => e.value.startsWith('lr') && !e.checked).forEach(e => e.click())")
    assert "optim.lr" in texts(driver, ".compare tbody th") and "val/acc" in texts(driver, ".compare tbody th")
    changes = [int(text.replace("−", "-")) for text in texts(driver, ".compare .matrix tbody td") if text]
    assert sum(changes) == 0 and any(changes)  # both are counts of the same test set
    drawn = js("return [...document.querySelectorAll('.compare .line')].map(e => e.dataset.name)")
    assert set(drawn) == {name for name in names if name != "bad"}
    assert driver.get_log("browser") == []


def test_the_page_of_a_run_that_trains_renews_itself_until_it_is_done(driver, js, run_folder):
    folder = RunFolder(run_folder / "lr-0.001")
    progress = {"total": 12, "epoch": 1, "left": "0:09", "checkpoint": "", "every_s": 0.5}
    means = SimpleNamespace(of_rank_0=set())
    trainer: Any = SimpleNamespace(lightning_module=pl.LightningModule(), strategy=SimpleNamespace(means=means))
    report, last = folder.report(), folder.page_file.read_text()

    def write(step: int, ago_s: float = 0) -> None:
        now = {**progress, "step": step, "written_s": time.time() - ago_s}
        pages.write_page(folder, values_of(Draft.of_run(folder)), report | {"status": "running"}, trainer, (), now)

    def until(script: str, wanted: object) -> None:
        deadline_s = time.monotonic() + 20
        while js(script) != wanted:
            assert time.monotonic() < deadline_s, script
            time.sleep(0.1)

    write(3)
    browser.show(driver, folder.page_file, width=1280)
    value = "return document.querySelector('progress')?.value ?? document.querySelector('.chip')?.textContent"
    until(value, 3)
    js("document.querySelector('[data-unit-to=per]').click()")
    write(9)
    until(value, 9)
    until("return document.body.dataset.unit", "per")  # what was chosen outlives the reload
    write(9, ago_s=1000)
    until("return document.getElementById('news')?.textContent.startsWith('last updated 17 min ago')", True)
    folder.page_file.write_text(last)
    until(value, "done")
    js("document.body.dataset.mine = 'there'")
    time.sleep(1.5)
    assert js("return document.body.dataset.mine") == "there"  # it is not loaded again
    driver.get_log("browser")


def test_tables_are_sorted_by_a_click(driver, js, page):
    browser.show(driver, page, width=1280)
    js("document.querySelectorAll('details').forEach(e => e.open = true)")
    table = "table.sortable" if page.name == "runs.html" else "#metrics table.sortable"
    column = 2 if page.name == "runs.html" else 1  # after the boxes
    for order in (sorted, lambda found: sorted(found, reverse=True)):
        js(f"document.querySelector('{table} th:nth-child({column}) button').click()")
        found = texts(driver, f"{table} tbody td:nth-child({column})")
        keys = [text.casefold() for text in found]
        assert len(found) > 2 and set(keys) == set(order(keys))
        state = js(f"return document.querySelector('{table} th:nth-child({column})').getAttribute('aria-sort')")
        first = js("return arguments[0].localeCompare(arguments[1], undefined, {numeric: true})", found[0], found[-1])
        assert (first < 0) == (state == "ascending")


def test_the_axis_switches_and_the_pointer_shows_values(driver, js, page):
    browser.show(driver, page, width=1280)
    axes = """return [...document.querySelectorAll('.in-per, .in-x')].filter(e => e.closest('.chart').offsetParent || e.offsetParent)
      .filter(e => getComputedStyle(e).display != 'none').map(e => e.classList.contains('in-per'))"""
    assert set(js(axes)) == {False}
    js("document.querySelector('[data-unit-to=per]').click()")
    assert set(js(axes)) == {True}
    tip = js("""
      const svg = [...document.querySelectorAll('.chart svg')].filter(e => e.parentNode.offsetParent && e.querySelector('.line'))[0];
      svg.scrollIntoView();
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 30, clientY: box.top + 40}));
      return svg.parentNode.querySelector('.tip').innerText""")
    assert "seen" in tip and len(tip.splitlines()) >= 2
    assert driver.get_log("browser") == []


def test_commands_are_copied(driver, js, page):
    browser.show(driver, page, width=1280)
    commands = texts(driver, ".command code")
    if page.name == "runs.html":
        assert commands == []
        return
    assert len(commands) == len(texts(driver, "button.copy")) >= 1
    assert all(command.startswith(("python ", "lockstep ")) for command in commands)
    js("document.querySelector('button.copy').click()")
    copied = "setTimeout(() => arguments[0](document.querySelector('button.copy').textContent), 300)"
    assert driver.execute_async_script(copied) == "Copied"
