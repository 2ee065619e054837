"""What a task's `describe` says of a sample, in report.html and panels.json: pictures, curves, and texts of any length."""

import base64
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import thin_project
import torch
import your_own
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

import lockstep
from lockstep.config.draft import Draft, values_of
from lockstep.errors import UserError
from lockstep.extras import page as pages
from lockstep.extras.panels import SIDE, SMALL
from lockstep.kit.panels import Gallery, Lines, Picture, Sample
from lockstep.reporting.report import read_panels
from lockstep.run import RunFolder

pytestmark = pytest.mark.xdist_group("samples")
DATA = """
import numpy as np
from lockstep import Arrays, DataSet

class Circles(DataSet):
    def __init__(self):
        self.metadata = {"mean": [0.25], "std": [0.5]}
        random, place_S = np.random.default_rng(0), np.arange(16)
        centre_N2, radius_N = random.uniform(4, 12, (60, 2)), random.uniform(2, 5, 60)
        row_NS, column_NS = (place_S - centre_N2[:, k, None] for k in (0, 1))
        image_NHW = np.hypot(row_NS[:, :, None], column_NS[:, None]) < radius_N[:, None, None]
        images = (image_NHW * 255).astype(np.uint8)[:, None]
        self.train, self.test = (Arrays(input=images[part]) for part in (slice(40), slice(40, 60)))

    def preprocess(self, batch):
        return {**batch, "input": (batch["input"] / 255 - 0.25) / 0.5}

class Demand(DataSet):
    def __init__(self):
        self.metadata = {}
        hour_NT = np.random.default_rng(0).uniform(0, 24, (60, 1)) + np.arange(36)
        demand_NT = (50 + 20 * np.sin(hour_NT / 24 * 2 * np.pi)).astype(np.float32)
        parts = [demand_NT[part] for part in (slice(40), slice(40, 60))]
        self.train, self.test = (Arrays(input=part[:, :24], target=part[:, 24:]) for part in parts)
"""
NETS = """
from torch import nn

class Coder(nn.Sequential):
    def __init__(self):
        narrow = [nn.Flatten(), nn.Linear(256, 16), nn.ReLU()]
        super().__init__(*narrow, nn.Linear(16, 256), nn.Unflatten(1, (1, 16, 16)))

class Ahead(nn.Linear):
    def __init__(self):
        super().__init__(24, 12)
"""
SHOUTING = """
import math

from lockstep.kit.panels import Picture
from mywork.samples import Autoencoder, Forecast

TEXT = "<script>alert(1)</script> \\x1b[31m" + "x" * 5000

class Predicted(Autoencoder):
    def predictions(self, output):
        return {"brightness": output.mean((1, 2, 3))}

class Shouting(Forecast):
    def describe(self, output, batch):
        found = super().describe(output, batch)
        found[0]["demand"].series["history"][5] = (5.0, math.nan)
        return [{"prediction": TEXT, **facts} for facts in found]

class Logits(Predicted):
    def describe(self, output, batch):
        return [{"reconstruction": Picture(image - 1)} for image in output]

class Untold(Predicted):
    def describe(self, output, batch):
        return [{"target": batch["target"][place], **row} for place, row in enumerate(super().describe(output, batch))]
"""
DOCUMENTED = your_own.Page("panel").files["src/mywork/samples.py"]
OPTIONS = ["data=own", "model=own", "task=own", "loader.batch_size=8", "trainer.max_steps=60", "optim.lr=1e-2", "trainer.accelerator=cpu"]  # fmt: skip
CODER = ["data._target_=mywork.data.Circles", "model._target_=mywork.nets.Coder"]
AHEAD = ["data._target_=mywork.data.Demand", "model._target_=mywork.nets.Ahead"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forked) -> Iterator[Path]:
    """A project with the page's two tasks, each of which has trained."""
    files = {"__init__": "", "data": DATA, "nets": NETS, "samples": DOCUMENTED, "shouting": SHOUTING}
    package = {f"src/mywork/{name}.py": text for name, text in files.items()}
    your_own.forget()  # of another file's project
    with thin_project.entered(tmp_path_factory.mktemp("samples"), "mywork", **package) as place:
        lockstep.train(["run=coder", *OPTIONS, *CODER, "task._target_=mywork.shouting.Predicted"])
        lockstep.train(["run=ahead", *OPTIONS, *AHEAD, "task._target_=mywork.shouting.Shouting"])
        yield place
    your_own.forget()


def samples_of(run: str) -> tuple[str, list[Sample]]:
    """The report's section of samples, and those with the largest losses: the whole test set."""
    page = Path("runs", run, "report.html").read_text().split('<section id="samples">')[1].split("</section>")[0]
    return page, list(lockstep.load_report(run).panels["Largest losses"].samples)


