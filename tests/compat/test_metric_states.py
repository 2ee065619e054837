"""Any metric on any number of processes, with unequal shares, computes what one process computes. Real gloo processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import building
import forked
import numpy as np
import pytest
import torch
from shipped_data import divided
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.detection import MeanAveragePrecision
from torchmetrics.segmentation import MeanIoU
from torchmetrics.wrappers import ClasswiseWrapper

from lockstep.compat.metric_states import in_order
from lockstep.kit.task import Task
from lockstep.launch import local

BATCH, COUNTS, WORLDS = 4, (5, 6), (2, 3)


class Frechet(Metric):
    """Has sums, and lists of texts and of features of different widths, as FrechetInceptionDistance; learns a dtype from its samples."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("features", [], dist_reduce_fx=None)
        self.add_state("texts", [], dist_reduce_fx=None)
        self.add_state("total", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.kept = output.dtype
        self.features += [row[: 1 + int(y)] for row, y in zip(output, target, strict=True)]
        self.texts.append(("-".join(map(str, target.tolist())), len(output)))
        self.total += output[:, :3].double().sum(0)

    def compute(self) -> dict[str, Any]:
        order = torch.arange(1, len(self.features) + 1)
        firsts = torch.stack([row[0] for row in self.features])
        moments = {"mean": firsts.mean(), "in_order": (order * firsts).sum().to(self.kept)}
        words = "-".join(text for text, _ in self.texts)
        texts = float(sum(ord(letter) * (i + 1) for i, letter in enumerate(words)))
        return {
            "widths": sum(len(row) for row in self.features),
            "texts": texts,
            "total": self.total,
            "moments": moments,
        }


class Given(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return batch["index"].float()

    def outputs(self, net: Any, batch: Any) -> Any:
        return batch["output"]


def dense(index: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.rand(6, generator=random), torch.tensor(index % 3)


def values(index: int) -> tuple[Tensor, Tensor]:
    return dense(index)[0][0], dense(index)[0][1]


def masks(index: int) -> tuple[Tensor, Tensor]:
    """One channel per class."""
    classes_2HW = torch.randint(3, (2, 4, 4), generator=torch.Generator().manual_seed(index))
    output, target = nn.functional.one_hot(classes_2HW, 3).permute(0, 3, 1, 2)
    return output, target


def boxes(index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of one image: more boxes than images in a batch, tied scores, and some images without any."""
    random = np.random.default_rng(index)
    corner = random.uniform(0, 50, (0 if index == 2 else 7 + index, 2))
    box = torch.tensor(np.concatenate([corner, corner + 10], 1), dtype=torch.float32)
    label = torch.tensor(random.integers(0, 2, len(box)))
    target = {"boxes": box[: 4 + index], "labels": label[: 4 + index]}
    moved = box + torch.tensor(random.integers(0, 4, (len(box), 1)), dtype=torch.float32)
    return {"boxes": moved, "scores": torch.tensor(random.integers(1, 4, len(box)) / 4), "labels": label}, target


pytestmark = pytest.mark.xdist_group("metric_states")
CASES: dict[str, tuple[Callable[[int], tuple[Any, Any]], Callable[[], Metric]]] = {
    "mean average precision": (boxes, lambda: MeanAveragePrecision(class_metrics=True)),
    "lists and sums": (dense, Frechet),
    "states of the first update": (masks, MeanIoU),
    "a state for each process": (values, PearsonCorrCoef),
    "a wrapper": (dense, lambda: ClasswiseWrapper(MulticlassAccuracy(6, average=None))),
    "one in another": (values, lambda: MinMaxMetric(BinaryAUROCOfValues())),
}


class BinaryAUROCOfValues(BinaryAUROC):
    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, (target > 0.5).long())


def stacked(values: list[Any]) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else values


def figures(case: str, count: int, rank: int, world: int) -> dict[str, float]:
    """Of two evaluations, the second of which has fewer samples."""
    sample, metric = CASES[case]
    made = building.task(Given, metrics={"m": lambda _: metric()})
    found: dict[str, float] = {}
    for turn, total in enumerate((count, max(1, count - 1))):
        made.log = lambda name, value, turn=turn, **_: found.update({f"{turn} {name}": float(value)})
        loader = DataLoader(torch.arange(total), BATCH)
        for place, (index_B, _) in enumerate(divided(loader, rank=rank, world=world, trains=False)):
            output, target = zip(*(sample(int(index)) for index in index_B), strict=True)
            batch = {"output": stacked(list(output)), "target": stacked(list(target)), "index": index_B}
            made.validation_step(batch, place)
        made.log_evaluation("val")
    return found


def process(rank: str, world: str, port: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world))
    found = {f"{case} {count}": figures(case, count, int(rank), int(world)) for case in CASES for count in COUNTS}
    (Path(folder) / f"{rank}-{world}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict]]]:
    folder = tmp_path_factory.mktemp("metrics")
    for world in WORLDS:
        with local.reserve_port() as port:
            given = (str(world), str(port), str(folder))
            processes = [forked.call(__file__, "process", str(rank), *given) for rank in range(world)]
            assert [process.wait(300) for process in processes] == [0] * world
    return {w: [json.loads((folder / f"{rank}-{w}.json").read_text()) for rank in range(w)] for w in WORLDS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*sample", "ignore:.*class", "ignore:The variance")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", COUNTS)
def test_processes_compute_what_one_does(together, case, count):
    alone = figures(case, count, 0, 1)
    assert alone["0 val/count"] == count
    for world, ranks in together.items():
        for found in ranks:
            assert found[f"{case} {count}"] == pytest.approx(alone, rel=1e-6, abs=1e-6, nan_ok=True), world


def test_each_entry_of_a_dict_is_a_figure():
    found = figures("lists and sums", 5, 0, 1)
    assert {name[2:] for name in found} == {
        "val/loss", "val/count", "val/m/widths", "val/m/texts", "val/m/total/0", "val/m/total/1", "val/m/total/2", "val/m/moments/mean", "val/m/moments/in_order",
    }  # fmt: skip


def test_lists_are_joined_in_the_samples_order():
    assert in_order([["a", "b", "d"], ["c", "e"]], [{0: 2, 1: 3}, {0: 1, 1: 2}]) == list("abcde")
    assert in_order([["a", "d"], ["b", "c"]], [{0: 1, 1: 1, 2: 2}, {0: 2}]) == list("abcd")
    assert in_order([["a", "d"], ["b", "c"]], [{0: 3, 1: 2}, {0: 2}]) == list("adbc")  # one that does not only append


def test_torchmetrics_still_communicates_as_often_as_a_list_is_long():
    """So processes with lists of different lengths wait for each other, or receive each other's tensors."""
    calls: list[Tensor] = []
    metric = Frechet()
    metric.update(*(torch.stack(column) for column in zip(*map(dense, range(3)), strict=True)))
    metric.sync(dist_sync_fn=lambda tensor, **_: calls.append(tensor) or [tensor], distributed_available=lambda: True)
    assert len(calls) == 3 + 1
