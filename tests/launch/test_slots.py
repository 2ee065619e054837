"""Who gets which devices when jobs run side by side."""

import pytest

from lockstep.config.compose import compose_config
from lockstep.errors import UserError
from lockstep.launch import sweeps
from lockstep.machine import world


@pytest.fixture
def gpus(monkeypatch):
    def there(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(world, "gpu_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return there


@pytest.mark.parametrize(
    ("count", "visible", "overrides", "jobs", "expected"),
    [
        (4, None, [], "auto", ["0", "1", "2", "3"]),
        (4, None, ["strategy=ddp", "trainer.devices=2"], "auto", ["0,1", "2,3"]),
        (4, None, ["strategy=ddp"], "auto", ["0,1,2,3"]),
        (4, None, [], 2, ["0", "1"]),
        (2, "GPU-a,GPU-b", [], "auto", ["GPU-a", "GPU-b"]),
        (3, "5,6,7", ["strategy=ddp", "trainer.devices=2"], "auto", ["5,6"]),
    ],
)
def test_each_job_has_gpus_of_its_own(gpus, count, visible, overrides, jobs, expected):
    gpus(count, visible)
    found = sweeps.environments(compose_config("train", overrides), jobs)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == expected


@pytest.mark.parametrize(
    ("jobs", "told"), [(3, "hydra.launcher.jobs=1"), (0, "auto, or a number"), ("two", "auto, or a number")]
)
def test_more_than_there_are_is_refused(gpus, jobs, told):
    gpus(2)
    with pytest.raises(UserError, match=told):
        sweeps.environments(compose_config("train", ["strategy=ddp", "trainer.devices=2"]), jobs)


@pytest.mark.parametrize(
    ("overrides", "jobs", "count", "threads"),
    [([], "auto", 8, 1), ([], 2, 2, 4), (["strategy=ddp", "trainer.devices=2"], "auto", 4, 1), ([], 3, 3, 2)],
)
def test_jobs_on_a_cpu_share_its_cores(gpus, monkeypatch, overrides, jobs, count, threads):
    gpus(0)
    monkeypatch.setattr(sweeps, "cores", lambda: 8)
    found = sweeps.environments(compose_config("train", ["trainer.accelerator=cpu", *overrides]), jobs)
    assert found == [{"OMP_NUM_THREADS": str(threads)}] * count
