"""Lockstep's train.py for this project. To change the flow, copy Lockstep's train.py here: it fits on one screen."""

from lockstep import launch

JOB = launch.job("train")

if __name__ == "__main__":
    launch.main(JOB, "train")
