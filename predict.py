"""Predict with a checkpoint: a table with a row for each input, under any strategy.

python predict.py run=first input=<folder>                 a table with a row per file
python predict.py run=first input=test gallery=true        the test data, and a page that shows it
python predict.py run=first input=<folder> output=predictions.parquet top_k=5
"""

from typing import TYPE_CHECKING

from lockstep import launch
from lockstep.extras import with_request
from train import data, module

if TYPE_CHECKING:
    from lockstep import DataSet


def predict(config: launch.Settings, data: "DataSet | None") -> None:
    """The part of one process. `config.request` holds the options of predict.py; the rest is the run's config, as for eval.py."""
    from lockstep.extras import prediction

    datamodule = prediction.datamodule(config, data)  # of a part of the data, or of the files
    found = prediction.predict(config, module(config, datamodule), datamodule)
    if found is not None:  # rank 0
        prediction.show_predictions(config, found)


JOB = launch.Job("predict", predict, data, request=with_request)

if __name__ == "__main__":
    launch.main(JOB)
