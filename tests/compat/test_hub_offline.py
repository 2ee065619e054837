"""huggingface_hub still has to be told by its constant that there is no network."""

import os
import socket

import huggingface_hub
import pytest
from huggingface_hub import constants

from lockstep.compat.hub_offline import go_offline_without_network


@pytest.fixture
def online(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_variable_alone_comes_too_late(online, monkeypatch):
    """When this fails, setting the variable is enough in compat/hub_offline.py."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not huggingface_hub.is_offline_mode()


@pytest.mark.parametrize("reachable", [True, False])
def test_without_a_server_the_hub_is_offline(online, reachable, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if not reachable:
            server.close()
        go_offline_without_network()
    assert huggingface_hub.is_offline_mode() is (not reachable)
    assert os.environ["HF_HUB_OFFLINE"] == ("" if reachable else "1")
