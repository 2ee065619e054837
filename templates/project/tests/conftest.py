"""Keeps compiled bytecode: without it, each of the tests' four processes compiles torch and Lightning again, 20 s instead of 8."""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
