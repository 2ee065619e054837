"""Mixed samples and their losses: what torchvision and timm make of them with soft targets, for any loss per sample."""

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

from lockstep.augment import Augmentation, Cutmix, Flip, Mixup, MixupOrCutmix, RandomErasing, Rotate
from lockstep.data import Images
from lockstep.errors import UserError
from lockstep.tasks import Classification, Regression, Segmentation
from lockstep.training.losses import of_partners, weighted_loss

MIXES = {"mixup": Mixup(alpha=0.8), "cutmix": Cutmix(), "mixup_cutmix": MixupOrCutmix()}


def batch_of(count: int = 16, **more: torch.Tensor) -> dict:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 12, 15), dtype=torch.uint8, generator=generator)
    return {"input": images, "target": torch.arange(count) % 5, "index": torch.arange(count), "count": count, **more}


def mixed(name: str, batch: dict) -> dict:
    return Augmentation({name: MIXES[name]})(batch, seed=0, epoch=0)


def classification(**options: object) -> Classification:
    task = Classification(**options)
    task.bind({"classes": list("abcde")})
    return task


def test_mixup_is_the_weighted_mean_of_two_neighbours_of_numbers_and_not_of_tokens():
    partner = torch.arange(16) ^ 1
    for own, rounding in ((batch_of()["input"], 0.5001), (torch.randn(16, 7), 1e-5)):
        batch = {**batch_of(), "input": own}
        made = mixed("mixup", batch)
        share = made["share"].view(-1, *[1] * (own.dim() - 1))
        torch.testing.assert_close(
            made["input"].float(), share * own + (1 - share) * own[partner], atol=rounding, rtol=0
        )
        assert made["input"].dtype == own.dtype
        assert torch.equal(made["target"], batch["target"])
    with pytest.raises(UserError, match=r"mixup changes images of bytes .*; `input` is int64 of shape \(16, 7\)"):
        mixed("mixup", {**batch_of(), "input": torch.ones(16, 7, dtype=torch.int64)})
    with pytest.raises(UserError, match=r"augment.mixup mixes pairs, and a batch has 3 samples"):
        mixed("mixup", batch_of(3))


def test_mixup_or_cutmix_gives_each_sample_one_of_them():
    batch = batch_of(200)
    made = mixed("mixup_cutmix", batch)
    own, other = batch["input"], batch["input"][made["partner"]]
    pasted = ((made["input"] == own) | (made["input"] == other)).flatten(1).all(1)
    from_partner = ((made["input"] == other) & (own != other)).flatten(1).float().mean(1)
    assert 60 < int(pasted.sum()) < 140
    assert ((1 - made["share"])[pasted] - from_partner[pasted]).abs().max() < 0.02  # but for pixels that are equal


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", MIXES)
def test_the_loss_is_the_cross_entropy_of_timms_soft_targets(name, smoothing):
    batch, logits_BK = mixed(name, batch_of()), torch.randn(16, 5)
    task = classification(label_smoothing=smoothing)
    alone_B, weight_B = weighted_loss(
        task, logits_BK, batch_of()
    )  # samples that are not mixed have their loss as it is
    assert torch.equal(alone_B, task.loss(logits_BK, batch_of())) and weight_B is None
    loss_B, weight_B = weighted_loss(task, logits_BK, batch)
    assert weight_B is None
    for place, share in enumerate(batch["share"].tolist()):
        pair = batch["target"][[place, place ^ 1]]
        soft = mixup_target(pair, 5, share, smoothing)[0]  # of a batch, whose partner is the one from its end
        expected = -(soft * logits_BK[place].log_softmax(0)).sum()
        torch.testing.assert_close(loss_B[place], expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing):
    logits_BK, batch = torch.randn(16, 5), batch_of()
    task = classification(loss="bce", label_smoothing=smoothing)
    theirs = BinaryCrossEntropy(smoothing=smoothing)
    torch.testing.assert_close(task.loss(logits_BK, batch).mean(), theirs(logits_BK, batch["target"]))
    made = mixed("mixup", batch)
    loss_B, _ = weighted_loss(task, logits_BK, made)
    for place, share in enumerate(made["share"].tolist()):
        soft = mixup_target(made["target"][[place, place ^ 1]], 5, share, smoothing)
        torch.testing.assert_close(loss_B[place], theirs(logits_BK[place : place + 1], soft[:1]))
    with pytest.raises(UserError, match=r"task.class_weights has no effect with task.loss=bce"):
        classification(loss="bce", class_weights=[1, 1, 1, 1, 1])


def test_mixing_twice_weighs_the_targets_as_the_images_are_weighed():
    """Two constant images: the share of the own one is read from the pixels."""
    images = torch.zeros(64, 1, 40, 40)
    images[::2] = 1.0
    batch = {"input": images, "target": torch.arange(64), "index": torch.arange(64), "count": 64}
    one, other = Mixup(alpha=1.0), Mixup(alpha=2.0, probability=0.7)
    made = Augmentation({"a": one, "b": other})(batch, seed=0, epoch=0)
    own = torch.arange(64) % 2 == 0
    seen = made["input"].mean((1, 2, 3)).where(own, 1 - made["input"].mean((1, 2, 3)))
    torch.testing.assert_close(made["share"], seen, atol=1e-5, rtol=0)


