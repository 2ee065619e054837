"""Outputs are cut by samples, whatever their form; what has no sample is refused, not guessed."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from lockstep.errors import UserError
from lockstep.training.losses import first_rows, samples_at

B = 4
Two = namedtuple("Two", "logits embedding")


def rows(size: int, *more: int) -> torch.Tensor:
    return torch.arange(size).view(-1, *[1] * len(more)).expand(size, *more)


def test_a_list_of_boxes_keeps_all_boxes_of_the_samples_that_count():
    images = [{"boxes": rows(30, 4), "scores": rows(30)} for _ in range(B)]
    found = first_rows(images, 2, B)
    assert found == images[:2] and len(found[0]["boxes"]) == 30


def test_a_list_that_may_hold_samples_or_outputs_is_refused_where_it_would_be_cut():
    """Four levels of features, and a last batch of four or of three samples."""
    levels = [rows(B, 2, size) for size in (8, 4, 2, 1)]
    assert first_rows(levels, B, B) == levels
    with pytest.raises(UserError, match=r"output\['levels'\], a list of 4 tensors with 4 rows each"):
        first_rows({"levels": levels}, 3, B)
    for found in (first_rows(tuple(levels), 3, B), first_rows([rows(6, 2)] * B, 3, 6)):
        assert [len(level) for level in found] == [3] * B


@pytest.mark.parametrize("form", [
    lambda x: x, lambda x: (x, x), lambda x: [x, x, x], lambda x: {"a": x, "b": (x, None)}, lambda x: Two(x, [x]),
    lambda x: (x,) * B, lambda x: OrderedDict(a=x),
])  # fmt: skip
def test_tensors_are_cut_wherever_they_are(form):
    found, expected = first_rows(form(rows(B, 3)), 2, B), form(rows(2, 3))
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("output", "told"), [
    (torch.tensor(1.0), r"output of shape \(\) for a batch of 4"),
    ({"logits": rows(B), "loss": torch.tensor(1.0)}, r"output\['loss'\] of shape \(\) for a batch of 4"),
    ((rows(B), rows(7, 2)), r"output\[1\] of shape \(7, 2\) for a batch of 4"),
    ({"scale": 2.0}, r"output\['scale'\] of type float"),
])  # fmt: skip
def test_what_has_no_sample_is_refused_by_name_and_shape(output, told):
    with pytest.raises(UserError, match=told):
        first_rows(output, 2, B)


def test_a_batch_may_hold_other_things_than_samples():
    batch = {"input": rows(B), "index": rows(B), "names": list("abcd"), "boxes": [rows(9)] * B, "of": {"x": rows(B)}, "anchors": rows(9), "views": [rows(B), rows(B)], "size": torch.Size((7, 9)), "count": 3}  # fmt: skip
    found = samples_at(batch, slice(3), B)
    assert [len(view) for view in found.pop("views")] == [3, 3]
    assert found.pop("size") == torch.Size((7, 9))
    sizes = {name: len(value) for name, value in found.items() if name not in ("count", "of")}
    assert sizes == {"input": 3, "index": 3, "names": 3, "boxes": 3, "anchors": 9}
    assert (len(found["boxes"][0]), len(found["of"]["x"]), found["count"]) == (9, 3, 3)
    assert samples_at(batch, [2, 0], B)["names"] == ["c", "a"]
