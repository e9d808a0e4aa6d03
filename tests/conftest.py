"""Backends: the CPU always, CUDA where there is a device; with ``--emulate`` the CUDA backend on an emulated one instead."""

import pytest
import torch
from emulator import emulated
from harness import CUDA

# The kernels use as many threads as torch. Shapes here are small, and one thread keeps two pools of OpenMP workers, torch's and the
# kernels', from waiting for each other's cores; test_determinism.py runs more of them.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--emulate", type=int, metavar="SEED", help="run behaviour tests on CUDA kernels without a GPU (tests/emulator)")
    parser.addoption("--fuzz", type=int, metavar="N", help="random lives a test in test_state_machine.py, instead of fixed ones")
    parser.addoption("--shard", metavar="I/N", help="run the Ith of N parts of the tests, from 0")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--shard"):
        part, parts = map(int, config.getoption("--shard").split("/"))
        items[:] = items[part::parts]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        emulate = metafunc.config.getoption("--emulate") is not None
        metafunc.parametrize("device", ["emulated"] if emulate else ["cpu", CUDA], indirect=True)


@pytest.fixture
def device(request):
    if request.param == "emulated":
        with emulated(request.config.getoption("--emulate")):
            yield torch.device("cpu")
    else:
        yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
