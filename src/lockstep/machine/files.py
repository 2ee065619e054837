"""Writes files whole or not at all. Free of torch."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends without an error; or of a new folder.

    A reader sees the old file or the new one, never a part of it. A kill leaves `<name>.part`, which the next write removes.
    """
    part = path.with_name(f"{path.name}.part")
    remove(part)
    try:
        yield part
        part.replace(path)
    except BaseException:
        remove(part)
        raise


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """NaN and infinities become null, which is valid JSON."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()
    }
    write_text(path, json.dumps(finite, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError, which names the file, if it is damaged or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is damaged or cannot be read ({e}). Restore it, or remove it.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object. Restore it, or remove it.")
    return content
