"""A hook of mkdocs.yml: links from docs/ to other files of the repository."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - MkDocs passes both
    """Replaces them by links to the repository, or by their text if its address is unknown."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def to_repository(link: re.Match[str]) -> str:
        text, path, anchor = link.groups(default="")
        target = (folder / path).resolve()
        if target.is_relative_to(Path(config.docs_dir).resolve()):
            return link[0]
        address = f"{config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{anchor}"
        return f"[{text}]({address})" if config.repo_url else text

    return LINK.sub(to_repository, markdown)
