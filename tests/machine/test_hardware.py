"""What is read from torch's files is what torch itself says."""

import torch

from lockstep.machine import hardware


def test_torch_was_built_for_what_its_files_say():
    """When this fails, machine/hardware.py looks in the wrong place."""
    assert hardware.cuda_of_torch() == (torch.version.cuda or "")
    assert hardware.architectures_of_torch() == (torch.cuda.get_arch_list() or None)


def test_a_build_without_cuda_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "torch_folder", lambda: tmp_path)
    for text, expected in (("", None), ("cuda: Optional[str] = None\n", ""), ("cuda = '12.6'\n", "12.6")):
        (tmp_path / "version.py").write_text(text)
        assert hardware.cuda_of_torch.__wrapped__() == expected
    assert hardware.architectures_of_torch.__wrapped__() is None
