"""Everything that training does not need: pages, export, prediction tables, sweeps, run comparison, data of other libraries.

The engine does not import this package; the scripts do, and configs name its classes.
"""

from typing import Any


def write_page(*args: Any) -> None:
    """Writes report.html. The import is here because it takes seconds, and scripts name this function before the config is checked."""
    from lockstep.extras import page

    page.write_page(*args)
