"""Writes what a benchmark found into its section of a page of docs/measurements, so that one page holds several."""

import re
from pathlib import Path


def write_section(page: Path, text: str) -> None:
    """Replaces the section of `page` that has the title of `text`, or appends it. `text` begins with `# <title>`."""
    section = re.sub(r"^(#+ )", r"#\1", text.strip(), flags=re.MULTILINE) + "\n"
    title = section.splitlines()[0]
    before = page.read_text() if page.is_file() else ""
    head, *sections = re.split(r"^(?=## )", before, flags=re.MULTILINE)
    kept = [each for each in sections if each.splitlines()[0] != title]
    place = next((i for i, each in enumerate(sections) if each.splitlines()[0] == title), len(kept))
    kept.insert(place, section)
    page.write_text("\n".join(part.strip() + "\n" for part in [head, *kept] if part.strip()))
