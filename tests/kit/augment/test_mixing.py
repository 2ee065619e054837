"""Mixed samples and their losses: what torchvision and timm make of them with soft targets, for any loss per sample."""

import building
import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from lockstep.errors import UserError
from lockstep.kit import Images
from lockstep.kit.augment import Augmentation, Cutmix, Flip, Mixup, MixupOrCutmix, RandomErasing, Shift
from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification, Regression, Segmentation
from lockstep.training.losses import partner_batch, weighted_loss

MIXES = {"mixup": Mixup(alpha=0.8), "cutmix": Cutmix(), "mixup_cutmix": MixupOrCutmix()}


def batch_of(count: int = 16, **more: torch.Tensor) -> dict:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 12, 15), dtype=torch.uint8, generator=generator)
    return {"input": images, "target": torch.arange(count) % 5, "index": torch.arange(count), **more}


def mixed(name: str, batch: dict) -> dict:
    return changed({name: MIXES[name]}, batch)


def changed(operations: dict, batch: dict) -> dict:
    return Augmentation(operations).on_device(batch, batch["index"].numpy(), seed=0, epoch=0)


def classification(**options: object) -> Classification:
    return building.task(Classification, keys=options, classes=list("abcde"))


def test_mixup_of_numbers_is_the_weighted_mean_of_two_neighbours():
    """tests/kit/augment/test_references.py has images."""
    batch = {**batch_of(), "input": torch.randn(16, 7)}
    made, other = mixed("mixup", batch), batch["input"][torch.arange(16) ^ 1]
    share = made["share"][:, None]
    torch.testing.assert_close(made["input"], share * batch["input"] + (1 - share) * other)
    assert torch.equal(made["target"], batch["target"])


def test_mixup_or_cutmix_gives_each_sample_one_of_them():
    batch = batch_of(200)
    made = mixed("mixup_cutmix", batch)
    own, other = batch["input"], batch["input"][made["partner"]]
    pasted = ((made["input"] == own) | (made["input"] == other)).flatten(1).all(1)
    from_partner = ((made["input"] == other) & (own != other)).flatten(1).float().mean(1)
    assert 60 < int(pasted.sum()) < 140
    assert ((1 - made["share"])[pasted] - from_partner[pasted]).abs().max() < 0.02  # but for pixels that are equal


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("name", "loss"), [*((name, "cross_entropy") for name in MIXES), ("mixup", "bce")])
def test_the_loss_is_the_one_of_timms_soft_targets(name, loss, smoothing):
    batch, logits_BK = mixed(name, batch_of()), torch.randn(16, 5)
    task, theirs = classification(loss=loss, label_smoothing=smoothing), SoftTargetCrossEntropy()
    if loss == "bce":
        theirs = BinaryCrossEntropy(smoothing=smoothing)
        torch.testing.assert_close(task.loss(logits_BK, batch).mean(), theirs(logits_BK, batch["target"]))
    alone_B, weight_B = weighted_loss(task, logits_BK, batch_of())  # not mixed
    assert torch.equal(alone_B, task.loss(logits_BK, batch_of())) and weight_B is None
    loss_B, weight_B = weighted_loss(task, logits_BK, batch)
    assert weight_B is None
    for place, share in enumerate(batch["share"].tolist()):
        pair = batch["target"][[place, place ^ 1]]
        soft = mixup_target(pair, 5, share, smoothing)[:1]  # of a batch, whose partner is the one from its end
        torch.testing.assert_close(loss_B[place], theirs(logits_BK[place : place + 1], soft))


def test_mixing_twice_weighs_the_targets_as_the_images_are_weighed():
    """Two constant images: the share of the own one is read from the pixels."""
    images = torch.zeros(64, 1, 40, 40)
    images[::2] = 1.0
    batch = {"input": images, "target": torch.arange(64), "index": torch.arange(64)}
    one, other = Mixup(alpha=1.0), Mixup(alpha=2.0, probability=0.7)
    made = changed({"a": one, "b": other}, batch)
    own = torch.arange(64) % 2 == 0
    seen = made["input"].mean((1, 2, 3)).where(own, 1 - made["input"].mean((1, 2, 3)))
    torch.testing.assert_close(made["share"], seen, atol=1e-5, rtol=0)


def test_everything_but_the_input_is_the_partners():
    batch = mixed("mixup", batch_of(boxes=torch.randn(16, 4), scale=torch.tensor(2.0), extra={"a": torch.arange(16)}))
    other, swapped = partner_batch(batch), torch.arange(16) ^ 1
    assert other["input"] is batch["input"]
    for name in ("target", "boxes", "index"):
        assert torch.equal(other[name], batch[name][swapped])
    assert torch.equal(other["extra"]["a"], swapped)
    assert other["scale"] == batch["scale"]


class Weighted(Regression):
    def weight(self, batch):
        return batch["weight"]


def weighted() -> tuple[Task, dict, torch.Tensor]:
    return (
        building.task(Weighted, targets=["a"]),
        batch_of(weight=torch.rand(16), target=torch.randn(16)),
        torch.randn(16, 1),
    )


