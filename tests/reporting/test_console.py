"""What frameworks say and Lockstep does not pass on."""

import torch
from lightning.fabric.accelerators import cuda

from lockstep.reporting import console


def test_the_advice_about_tensor_cores_is_not_given(monkeypatch, capsys, caplog):
    """`tf32` has that setting, and false is meant."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    console.quiet(0)
    cuda._check_cuda_matmul_precision.cache_clear()
    cuda._check_cuda_matmul_precision(torch.device("cuda", 0))
    said = capsys.readouterr()
    assert "Tensor Cores" not in said.out + said.err + caplog.text
