"""The figures of a task over batches, as the engine computes them."""

import numpy as np
import torch

from lockstep.tasks import Task


def evaluated(task: Task, output: np.ndarray, target: np.ndarray, batch: int) -> dict[str, float]:
    """In batches of `batch` and a rest; `loss` is the weighted mean of the samples' losses."""
    metrics = {name: metric.to(torch.float64) for name, metric in task.metrics().items()}
    weighted = weights = 0.0
    for i in range(0, len(target), batch):
        part = {"target": torch.tensor(target[i : i + batch])}
        outputs = torch.tensor(output[i : i + batch])
        loss_B, weight_B = task.loss(outputs, part), task.weight(part)
        weight_B = torch.ones_like(loss_B) if weight_B is None else weight_B
        weighted, weights = weighted + float((loss_B * weight_B).sum()), weights + float(weight_B.sum())
        for metric in metrics.values():
            metric.update(*task.metric_inputs(outputs, part))
    return {"loss": weighted / weights, **{name: float(metric.compute()) for name, metric in metrics.items()}}