def pixels(uri: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_reconstructions_stand_beside_the_images(place):
    page, samples = samples_of("coder")
    figures = page.split('<div class="pair">')[1:]
    assert len(figures) == len(samples) == 20
    for figure, sample in zip(figures, samples, strict=True):
        shown = re.findall(r'<img src="([^"]+)" alt="(\w+)" class="few">', figure.split("</figure>")[0])
        assert [name for _, name in shown] == ["sample", "reconstruction"]
        image_CHW, again_CHW = sample.image_CHW, sample.facts["reconstruction"].image_CHW
        assert (pixels(shown[0][0]) == image_CHW[0]).all() and (pixels(shown[1][0]) == again_CHW[0]).all()
        error = ((again_CHW.astype(float) - image_CHW) / 255 / 0.5) ** 2
        assert error.mean() <= sample.facts["loss"] + 0.01  # clamping brings it nearer
    assert '<div class="gallery masks">' in page


def test_a_forecast_is_drawn_as_the_other_charts_with_a_gap_at_a_nan(place):
    page, samples = samples_of("ahead")
    assert page.count('<div class="chart">') == page.count("<svg ") == len(samples) == 20
    first, second = page.split('<div class="chart">')[1:3]
    for figure, parts in ((first, [2, 1, 1]), (second, [1, 1, 1])):
        assert [path.count("M") for path in re.findall(r'<path d="([^"]*)"', figure)] == parts
        assert re.findall(r'data-name="(\w+)" data-values', figure) == ["history", "target", "prediction"]
        assert re.findall(r'<span class="key c\d">(\w+)</span>', figure) == ["history", "target", "prediction"]
        assert "<p>Demand<small>MW</small></p>" in figure
    series = samples[0].facts["demand"].series
    assert math.isnan(series["history"][5][1]) and [len(series[name]) for name in series] == [24, 12, 12]
    errors = [(a - b) ** 2 for (_, a), (_, b) in zip(series["target"], series["prediction"], strict=True)]
    assert sum(errors) / 12 == pytest.approx(samples[0].facts["loss"], rel=1e-3)


def figures(gallery: str) -> dict[int, str]:
    """By the index of the sample."""
    return {int(re.findall(r"#(\d+)</small>", each)[0]): each for each in gallery.split("<figure")[1:]}


@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="one"), pytest.param(("strategy=ddp", "trainer.devices=2"), id="ddp", marks=pytest.mark.slow)],
)
def test_the_gallery_of_predictions_shows_the_same(place, tmp_path, more):
    shown = {}
    for run in ("coder", "ahead"):
        asked = [f"run={run}", "input=test", "gallery=true", f"output={tmp_path}/{run}.csv", "trainer.accelerator=cpu"]
        lockstep.predict([*asked, "loader.eval_batch_size=8", *more])
        in_predictions = figures((tmp_path / f"{run}-gallery.html").read_text().split("<dialog")[0])
        in_report = figures(samples_of(run)[0].split('<div class="wide">')[1])
        assert in_predictions.keys() == in_report.keys() == set(range(20))
        shown[run] = [(in_predictions[index], in_report[index]) for index in range(20)]
    for pair in shown["coder"]:
        uris = [re.findall(r'<img src="([^"]+)" alt="(?:sample|reconstruction)"', figure) for figure in pair]
        for one, other in zip(*uris, strict=True):  # of batches of another size
            assert len(uris[0]) == 2 and np.abs(pixels(one).astype(int) - pixels(other)).max() <= 1
    for pair in shown["ahead"]:
        values = [re.findall(r'data-name="(\w+)" data-values="([^"]+)"', figure) for figure in pair]
        assert [name for name, _ in values[0]] == ["history", "target", "prediction"]
        assert [len(text.split()) for _, text in values[0]][1:] == [12, 12]
        for (_, one), (_, other) in zip(*values, strict=True):
            ends = [float(text.split()[-1].split(",")[1]) for text in (one, other)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-3)


@pytest.mark.parametrize(("task", "said"), [("Logits", "lacks pictures and curves, because `describe` failed: UserError: Picture: expected"), ("Untold", "")])  # fmt: skip
def test_a_gallery_without_pictures_says_why(place, tmp_path, task, said, capsys):
    """A `describe` that needs the target of files is no mistake."""
    asked = ["run=coder", "input=test", "gallery=true", f"output={tmp_path}/a.csv", "trainer.accelerator=cpu"]
    lockstep.predict([*asked, "loader.eval_batch_size=8", f"task._target_=mywork.shouting.{task}"])
    printed = "".join(capsys.readouterr())
    assert printed.count("describe") == printed.count(said or "describe") == bool(said)
    assert (tmp_path / "a-gallery.html").read_text().count("<img ") == 20


