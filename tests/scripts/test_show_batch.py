"""The picture of a batch shows what training sees."""

import numpy as np
import pytest
import show_batch
import torch
from in_process import options
from PIL import Image
from show_batch import GAP, LINE, MARGIN, caption, name, with_mask

from lockstep.errors import UserError
from project.module import Classifier


@pytest.mark.slow
def test_it_shows_the_samples_of_a_step_as_training_gets_them(train, mnist, cache, tmp_path, monkeypatch):
    given = ["augment=strong", "loader.repeats=2", "data.image_size=28", "seed=3"]
    show_batch.show([*options(mnist, cache), *given], count=10, step=4, epoch=1, out=tmp_path / "a.png")
    seen = {}

    def training_step(self, batch, place):
        seen[self.trainer.current_epoch, place] = batch["input"].clone()
        return self.mean_loss(self(batch), batch)

    monkeypatch.setattr(Classifier, "training_step", training_step)
    train(*given, "trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.precision=32-true")
    drawn, side = np.asarray(Image.open(tmp_path / "a.png")), 112
    for place in range(10):
        top, left = GAP + place // 8 * (2 * (side + GAP) + LINE + GAP), MARGIN + place % 8 * (side + GAP)
        tile = drawn[top + side + GAP :, left:][:side:4, :side:4, 0]
        expected = seen[1, 4][place, 0] * 0.3081 + 0.1307
        assert np.array_equal(tile, (expected * 255).round().byte().numpy())


def test_targets_in_words():
    assert name(1, {"classes": ["cat", "dog"]}) == "dog"
    assert name([1, 0, 1], {"labels": ["a", "b", "c"]}) == "a, c"
    assert name(0.25, {}) == "0.25"
    assert name([0.5, 12.0], {}) == "0.5, 12"
    assert name([[0, 1]], {"classes": ["a"]}) == ""
    batch = {"target": torch.tensor([0, 1]), "share": torch.tensor([0.7, 1.0]), "partner": torch.tensor([1, 0])}
    assert caption(batch, 0, {"classes": ["cat", "dog"]}) == "70% cat + 30% dog"


@pytest.mark.parametrize("text", ["Löwe", "ñandú", "лев", "λέων", "şahin"])
def test_letters_of_other_scripts_are_drawn(text):
    font, absent = show_batch.font_for(text), "\U0010fffd"
    drawn = [bytes(font.getmask(character)) for character in [*text, absent]]
    assert drawn.count(drawn[-1]) == 1  # which is how a font draws what it lacks


def test_masks_are_laid_over_their_images():
    image, mask = np.full((4, 5, 3), 100, np.uint8), np.zeros((4, 5), np.int64)
    mask[2, 3] = 1
    drawn = np.asarray(with_mask(image, mask))
    assert (drawn != image).any(2).nonzero() == (2, 3)
    assert np.array_equal(with_mask(image, np.array(3)), image)


def test_what_is_wrong_is_told(mnist, cache, tmp_path):
    for more, step, told in (
        (["augment=strng"], 0, "augment has no option strng"), (["augment=crop", "augment.crop.scale=[2,3]"], 0, "augment.crop.scale="),
        ([], 12, "an epoch has 12 steps, so step 12 does not exist"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            show_batch.show([*options(mnist, cache), *more], count=2, step=step, epoch=0, out=tmp_path / "a.png")


def test_several_inputs_are_not_shown():
    with pytest.raises(UserError, match="only images can be shown; `input` is dict"):
        show_batch.bytes_of({"input": {"left": torch.ones(2, 3)}}, {})
