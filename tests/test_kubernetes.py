"""deploy/kubernetes.yaml: Kubernetes accepts its form, its parts fit together, torchrun and train.py take its command.

No cluster is needed, and none has seen it.
"""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lockstep import ROOT
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.machine import world

VERSIONS = ("1.29", kubernetes_validate.latest_version())
ALL = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
DOCUMENTS = {document["kind"]: document for document in ALL}
CLAIM, SERVICE, JOB = (DOCUMENTS[kind] for kind in ("PersistentVolumeClaim", "Service", "Job"))
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


def refused(document: dict[str, Any], version: str = VERSIONS[-1]) -> str | None:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as e:
        return str(e.message)
    return None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", ALL, ids=lambda document: document["kind"])
def test_kubernetes_knows_every_key(document, version):
    assert refused(document, version) is None


@pytest.mark.parametrize(("kind", "keys", "right", "wrong"), [
    ("Job", ["spec"], "completionMode", "completionmode"),
    ("Job", ["spec", "template", "spec"], "subdomain", "subDomain"),
    ("Job", ["spec", "template", "spec", "containers", 0], "volumeMounts", "volumesMounts"),
    ("Service", ["spec"], "publishNotReadyAddresses", "publishNotReadyAddress"),
    ("PersistentVolumeClaim", ["spec"], "accessModes", "accessMode"),
])  # fmt: skip
def test_a_misspelt_key_is_refused(kind, keys, right, wrong):
    document = copy.deepcopy(DOCUMENTS[kind])
    node = document
    for key in keys:
        node = node[key]
    node[wrong] = node.pop(right)
    assert wrong in (refused(document) or "")


def test_a_value_of_the_wrong_type_is_refused():
    document = copy.deepcopy(JOB)
    document["spec"]["parallelism"] = "two"
    assert "'two' is not of type" in (refused(document) or "")


def test_the_pods_find_each_other():
    name = SERVICE["metadata"]["name"]
    assert POD["subdomain"] == name
    assert SERVICE["spec"]["selector"].items() <= TEMPLATE["metadata"]["labels"].items()
    assert (SERVICE["spec"]["clusterIP"], SERVICE["spec"]["publishNotReadyAddresses"]) == ("None", True)
    host, _, port = OPTIONS["rdzv-endpoint"].partition(":")
    assert host == f"{JOB['metadata']['name']}-0.{name}"  # the hostname of an Indexed Job's pod is <job>-<index>
    assert re.search(rf"getent hosts {re.escape(host)};", WAIT["command"][-1])
    assert (
        {int(port)} == {p["port"] for p in SERVICE["spec"]["ports"]} == {p["containerPort"] for p in CONTAINER["ports"]}
    )


def test_each_pod_is_a_node_of_torchrun():
    job = JOB["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == NODES
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    (apart,) = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= TEMPLATE["metadata"]["labels"].items()
    assert WAIT["image"] == CONTAINER["image"]


def test_runs_are_on_the_shared_volume():
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in CONTAINER["volumeMounts"]}
    assert not volumes, "mounted nowhere"
    runs_dir = str(compose_config("train", OVERRIDES).runs_dir)
    assert mounts[runs_dir]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_the_api_server_takes_the_policies_together():
    """Rules that no schema has: podFailurePolicy goes with these two values only."""
    assert JOB["spec"]["podFailurePolicy"]["rules"]
    assert (POD["restartPolicy"], JOB["spec"]["podReplacementPolicy"]) == ("Never", "Failed")


def config_problems(monkeypatch: pytest.MonkeyPatch, *more: str, rank: int = 0) -> list[str]:
    """What the config check says in the process `rank` that torchrun starts on a node of the Job."""
    started = {
        "TORCHELASTIC_RUN_ID": OPTIONS["rdzv-id"],
        "LOCAL_WORLD_SIZE": str(GPUS),
        "WORLD_SIZE": str(NODES * GPUS),
        "RANK": str(rank),
    }
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "gpu_count", lambda: CONTAINER["resources"]["limits"]["nvidia.com/gpu"])
    cfg = compose_config("train", [*OVERRIDES, *more])
    found = Settings.of(cfg).world
    assert (found.external, found.nodes, found.size, found.rank) == ("torchrun", NODES, NODES * GPUS, rank)
    assert (cfg.resume, bool(cfg.run)) == ("auto", True)
    return check(cfg)


@pytest.mark.parametrize("more", [[], ["trainer.accelerator=cpu"], ["strategy=fsdp"]], ids=" ".join)
@pytest.mark.parametrize("rank", [0, NODES * GPUS - 1])
def test_the_config_is_possible_in_every_pod(rank, more, monkeypatch):
    assert config_problems(monkeypatch, *more, rank=rank) == []


def test_an_impossible_config_would_be_found(monkeypatch):
    assert "data.batch_size" in config_problems(monkeypatch, f"data.batch_size={NODES * GPUS + 1}")[0]
    monkeypatch.setattr(world, "gpu_count", lambda: 0)
    assert "needs a GPU" in check(compose_config("train", OVERRIDES))[0]


def test_torchrun_takes_its_options(monkeypatch):
    from torch.distributed import run

    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would set it, for this process too
    launch, _, arguments = run.config_from_args(run.parse_args(COMMAND[1:]))
    assert LAUNCHER[0] == "torchrun"
    assert arguments[-len(OVERRIDES) - 1 :] == ["train.py", *OVERRIDES]
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (NODES, NODES, GPUS)
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", OPTIONS["rdzv-endpoint"])
    assert (launch.run_id, launch.max_restarts) == (OPTIONS["rdzv-id"], 3)
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


def agent(index: int, port: int, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """torchrun as in pod `index`, with one worker, on this machine, where both pods have the same hostname."""
    here = {
        "nproc-per-node": "1",
        "rdzv-endpoint": f"127.0.0.1:{port}",
        "rdzv-conf": f"{OPTIONS['rdzv-conf']},is_host={1 - index},keep_alive_interval=1",
    }
    options = [f"--{option}={value}" for option, value in {**OPTIONS, **here}.items()]
    worker = [str(folder / "worker.py"), str(folder), name]
    with (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *worker], env={**os.environ, **ENV}, stderr=err
        )


@pytest.mark.slow
def test_an_evicted_pod_saves_and_comes_back_to_the_one_that_waits(tmp_path, port):
    (tmp_path / "worker.py").write_text(WORKER)
    pods = [agent(index, port, tmp_path, f"pod-{index}") for index in range(2)]
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("started-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pods[1].send_signal(signal.SIGTERM)
        assert pods[1].wait(60) != 0  # 1; torchrun (2.13) sometimes aborts as it leaves
        assert (tmp_path / "saved").exists()
        pods.append(agent(1, port, tmp_path, "pod-1-anew"))
        assert [pods[0].wait(120), pods[2].wait(120)] == [0, 0]
    finally:
        (tmp_path / "saved").touch()  # ends the workers of a torchrun that is killed
        for pod in pods:
            pod.kill()
            pod.wait()
