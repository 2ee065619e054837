"""Weights of the Hugging Face hub without a network: an answer at once.

huggingface_hub 2.4 retries for half a minute where there is no network. It reads HF_HUB_OFFLINE when it is imported, and offers
no function to go offline later. Remove this file when it has one, or when it reads the variable at each request:
tests/compat/test_hub_offline.py fails then.
"""

import os
import socket
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3


def go_offline_without_network() -> None:
    """Makes huggingface_hub look into its cache only, if its server cannot be reached."""
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:
            vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True
