"""The CUDA driver's side: errors without a GPU, launches with one."""

import ctypes
import itertools
import threading

import pytest
from jit_helpers import PARAMS, module

from replayssm_jit import jit

driver = pytest.importorskip("replayssm_jit.jit.driver", exc_type=jit.DriverError)
cu = driver.cu
NO_DEVICE = False
try:
    driver.device_arch(0)
except jit.JitError:
    NO_DEVICE = True


def good(*values):
    return (cu.CUresult.CUDA_SUCCESS, *values)


@pytest.mark.skipif(not NO_DEVICE, reason="there is a CUDA device")
def test_no_driver_is_one_clear_line(home, cache):
    with pytest.raises(jit.DriverError) as raised:
        jit.load(module("cuda"))
    assert "\n" not in str(raised.value)
    assert "CUDA driver" in str(raised.value) or "cu" in str(raised.value)
    assert not cache.exists()


@pytest.fixture
def device(monkeypatch):
    """A pretended device of a given compute capability."""
    driver.device_arch.cache_clear()

    def pretend(major, minor):
        values = itertools.cycle([major, minor])
        monkeypatch.setattr(driver, "_init", lambda: None)
        monkeypatch.setattr(cu, "cuDeviceGet", lambda ordinal: good(ordinal))
        monkeypatch.setattr(cu, "cuDeviceGetAttribute", lambda attribute, handle: good(next(values)))
        monkeypatch.setattr(cu, "cuDeviceGetName", lambda size, handle: good(b"Old Chip\0\0"))

    yield pretend
    driver.device_arch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100f"),
        ((10, 3), "sm_100f"),
        ((12, 0), "sm_120f"),
        ((12, 1), "sm_120f"),
    ],
)
def test_target_of_a_device(device, capability, arch):
    device(*capability)
    assert driver.device_arch(0) == arch


def test_an_old_gpu_is_refused_by_name(home, cache, device):
    device(7, 5)
    with pytest.raises(jit.UnsupportedDeviceError, match=r"^GPU 3 \(Old Chip, sm_75\) is not supported: sm_80 or newer is needed$"):
        jit.load(module("cuda"), device=3)
    assert not cache.exists()


def test_refused_calls_are_named():
    with pytest.raises(jit.DriverError, match="^cuThis failed: CUDA_ERROR_INVALID_VALUE$"):
        driver._checked("cuThis", (cu.CUresult.CUDA_ERROR_INVALID_VALUE,))


# ---- with a GPU ---------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """A few bytes of device memory in the primary context, which is made current."""
    driver._init()
    context = driver._checked("retain", cu.cuDevicePrimaryCtxRetain(0))
    driver._checked("current", cu.cuCtxSetCurrent(context))
    pointer = driver._checked("alloc", cu.cuMemAlloc(8192))
    yield int(pointer)
    cu.cuMemFree(pointer)
    cu.cuCtxSetCurrent(0)


def run(kernel, memory, count=4, **launch):
    source, target = (ctypes.c_int * count)(*range(count)), (ctypes.c_int * count)()
    size = ctypes.sizeof(source)
    driver._checked("copy", cu.cuMemcpyHtoD(memory, ctypes.addressof(source), size))
    buffer = PARAMS.buffer()
    PARAMS.pack(buffer, input=memory, output=memory + 4096, count=count)
    kernel.launch(ctypes.addressof(buffer), **{"grid": (1, 1, 1), "block": 32, **launch})
    driver._checked("synchronise", cu.cuCtxSynchronize())
    driver._checked("copy", cu.cuMemcpyDtoH(ctypes.addressof(target), memory + 4096, size))
    return list(target)


def test_a_thread_without_a_context_gets_one(monkeypatch):
    """A thread that has not used the device before: the first launch makes the primary context current and is tried again."""
    kernel, current = object.__new__(driver.CudaKernel), []
    kernel._context, kernel._calls = "primary", {}
    missing = int(cu.CUresult.CUDA_ERROR_INVALID_CONTEXT)
    monkeypatch.setattr(driver.CudaKernel, "_prepare", lambda self, *key: lambda: 0 if current else missing)
    monkeypatch.setattr(cu, "cuCtxSetCurrent", lambda context: good(*current.append(context) or ()))
    kernel.launch(1)
    kernel.launch(1)
    assert current == ["primary"]


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="no CUDA device")
class TestOnGpu:
    def test_launch_from_a_fresh_thread(self, home, memory):
        kernel, found = jit.load(module("cuda", 5)), []

        def work():
            buffer = PARAMS.buffer()
            PARAMS.pack(buffer, input=memory, output=memory + 4096, count=1)
            kernel.launch(ctypes.addressof(buffer), (1, 1, 1), 32)
            found.append(driver._checked("current", cu.cuCtxGetCurrent()))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        driver._checked("synchronise", cu.cuCtxSynchronize())
        assert int(found[0])

    def test_launch(self, home, memory):
        kernel = jit.load(module("cuda", 5))
        assert jit.load(module("cuda", 5), device=0) is kernel
        assert run(kernel, memory) == [5, 6, 7, 8]
        assert run(kernel, memory, count=1000, grid=(32, 1, 1)) == list(range(5, 1005))

    def test_all_shared_memory_may_be_asked_for(self, home, memory):
        kernel = jit.load(module("cuda", 5))
        assert kernel.max_dynamic_smem > 48 * 1024
        assert run(kernel, memory, smem=kernel.max_dynamic_smem) == [5, 6, 7, 8]

    def test_a_refused_launch_is_named(self, home, memory):
        with pytest.raises(jit.DriverError, match=r"^add_1: launching grid=\(1, 1, 1\) block=4096 smem=0 failed: CUDA_ERROR_INVALID_VALUE"):
            run(jit.load(module("cuda")), memory, block=4096)

    def test_a_binary_for_another_gpu_is_named(self, home, memory):
        with pytest.raises(jit.DriverError, match="^loading add_1 on GPU 0 failed: CUDA_ERROR_NO_BINARY_FOR_GPU"):
            jit.load(module("cuda"), arch="sm_120f" if driver.device_arch(0) != "sm_120f" else "sm_80")

    def test_a_launch_can_be_captured_at_once(self, home, memory):
        """Nothing is loaded lazily inside a capture."""
        kernel = jit.load(module("cuda", 9))
        stream = driver._checked("stream", cu.cuStreamCreate(1))
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        driver._checked("begin", cu.cuStreamBeginCapture(stream, mode))
        buffer = PARAMS.buffer()
        PARAMS.pack(buffer, input=memory, output=memory + 4096, count=1)
        kernel.launch(ctypes.addressof(buffer), (1, 1, 1), 32, 0, int(stream))
        PARAMS.pack(buffer)  # the struct was copied
        graph = driver._checked("end", cu.cuStreamEndCapture(stream))
        executable = driver._checked("instantiate", cu.cuGraphInstantiate(graph, 0))
        value = ctypes.c_int(33)
        driver._checked("copy", cu.cuMemcpyHtoD(memory, ctypes.addressof(value), 4))
        driver._checked("launch", cu.cuGraphLaunch(executable, stream))
        driver._checked("wait", cu.cuStreamSynchronize(stream))
        driver._checked("copy", cu.cuMemcpyDtoH(ctypes.addressof(value), memory + 4096, 4))
        assert value.value == 42
