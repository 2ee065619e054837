"""Lockstep's promises on this project's data, model and task."""

import pytest
from lockstep import testing
from made import overrides


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> testing.Project:
    """Short runs in their own folder, on small data, in fp32: eight steps of eight samples."""
    folder = tmp_path_factory.mktemp("runs")
    return testing.Project(folder / "runs", overrides(tmp_path_factory.mktemp("data")))


def test_two_processes_find_the_weights_of_one(project):
    testing.assert_same_result(project)


def test_a_killed_run_ends_bit_identical(project):
    testing.assert_survives_a_kill(project)


def test_an_evaluation_repeats_the_figures(project):
    testing.assert_evaluates_alike(project)