def test_everything_but_the_input_is_the_partners():
    batch = mixed("mixup", batch_of(boxes=torch.randn(16, 4), scale=torch.tensor(2.0), extra={"a": torch.arange(16)}))
    other, swapped = of_partners(batch), torch.arange(16) ^ 1
    assert other["input"] is batch["input"]
    for name in ("target", "boxes", "index"):
        assert torch.equal(other[name], batch[name][swapped])
    assert torch.equal(other["extra"]["a"], swapped)
    assert (other["scale"], other["count"]) == (batch["scale"], 16)


class Weighted(Regression):
    def weight(self, batch):
        return batch["weight"]


def test_weights_of_samples_are_mixed_with_their_losses():
    batch = mixed("mixup", batch_of(weight=torch.rand(16), target=torch.randn(16)))
    output = torch.randn(16, 1)
    loss_B, weight_B = weighted_loss(Weighted(), output, batch)
    for place, share in enumerate(batch["share"].tolist()):
        errors = [(output[place, 0] - batch["target"][p]) ** 2 * batch["weight"][p] for p in (place, place ^ 1)]
        torch.testing.assert_close(loss_B[place], share * errors[0] + (1 - share) * errors[1])
        weights = [batch["weight"][p] for p in (place, place ^ 1)]
        torch.testing.assert_close(weight_B[place], share * weights[0] + (1 - share) * weights[1])


# --- masks: a mask says where its image is bright ---


def with_masks(count: int = 64, size: tuple[int, int] = (8, 10), **more: torch.Tensor) -> dict:
    coarse = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(0))
    images = (coarse * 255).round().to(torch.uint8)
    return {
        "input": images,
        "target": (images[:, 0] > 127).long(),
        "index": torch.arange(count),
        "count": count,
        **more,
    }


def test_cutmix_pastes_masks_with_their_images_and_leaves_the_loss():
    before = with_masks(shape=torch.arange(64))
    made = Augmentation({"cutmix": Cutmix()})(before, seed=0, epoch=0)
    assert torch.equal(made["target"], (made["input"][:, 0] > 127).long())
    assert not torch.equal(made["target"], before["target"])
    assert "share" not in made and torch.equal(made["shape"], before["shape"])


def test_mixup_mixes_the_losses_of_masks():
    batch = Augmentation({"mixup": Mixup()})(with_masks(size=(8, 8)), seed=0, epoch=0)
    task = Segmentation()
    task.bind({"classes": ["a", "b"], "image_size": 8})
    output = torch.randn(64, 2, 8, 8)
    loss_B, weight_B = weighted_loss(task, output, batch)
    losses = [
        F.cross_entropy(output, batch["target"][p], reduction="none").mean((1, 2))
        for p in (torch.arange(64), torch.arange(64) ^ 1)
    ]
    torch.testing.assert_close(loss_B, batch["share"] * losses[0] + (1 - batch["share"]) * losses[1])
    torch.testing.assert_close(weight_B, torch.ones(64))


@pytest.mark.parametrize(
    "operation",
    [Flip(vertical=0.5), RandomErasing(probability=0.0), Rotate(degrees=90, interpolation="nearest", mask_fill=0)],
)
@pytest.mark.parametrize("size", [8, 4, 20])
def test_masks_stay_upon_their_images(operation, size):
    data = Images(image_size=size, mean=[0, 0, 0], std=[1, 1, 1])
    before = with_masks(size=(8, 8), shape=torch.arange(64))
    moved = Augmentation({"x": operation})(before, seed=0, epoch=0)
    assert torch.equal(moved["target"], (moved["input"][:, 0] > 127).long())
    done = data.preprocess(moved)
    assert torch.equal(done["shape"], before["shape"])
    assert (done["target"].dtype, done["target"].shape) == (torch.int64, (64, size, size))


@pytest.mark.parametrize(("operations", "more", "told"), [
    ({"turn": Rotate(degrees=9)}, {}, r"augment.turn uncovers pixels, and `target` needs a value .* Set augment.turn.mask_fill="),
    ({"flip": Flip()}, {"boxes": torch.zeros(64, 2, 4)}, r"augment.flip cannot move `boxes` of shape \(64, 2, 4\) .* ~augment.flip"),
    ({"cut": Cutmix()}, {"boxes": torch.zeros(64, 2, 4)}, r"augment.cut cannot paste a part of `boxes`"),
    ({"cut": Cutmix()}, {"target": torch.zeros(64), "depth": torch.zeros(64, 8, 10)}, r"augment.cut cannot paste a part of `depth`"),
    ({"mixup": Mixup(), "cut": Cutmix()}, {}, r"augment.cut pastes masks, .* Use augment="),
    ({"both": MixupOrCutmix()}, {}, r"augment.both pastes masks, .* Use augment="),
    ({"flip": Flip()}, {"input": torch.zeros(64, 5)}, r"augment.flip changes images of bytes \(uint8, BCHW\); `input` is float32 of shape \(64, 5\)"),
])  # fmt: skip
def test_what_cannot_follow_the_images_is_refused(operations, more, told):
    with pytest.raises(UserError, match=told):
        Augmentation(operations)({**with_masks(), **more}, seed=0, epoch=0)
