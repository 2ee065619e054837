"""Lockstep's eval.py for this project. To change the flow, copy Lockstep's eval.py here: it fits on one screen.

python eval.py run=first                                   evaluate the checkpoint that the run `first` tested
python eval.py run=first data.root=<folder>                evaluate it on different data
python eval.py checkpoint=<path> strategy=ddp trainer.devices=4
"""

from lockstep import launch

JOB = launch.job("eval")

if __name__ == "__main__":
    launch.main(JOB, "eval")
