"""Backends: the CPU always, CUDA where there is a device."""

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)

# The kernels use as many threads as torch. Shapes here are small, and one thread keeps two pools of OpenMP workers, torch's and the
# kernels', from waiting for each other's cores; test_determinism.py runs more of them.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
