"""Downloads files from mirrors and keeps them only with the right checksum."""

import hashlib
import http.client
import tempfile
import urllib.request
from pathlib import Path

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
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
            part.write(content)
        Path(part.name).chmod(0o644)
        Path(part.name).replace(path)  # atomic, so readers and other downloaders see the whole file or none
        return
    raise ConnectionError("; ".join(reasons))
