"""What benchmarks/check_gpu.py reads from the output of a run."""

import check_gpu

WAIT = "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:162.)"
OUTPUT = f"""
/opt/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1370: UserWarning: {WAIT}
  return t.to(

/opt/.venv/lib/python3.12/site-packages/lightning/pytorch/utilities/data.py:104: {WAIT}
/opt/.venv/lib/python3.12/site-packages/torch/nn/functional.py:12: UserWarning: something else
"""


def test_each_wait_for_the_gpu_is_read_with_its_place():
    assert [found[2] for found in check_gpu.PLACE.finditer(OUTPUT)] == [
        "modules/module.py:1370",
        "utilities/data.py:104",
    ]
