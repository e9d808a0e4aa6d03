"""Backends: the CPU always, CUDA where there is a device."""

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
