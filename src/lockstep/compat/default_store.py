"""The key-value store of a process group that somebody else initialised, such as a script that calls `lockstep.train`.

torch 2.13 gives it to `init_process_group` only. Remove this file when `torch.distributed` has a public function for it:
tests/compat/test_default_store.py fails then.
"""

from typing import Any

import torch

dist: Any = torch.distributed  # its type stubs lack the stores


def default_store() -> Any:
    return dist.PrefixStore("lockstep", dist.distributed_c10d._get_default_store())
