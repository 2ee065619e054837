"""Lockstep's predict.py for this project. To change the flow, copy Lockstep's predict.py here: it fits on one screen.

python predict.py run=first input=<folder>                 a table with a row per file
python predict.py run=first input=test gallery=true        the test data, and a page that shows it
python predict.py run=first input=<folder> output=predictions.parquet top_k=5
"""

from lockstep import launch

JOB = launch.job("predict")

if __name__ == "__main__":
    launch.main(JOB, "predict")
