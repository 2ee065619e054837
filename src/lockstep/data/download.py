"""Downloads files from mirrors and keeps them only with the right checksum."""

import hashlib
from pathlib import Path

from lockstep.machine.files import write_bytes

TIMEOUT_S = 10


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def download(urls: list[str], path: Path, checksum: str) -> None:
    """Downloads from the first url whose content has the MD5 `checksum` to `path`, unless that file is there already.

    Raises:
        ConnectionError: no url could be read, or none had the right content. `path` then does not exist.
    """
    if path.is_file() and md5(path) == checksum:
        return
    import http.client  # here, because they take 0.05 s of the config check, which imports this module
    import urllib.request

    reasons = []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as e:
            reasons.append(f"{url}: {getattr(e, 'reason', e)}")
            continue
        if hashlib.md5(content).hexdigest() != checksum:
            reasons.append(f"{url}: wrong checksum")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
        return
    raise ConnectionError("; ".join(reasons))
