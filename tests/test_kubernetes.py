"""deploy/kubernetes.yaml: Kubernetes accepts its form, its parts fit together, torchrun and train.py take its command.

No cluster is needed, and none has seen it.
"""

import copy
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from forked import until

from lockstep import ROOT
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft
from lockstep.config.settings import Settings
from lockstep.machine import world

VERSIONS = ("1.29", kubernetes_validate.latest_version())
ALL = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
CLAIM, SERVICE, JOB = ALL
TEMPLATE = JOB["spec"]["template"]
POD = TEMPLATE["spec"]
(CONTAINER,) = POD["containers"]
(WAIT,) = POD["initContainers"]
COMMAND: list[str] = CONTAINER["command"]
LAUNCHER, OVERRIDES = COMMAND[: COMMAND.index("train.py")], COMMAND[COMMAND.index("train.py") + 1 :]
OPTIONS = dict(option.removeprefix("--").split("=", 1) for option in LAUNCHER[1:])
ENV = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
NODES, GPUS = int(OPTIONS["nnodes"]), int(OPTIONS["nproc-per-node"])

# What a worker of the last test does: the first time it waits for a SIGTERM, its own or that of its peer.
WORKER = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
if (here / "saved").exists():
    sys.exit(0)
def save(*_):
    (here / "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
(here / f"started-{sys.argv[2]}").touch()
while not (here / "saved").exists():
    time.sleep(0.05)
sys.exit(1)
"""


def problem(document: dict[str, Any], version: str) -> str | None:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as e:
        return str(e.message)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_key_and_its_type(version):
    assert [problem(document, version) for document in ALL] == [None] * 3
    misspelt, wrong = copy.deepcopy(JOB), copy.deepcopy(JOB)
    container = misspelt["spec"]["template"]["spec"]["containers"][0]
    container["volumesMounts"] = container.pop("volumeMounts")
    wrong["spec"]["parallelism"] = "two"
    assert "volumesMounts" in str(problem(misspelt, version)) and "'two' is not" in str(problem(wrong, version))


def test_the_pods_find_each_other():
    name = SERVICE["metadata"]["name"]
    assert POD["subdomain"] == name
    assert SERVICE["spec"]["selector"].items() <= TEMPLATE["metadata"]["labels"].items()
    assert (SERVICE["spec"]["clusterIP"], SERVICE["spec"]["publishNotReadyAddresses"]) == ("None", True)
    host, _, port = OPTIONS["rdzv-endpoint"].partition(":")
    assert host == f"{JOB['metadata']['name']}-0.{name}"  # the hostname of an Indexed Job's pod is <job>-<index>
    assert re.search(rf"getent hosts {re.escape(host)};", WAIT["command"][-1])
    assert [each["port"] for each in SERVICE["spec"]["ports"]] == [int(port)]
    assert [each["containerPort"] for each in CONTAINER["ports"]] == [int(port)]


def test_each_pod_is_a_node_of_torchrun():
    job = JOB["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == NODES
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    (apart,) = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= TEMPLATE["metadata"]["labels"].items()
    assert WAIT["image"] == CONTAINER["image"]
    # A rule that no schema has: podFailurePolicy goes with these two values only.
    assert job["podFailurePolicy"]["rules"]
    assert (POD["restartPolicy"], job["podReplacementPolicy"]) == ("Never", "Failed")


def test_runs_are_on_the_shared_volume():
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in CONTAINER["volumeMounts"]}
    assert not volumes, "mounted nowhere"
    runs_dir = Draft(compose_config("train", OVERRIDES)).runs_dir
    assert mounts[runs_dir]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("more", [[], ["trainer.accelerator=cpu"], ["strategy=fsdp"]], ids=" ".join)
@pytest.mark.parametrize("rank", [0, NODES * GPUS - 1])
def test_the_config_is_possible_in_every_pod(rank, more, monkeypatch):
    """In the process `rank` that torchrun starts on a node of the Job."""
    sizes = {"LOCAL_WORLD_SIZE": GPUS, "WORLD_SIZE": NODES * GPUS, "RANK": rank}
    for name, value in {"TORCHELASTIC_RUN_ID": OPTIONS["rdzv-id"], **sizes}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(world, "gpu_count", lambda: CONTAINER["resources"]["limits"]["nvidia.com/gpu"])
    cfg = check(Draft(compose_config("train", [*OVERRIDES, *more]))).cfg
    found = Settings.of(cfg).world
    assert (found.external, found.nodes, found.size, found.rank) == ("torchrun", NODES, NODES * GPUS, rank)
    assert (cfg.resume, bool(cfg.run)) == ("auto", True)


def test_torchrun_takes_its_options(monkeypatch):
    from torch.distributed import run

    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would set it, for this process too
    launch, _, arguments = run.config_from_args(run.parse_args(COMMAND[1:]))
    assert (LAUNCHER[0], arguments[-len(OVERRIDES) - 1 :]) == ("torchrun", ["train.py", *OVERRIDES])
    assert (launch.min_nodes, launch.max_nodes, launch.max_restarts) == (NODES, NODES, 3)
    assert launch.rdzv_configs["join_timeout"] == "1800"
    if hasattr(launch, "shutdown_timeout"):  # torch 2.12 and newer
        assert 30 < launch.shutdown_timeout < POD["terminationGracePeriodSeconds"]
    with pytest.raises(SystemExit):
        run.parse_args([COMMAND[1].replace("--nnodes", "--nodes"), *COMMAND[2:]])


def test_the_image_has_what_the_command_needs():
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"train.py", "configs", "src", "requirements.txt"} <= set(copied)
    assert CONTAINER["image"] in lines[0]


def agent(index: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun as in pod `index`, with one worker, on this machine, where both pods have the same hostname."""
    rendezvous = f"{OPTIONS['rdzv-conf']},is_host={1 - index},keep_alive_interval=1"
    here = {"nproc-per-node": "1", "rdzv-endpoint": f"127.0.0.1:{port}", "rdzv-conf": rendezvous}
    options = [f"--{option}={value}" for option, value in {**OPTIONS, **here}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", *options, folder / "worker.py", folder, str(index)]
    return subprocess.Popen(command, env={**os.environ, **ENV}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_an_evicted_pod_saves_and_comes_back_to_the_one_that_waits(tmp_path, port):
    (tmp_path / "worker.py").write_text(WORKER)
    pods = [agent(index, port, tmp_path) for index in range(2)]
    try:
        until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        pods[1].send_signal(signal.SIGTERM)
        assert pods[1].wait(60) != 0  # 1; torchrun (2.13) sometimes aborts as it leaves
        assert (tmp_path / "saved").exists()
        pods.append(agent(1, port, tmp_path))
        assert [pods[0].wait(120), pods[2].wait(120)] == [0, 0]
    finally:
        (tmp_path / "saved").touch()  # ends the workers of a torchrun that is killed
        for pod in pods:
            pod.kill()
            pod.wait()
