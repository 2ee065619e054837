"""Lockstep's promises on this project's network, loss and data: `lockstep check` of the default recipe.

The check is kept in checks.json, which the first lines of a run quote. Commit it.
"""

from lockstep import testing


def test_each_way_of_running_gives_the_same_result():
    """On one process and two, after a kill, in an evaluation. With the images of MNIST that a package carries; name your own data here."""
    found = testing.assert_promises(["data.source=embedded"])
    verdicts = {way["way"]: way["verdict"] for way in found["ways"]}
    assert verdicts["killed and resumed"] == "same bits"
