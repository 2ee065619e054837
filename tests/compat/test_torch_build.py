"""What is read from torch's files is what torch itself says."""

import torch

from lockstep.compat import torch_build


def test_torch_was_built_for_what_its_files_say():
    """When this fails, compat/torch_build.py looks in the wrong place."""
    assert torch_build.cuda_version() == (torch.version.cuda or "")
    assert torch_build.architectures() == (torch.cuda.get_arch_list() or None)


def test_a_build_without_cuda_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_build, "folder", lambda: tmp_path)
    for text, expected in (("", None), ("cuda: Optional[str] = None\n", ""), ("cuda = '12.6'\n", "12.6")):
        (tmp_path / "version.py").write_text(text)
        assert torch_build.cuda_version.__wrapped__() == expected
    assert torch_build.architectures.__wrapped__() is None
