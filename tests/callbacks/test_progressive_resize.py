"""Progressive resizing: sizes over a run, images and masks, the same with accumulation and after a resume."""

import pytest
import torch
from in_process import same, state
from torch.nn import functional as F

from lockstep.errors import UserError
from lockstep.extras.progressive_resize import ProgressiveResize

RESIZED = [
    "callbacks=[default,progressive_resize]", "data.image_size=28", "model=timm", "model.name=test_resnet", "loader.batch_size=16",
    "trainer.max_steps=8", "trainer.precision=32-true", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
]  # fmt: skip


def test_images_grow_from_the_first_size_to_whole_ones():
    resize = ProgressiveResize(initial_scale=0.5, delay_fraction=0.5, finetune_fraction=0.2, size_increment=4)
    sides = [resize.side(224, step / 100) for step in range(100)]
    assert sides[:51] == [112] * 51 and sides[80:] == [224] * 20
    assert sides == sorted(sides) and {side % 4 for side in sides} == {0}
    assert sides[65] == int((0.5 + 0.5 * 0.5) * 224)  # half of the growth
    assert resize.side(30, 0.0) == 12 and resize.side(30, 1.0) == 30  # no multiple of 4, but whole


def test_images_are_interpolated_and_masks_keep_their_values():
    image, mask = torch.rand(2, 3, 16, 16), torch.randint(0, 5, (2, 16, 16))
    batch = {"input": image, "target": mask, "index": torch.arange(2), "count": 2}
    found = ProgressiveResize(0.5).resized(batch, 0.0)
    torch.testing.assert_close(found["input"], F.interpolate(image, size=8, mode="bilinear", antialias=True))
    assert found["target"].shape == (2, 8, 8) and set(found["target"].unique().tolist()) <= set(range(5))
    assert ProgressiveResize(0.5).resized(batch, 0.9) is batch


def test_boxes_would_stay_behind_and_are_refused():
    images, boxes = torch.rand(2, 3, 16, 16), [{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}]
    with pytest.raises(UserError, match="only images and masks"):
        ProgressiveResize(0.5).resized({"input": images, "target": boxes}, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"initial_scale": 0}, {"initial_scale": 1.5}, {"delay_fraction": 0.9}, {"size_increment": 0}]
)
def test_fractions_that_are_no_parts_of_a_run_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProgressiveResize(**wrong)


@pytest.mark.parametrize(("given", "told"), [
    (RESIZED[:2], "shapes cannot be multiplied"),  # a network for images of one size
    ([*RESIZED, "trainer.max_steps=-1", "trainer.max_epochs=-1", "schedule=constant"], "trainer.max_steps=<n>"),
])  # fmt: skip
def test_a_run_that_it_does_not_fit_leaves_no_folder(train, tmp_path, given, told):
    with pytest.raises((UserError, RuntimeError), match=told):
        train("run=a", *given)
    assert not (tmp_path / "runs/a").exists()


@pytest.mark.slow
def test_sizes_are_those_of_the_step_with_accumulation_and_after_a_resume(train, monkeypatch, crash_at):
    seen: list[int] = []
    start = ProgressiveResize.on_train_batch_start

    def recorded(self, trainer, module, batch, place):
        start(self, trainer, module, batch, place)
        seen.append(batch["input"].shape[-1])

    monkeypatch.setattr(ProgressiveResize, "on_train_batch_start", recorded)
    sizes = [12, 12, 12, 12, 12, 16, 24, 28]
    given = [*RESIZED, "checkpoint.every_n_steps=1"]
    train("run=a", *given)
    assert seen == sizes
    crash_at(6)
    with pytest.raises(RuntimeError):
        train("run=b", *given)
    crash_at(-1)
    seen.clear()
    train("run=b", "resume=auto", *given)
    assert seen == sizes[-len(seen) :] and len(seen) < 8
    assert same(state("a/checkpoints/last.ckpt")["state_dict"], state("b/checkpoints/last.ckpt")["state_dict"])
    seen.clear()
    train("run=c", *RESIZED, "trainer.accumulate_grad_batches=2")
    assert seen == [side for side in sizes for _ in range(2)]
