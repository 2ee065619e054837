"""With this folder in PYTHONPATH, Lockstep sees a system without what only Unix has, and workers are spawned."""

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import signal
import sys
from unittest.mock import patch

ABSENT = {
    os: ("getuid", "sysconf", "sched_getaffinity", "O_NONBLOCK", "O_NOFOLLOW"),
    signal: ("SIGUSR1", "SIGUSR2", "SIGHUP"),
}


class AsOnWindows(importlib.abc.MetaPathFinder):
    """Imports the one module of Lockstep that knows the system."""

    def find_spec(self, name, path, target=None):
        if name != "lockstep.machine.system":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            kept = {(owner, name): vars(owner)[name] for owner, names in ABSENT.items() for name in names}
            with patch.object(sys, "platform", "win32"):
                try:
                    for owner, name in kept:
                        delattr(owner, name)
                    execute(module)
                finally:
                    for (owner, name), value in kept.items():
                        setattr(owner, name, value)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AsOnWindows())
multiprocessing.set_start_method("spawn")
