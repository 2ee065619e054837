"""Predict with a checkpoint: a table with a row for each input, under any strategy.

python predict.py run=first input=<folder>                 a table with a row per file
python predict.py run=first input=test gallery=true        the test data, and a page that shows it
python predict.py run=first input=<folder> output=predictions.parquet top_k=5
"""

from lockstep import launch


def predict(settings: launch.Settings) -> None:
    """The part of one process. `settings.request` says what is asked for; the rest is the run's config, as for eval.py."""
    from lockstep import build
    from lockstep.extras import prediction

    build.process(settings)
    data = prediction.data(settings)
    work = build.workload(settings, data, weights=settings.tested_checkpoint)
    found = prediction.predict(settings, data, work)
    if found is not None and settings.request:  # rank 0
        asked, path = settings.request, settings.evaluation_file("predict")
        result = {"input": asked.input, "output": asked.output, "count": found.count, "broken": found.broken}
        prediction.show_predictions(path, build.evaluation_info(settings), result, asked.gallery)


JOB = predict

if __name__ == "__main__":
    launch.main(JOB, "predict")
