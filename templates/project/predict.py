"""Lockstep's predict.py for this project. To change the flow, copy Lockstep's predict.py here: it fits on one screen."""

from lockstep import launch

JOB = launch.job("predict")

if __name__ == "__main__":
    launch.main(JOB, "predict")
