"""python called.py <file> <function> [argument ...]: a function of a test file in a process of its own. See tests/forked.py."""

import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1])[sys.argv[2]](*sys.argv[3:])
