"""What is not needed to train: pages, export, tables of predictions, studies, comparison of runs, data of other libraries.

The engine does not import it; the scripts do, and configs name its classes.
"""

from typing import Any


def write_page(*of_run: Any) -> None:
    """Writes report.html. Its imports take seconds, and a script names it before the config is checked."""
    from lockstep.extras import page

    page.write_page(*of_run)
