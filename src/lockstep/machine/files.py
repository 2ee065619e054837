"""Writes files whole or not at all. Free of torch."""

import json
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends without an error.

    A reader sees the old file or the new one, never a part of it. A kill leaves `<name>.part`, which the next write reuses.
    With `shared`, several processes may write the same file at once: each part has a name of its own.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part" if shared else f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    with replacing(path, shared=shared) as part:
        part.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes, *, shared: bool = False) -> None:
    with replacing(path, shared=shared) as part:
        part.write_bytes(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """NaN and infinities become null, which is valid JSON."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in content.items()
    }
    write_text(path, json.dumps(finite, indent=1) + "\n")
