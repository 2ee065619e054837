"""Lockstep's eval.py for this project. To change the flow, copy Lockstep's eval.py here: it fits on one screen."""

from lockstep import launch

JOB = launch.job("eval")

if __name__ == "__main__":
    launch.main(JOB, "eval")
