"""Lockstep's train.py for this project. To change the flow, copy Lockstep's train.py here: it fits on one screen.

python train.py                                   the defaults of configs/project.yaml
python train.py strategy=ddp trainer.devices=4    the same result, up to rounding, on four devices
python train.py model=resnet50d data=cifar10      a timm network on CIFAR-10
python train.py run=first resume=auto             start the run `first`, or continue it after a crash
python train.py -m optim.lr=1e-3,3e-3 seed=0,1    four runs and a table of their results
"""

from lockstep import launch

JOB = launch.job("train")

if __name__ == "__main__":
    launch.main(JOB, "train")