def of_masks() -> tuple[Task, dict, torch.Tensor]:
    task = building.task(Segmentation, classes=["a", "b"], image_size=8)
    return task, with_masks(16, size=(8, 8)), torch.randn(16, 2, 8, 8)


@pytest.mark.parametrize("case", [weighted, of_masks])
def test_losses_and_weights_of_samples_are_mixed(case):
    task, before, output = case()
    batch = mixed("mixup", before)
    loss_B, weight_B = weighted_loss(task, output, batch)
    share_B, swapped = batch["share"], torch.arange(16) ^ 1
    partners = {**batch, **{name: batch[name][swapped] for name in ("target", "weight") if name in batch}}
    (own_B, own_weight_B), (other_B, other_weight_B) = (
        (task.loss(output, each), task.weight(each)) for each in (batch, partners)
    )
    torch.testing.assert_close(weight_B, share_B * own_weight_B + (1 - share_B) * other_weight_B)
    torch.testing.assert_close(loss_B, share_B * own_B * own_weight_B + (1 - share_B) * other_B * other_weight_B)


# --- masks: a mask says where its image is bright ---


def with_masks(count: int = 64, size: tuple[int, int] = (8, 10), **more: torch.Tensor) -> dict:
    coarse = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(0))
    images = (coarse * 255).round().to(torch.uint8)
    target = (images[:, 0] > 127).long()
    return {"input": images, "target": target, "index": torch.arange(count), **more}


def test_cutmix_pastes_masks_with_their_images_and_leaves_the_loss():
    before = with_masks(shape=torch.arange(64))
    made = changed({"cutmix": Cutmix()}, before)
    assert torch.equal(made["target"], (made["input"][:, 0] > 127).long())
    assert not torch.equal(made["target"], before["target"])
    assert "share" not in made and torch.equal(made["shape"], before["shape"])


@pytest.mark.parametrize(
    "operation",
    [Flip(vertical=0.5), RandomErasing(probability=0.0)],
)
@pytest.mark.parametrize("size", [8, 4, 20])
def test_masks_stay_upon_their_images(operation, size):
    data = Images(image_size=size, mean=[0, 0, 0], std=[1, 1, 1])
    before = with_masks(size=(8, 8), shape=torch.arange(64))
    moved = changed({"x": operation}, before)
    assert torch.equal(moved["target"], (moved["input"][:, 0] > 127).long())
    done = data.preprocess(moved)
    assert torch.equal(done["shape"], before["shape"])
    assert (done["target"].dtype, done["target"].shape) == (torch.int64, (64, size, size))


@pytest.mark.parametrize(("operations", "more", "told"), [
    ({"flip": Flip()}, {"boxes": torch.zeros(64, 2, 4)}, r"augment.flip cannot move `boxes`, float32 of shape \(64, 2, 4\), .* ~augment.flip"),
    ({"flip": Flip()}, {"target": [{"boxes": torch.zeros(2, 4), "labels": torch.zeros(2)}] * 64}, r"augment.flip cannot move `target`, list, .* ~augment.flip"),
    ({"flip": Flip()}, {"target": {"boxes": torch.zeros(64, 2, 4), "labels": torch.zeros(64, 2)}}, r"augment.flip cannot move `target`, dict"),
    ({"by": Shift(pixels=8, mask_fill=0)}, {}, r"augment.by.pixels=8 shifts images of 8 x 10 pixels out of view"),
    ({"cut": Cutmix()}, {"boxes": torch.zeros(64, 2, 4)}, r"augment.cut cannot paste a part of `boxes`"),
    ({"cut": Cutmix()}, {"target": torch.zeros(64), "boxes": [torch.zeros(2, 4)] * 64}, r"augment.cut cannot paste a part of `boxes`"),
    ({"cut": Cutmix()}, {"target": torch.zeros(64), "depth": torch.zeros(64, 8, 10)}, r"augment.cut cannot paste a part of `depth`"),
    ({"mixup": Mixup(), "cut": Cutmix()}, {}, r"augment.cut pastes masks, .* Use augment="),
    ({"both": MixupOrCutmix()}, {}, r"augment.both pastes masks, .* Use augment="),
    ({"mixup": Mixup()}, {"input": torch.ones(64, 7, dtype=torch.int64)}, r"mixup needs uint8 images .*, but `input` is int64 of shape \(64, 7\)"),
    ({"mixup": Mixup()}, {"index": torch.arange(3)}, r"augment.mixup mixes pairs, but a batch has 3 samples"),
    ({"flip": Flip()}, {"input": torch.zeros(64, 5)}, r"augment.flip needs uint8 images of one size \(BCHW\), but `input` is float32 of shape \(64, 5\)"),
])  # fmt: skip
def test_what_cannot_be_mixed_or_follow_the_images_is_refused(operations, more, told):
    with pytest.raises(UserError, match=told):
        changed(operations, {**with_masks(), **more})
