"""The line about the result beside what it is about: the weights after ten steps in one process and in two."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import thin_project
import torch

import lockstep
from lockstep.errors import RunFailed
from lockstep.training.invariance import DIFFERS, ROUNDING, SAME_BITS

SAME = re.escape(ROUNDING) + r"; tested with \d+ training samples"
WHY = DIFFERS.format("")
FREEZE = "callbacks=[default,freeze] callbacks.freeze.parameters"
CASES = {
    "plain": ("Net Fit", SAME),
    "dropout on padded batches": ("DroppedNet Fit", SAME),
    "pooling over padding": ("PooledNet Fit", rf"{WHY}the result of Fit .* depends on the other samples .*logical_ranks=8"),
    "masked mean": ("Net OfKnown", rf"{WHY}the result of OfKnown .* depends on the other samples"),
    "masked mean by weights": ("Net Weighted", SAME),
    "masked autoencoder": ("MaskedNet Fit", rf"{WHY}each process draws its own random numbers in MaskedNet"),
    "contrastive": ("Net Compared", rf"{WHY}the result of Compared .* depends on the other samples"),
    "a loss between samples": ("Net Announced data.samples=Fixed", SAME),
    "batch norm": ("NormedNet Fit", rf"{WHY}batch normalisation"),
    "batch norm from the second epoch on": (f"NormedNet Fit {FREEZE}=[norm.*] callbacks.freeze.unfreeze=[[*,1]]", rf"{WHY}batch normalisation"),
    "batch norm that stays frozen": (f"NormedNet Fit {FREEZE}=[norm.*]", SAME),
    "a gradient penalty of each sample": ("Net Smooth data.samples=Fixed", SAME),
    "a gradient penalty of the whole batch": ("Net SmoothOverall", rf"{WHY}the loss of SmoothOverall .* depends on the other samples"),
    "a term of the whole batch": ("Net Spread", rf"{WHY}the loss of Spread .* depends on the other samples"),
    "F.dropout": ("FunctionalNet Fit", rf"{WHY}each process draws its own random numbers in FunctionalNet"),
    "attention dropout": ("AttentiveNet Fit", rf"{WHY}each process draws its own random numbers in MultiheadAttention"),
    "a buffer that is written": ("CenteredNet Fit", rf"{WHY}the buffer center is updated"),
    "graphs": ("GraphNet OfGraphs data.samples=Graphs", SAME),
}  # fmt: skip
OTHERS = "depends on the other samples"
FIXED = "data.samples=Fixed"
MORE = {
    "the hardest samples": ("Net Hardest", rf"{WHY}the result of Hardest .*{OTHERS}"),
    "losses clipped at a quantile": ("Net Clipped", rf"{WHY}the result of Clipped .*{OTHERS}"),
    "weights of a batch's classes": ("Net ByFrequency", rf"{WHY}the result of ByFrequency .*{OTHERS}"),
    "a loss scaled by the size of the batch": ("Net BySize", rf"{WHY}the result of BySize .*{OTHERS}"),
    "balanced experts": ("GatedNet Balanced", rf"{WHY}the result of Balanced .*{OTHERS}"),
    "gradients reversed by a batch's statistic": ("ReversedNet Fit", rf"{WHY}.*{OTHERS}"),
    "the same below a head of zeros": ("ZeroHeadNet Fit", rf"{WHY}.*{OTHERS}"),
    "a branch of zeros": ("ZeroBranchNet Fit", rf"{WHY}.*{OTHERS}"),
    "a branch of zeros twice": ("ZeroProductNet Fit", rf"{WHY}.*{OTHERS}"),
    "weakly": ("WeakNet Fit", rf"{WHY}.*{OTHERS}"),
    "a hook of a tensor": ("TensorHookNet Fit", rf"{WHY}.*{OTHERS}"),
    "hooks of parameters": ("ParameterHookNet Fit", rf"{WHY}.*{OTHERS}"),
    "a queue of features": ("QueueNet Fit", rf"{WHY}.*state kept between"),
    "from the second step on": ("LateNet Fit", rf"{WHY}.*state kept between"),
    "instance norm with running statistics": (f"RunningInstanceNet Fit {FIXED}", rf"{WHY}the buffer norm.running_mean"),
    "experts with a capacity": (f"CapacityNet Fit {FIXED}", rf"{WHY}.*{OTHERS}"),
    "attention between samples": (f"TransposedNet Fit {FIXED}", rf"{WHY}.*{OTHERS}"),
    "dropout of sorted samples": ("SortedDropNet Fit", rf"{WHY}.* depends on dropout masks that do not follow"),
    "a subclass of dropout": ("SubclassNet Fit", rf"{WHY}each process draws its own random numbers in MyDropout"),
    "norms of samples": (f"NormsNet Fit {FIXED}", SAME),
    "spectral norm and weight norm": ("SpectralNet Fit", SAME),
    "packed sequences": ("PackedNet Fit", SAME),
    "packed sequences of one padding": (f"PackedNet Fit {FIXED}", SAME),
    "each length once": (f"DedupNet Fit {FIXED}", SAME),
    "calls for each sample": (f"LoopNet Fit {FIXED}", SAME),
    "sorted samples": (f"SortedNet Fit {FIXED}", SAME),
    "time first": (f"TimeFirstNet Fit {FIXED}", SAME),
    "a count of calls": ("AnnealedNet Fit", SAME),
    "features kept to be looked at": ("KeptNet Fit", SAME),
    "few weights": ("Net Weighted data.samples=Rare", SAME),
    "bfloat16 inside": ("Bfloat16Net Fit", rf"{WHY}the gradient of a sample in Bfloat16Net"),
    "float32 inside": ("Float32Net Fit", SAME),
}  # fmt: skip
QUICK = ("masked mean",)
SHORT = [
    "trainer.max_steps=10", "trainer.precision=32-true", "optim=sgd", "optim.lr=0.05", "loader.batch_size=16",
    "trainer.accelerator=cpu", "trainer.limit_test_batches=1",
]  # fmt: skip
MODEL = "_target_: coupled.Net\nname: net\n"
TASK = "_target_: coupled.Fit\nname: fit\nmonitor: null\nmode: min\n"
DATA = "defaults: [own]\n_target_: coupled.Padded\nsamples: Series\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory, forked):
    files = {"configs/model/net.yaml": MODEL, "configs/task/fit.yaml": TASK, "configs/data/padded.yaml": DATA}
    packages = thin_project.package("coupled") | thin_project.package("more_couplings")
    with thin_project.entered(tmp_path_factory.mktemp("project"), "coupled", **packages, **files) as root:
        yield root
    sys.modules.pop("more_couplings", None)


def trained(keys: str, name: str, *more: str, package: str = "coupled") -> tuple[dict, torch.Tensor]:
    """The report, and all weights as one vector."""
    net, task, *others = keys.split()
    chosen = {"model=net model": net, "task=fit task": task, "data=padded data": "Padded"}
    parts = [f"{part}._target_={package}.{name}" for part, name in chosen.items()]
    report = lockstep.train([*" ".join(parts).split(), *others, *SHORT, f"run={name}", *more])
    checkpoint = torch.load(Path("runs", name, "checkpoints/last.ckpt"), weights_only=True)
    return report, torch.cat([value.double().flatten() for value in checkpoint["state_dict"].values()])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES | MORE]
)
def test_the_line_says_what_two_processes_show(name, project):
    (keys, line), package = (CASES | MORE)[name], "coupled" if name in CASES else "more_couplings"
    try:
        report, one = trained(keys, "one", package=package)
        of_two, two = trained(keys, "two", "strategy=ddp", "trainer.devices=2", package=package)
    finally:
        shutil.rmtree("runs", ignore_errors=True)
    apart = float((one - two).norm() / one.norm())
    print(f"{name}: {apart:.1e} apart; {report['across_processes']}")  # shown by -rP
    assert re.fullmatch(f"{line}.*", report["across_processes"])
    assert re.fullmatch(f"{line}.*", of_two["across_processes"])
    assert apart < 1e-6 if report["across_processes"].startswith(ROUNDING) else apart > 1e-5


def test_a_loss_between_samples_needs_one_padding(project):
    with pytest.raises(RunFailed, match="exit code 2"):  # each process refuses it
        trained("Net Announced", "padded", "strategy=ddp", "trainer.devices=2")


@pytest.mark.slow
def test_an_evaluation_repeats_its_random_numbers(project):
    """At the end of a run and alone; with logical ranks on any number of processes."""
    try:
        report, _ = trained("SampledNet Fit", "drawn")
        assert re.search(
            "Evaluation metrics depend on the number of processes, because SampledNet .* draws",
            report["across_processes"],
        )
        assert lockstep.evaluate(["run=drawn", "trainer.accelerator=cpu"])["test/loss"] == report["test/loss"]
        exact = "MaskedNet Fit exact.logical_ranks=2"
        losses = {
            name: trained(exact, name, *more)[0]
            for name, more in {"one": [], "two": ["strategy=ddp", "trainer.devices=2"]}.items()
        }
        assert losses["one"]["across_processes"].startswith(f"{SAME_BITS}; tested with ")
        assert losses["one"]["test/loss"] == losses["two"]["test/loss"]
        assert losses["one"]["val/loss"] == losses["two"]["val/loss"]
    finally:
        shutil.rmtree("runs", ignore_errors=True)