def test_a_long_text_is_escaped_and_its_controls_are_seen(place):
    page, samples = samples_of("ahead")
    assert page.count(f"<small>prediction &lt;script&gt;alert(1)&lt;/script&gt; \\x1b[31m{'x' * 5000}</small>") == 20
    assert "<script" not in page and "\x1b" not in page
    assert "\x1b[31m" in samples[0].facts["prediction"]  # in Python, it is what the task said


@given(arrays.arrays(np.uint8, st.tuples(st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9))))
def test_bytes_and_fractions_make_the_same_picture(image_CHW):
    fraction_CHW = torch.from_numpy(image_CHW / np.float32(255))
    for same in (image_CHW, torch.from_numpy(image_CHW), fraction_CHW, fraction_CHW.double().requires_grad_()):
        found = Picture(same).image_CHW
        assert found.dtype == np.uint8 and (found == image_CHW).all()
    rounded = Picture(fraction_CHW.bfloat16()).image_CHW
    assert np.abs(rounded.astype(int) - image_CHW).max() <= 1


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(4, 4), r"not float32 \(4, 4\)"),
        (np.zeros((4, 4, 3), np.uint8), r"not uint8 \(4, 4, 3\)"),
        (torch.zeros(2, 4, 4), "with 1 or 3 channels"),
        (torch.zeros(1, 0, 4), r"\(1, 0, 4\)"),
        (None, r"not object \(\)"),
        (torch.full((1, 2, 2), 1.5), "floats from 0 to 1, not float32"),
        (torch.full((1, 2, 2), math.nan), "floats from 0 to 1, not float32"),
        (torch.full((1, 2, 2), 255), "not int64"),
        (np.zeros((1, 2, 2), bool), "not bool"),
    ],
)
def test_what_is_no_picture_is_told(image, said):
    with pytest.raises(UserError, match=said):
        Picture(image)


def test_curves_are_points_of_any_numbers():
    points_T2 = torch.tensor([[0.0, 1.0], [1.0, math.nan]])
    for points in (points_T2, points_T2.numpy(), [*points_T2], enumerate([1.0, math.nan])):
        assert str(Lines("", "", "", {"a": points}).series) == "{'a': [(0.0, 1.0), (1.0, nan)]}"
    for wrong in ([1.0, 2.0], [("a", 1)], None, [(1, 2, 3)], [(1, None)]):
        with pytest.raises((TypeError, ValueError)):
            Lines("D", "x", "y", {"b": wrong})


def test_large_pictures_and_curves_are_small_in_the_file_and_on_the_page(tmp_path, run_a):
    noise_CHW = np.random.default_rng(0).random((3, 1000, 700), dtype=np.float32)
    curve = Lines("long", "x", "y", {"a": enumerate(noise_CHW[0].flatten())})
    gallery = Gallery("large", [Sample(0, {"noise": Picture(noise_CHW), "curve": curve})])
    folder = RunFolder("runs/a")
    pages.write_page(folder, values_of(Draft.of_run(folder)), run_a, None, [gallery])
    assert max(path.stat().st_size for path in (folder.panels_file, folder.page_file)) < 60_000
    facts = read_panels(folder.panels_file)[0].samples[0].facts
    assert facts["noise"].image_CHW.shape == (3, SIDE, 90)
    assert 100 < len(facts["curve"].series["a"]) <= SMALL
    assert max(y for _, y in facts["curve"].series["a"]) == noise_CHW[0].max()


WIDTHS = """
return [...document.querySelectorAll('#samples .wide:first-child figure')].map(figure => {
  const box = figure.getBoundingClientRect();
  return Math.max(...[...figure.querySelectorAll('*')].map(each => each.getBoundingClientRect().right - box.right));
})
"""
SIZES = """
return [...document.querySelectorAll('#samples .wide:first-child figure')].map(figure =>
  [...figure.querySelectorAll('img, svg')].map(each => [each.clientWidth, each.clientHeight]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of selenium
def test_a_browser_shows_them_within_their_columns(place):
    browser = pytest.importorskip("browser")  # of benchmarks, which a copy may leave out
    if why := browser.missing():
        pytest.skip(why)
    with browser.browser() as driver:
        for width, dark in ((1280, False), (390, True)):
            for run in ("coder", "ahead"):
                browser.show(driver, Path("runs", run, "report.html"), width=width, dark=dark)
                assert driver.get_log("browser") == []
                assert driver.execute_script("return document.documentElement.scrollWidth") <= width
                assert max(driver.execute_script(WIDTHS)) <= 1
                for sizes in driver.execute_script(SIZES):
                    if run == "coder":
                        assert len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0][0] >= 100
                    else:
                        assert len(sizes) == 1 and sizes[0][0] >= 300
        tip = """
          const svg = document.querySelector('#samples svg'), box = svg.getBoundingClientRect();
          svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 30, clientY: box.top + 40}));
          return svg.parentNode.querySelector('.tip').textContent"""
        assert re.fullmatch(r"hour 3\d\ntarget  .*\nprediction  .*", driver.execute_script(tip))
