"""Loading and launching on a GPU, through the CUDA driver. Imported on the first CUDA load only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from .errors import DriverError, UnsupportedDeviceError
from .store import Entry

try:
    from cuda.bindings import driver as cu
except ImportError as error:
    raise DriverError(f"cuda-python is not installed ({error}): pip install 'replayssm-jit[cu13]' or [cu12]") from error

_OLDEST = (8, 0)
_NO_CONTEXT = int(cu.CUresult.CUDA_ERROR_INVALID_CONTEXT)
_MAX_CALLS = 8192


def current_device() -> int:
    """Ordinal of the device whose context is current in this thread; 0 when there is none."""
    _init()
    context = _checked("cuCtxGetCurrent", cu.cuCtxGetCurrent())
    return int(_checked("cuCtxGetDevice", cu.cuCtxGetDevice())) if int(context) else 0


@cache
def device_arch(device: int) -> str:
    """Architecture that modules are compiled for on a device.

    A cubin runs on every later minor version of its major version, so one target serves a family of devices: the
    targets that the tests compile are the ones that run.

    Raises
    ------
    UnsupportedDeviceError
        The device is older than sm_80.
    DriverError
        There is no driver or no such device.
    """
    _init()
    handle = _checked(f"cuDeviceGet({device})", cu.cuDeviceGet(device))
    attribute = cu.CUdevice_attribute
    major = _checked("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle))
    minor = _checked("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle))
    if (major, minor) < _OLDEST:
        name = _checked("cuDeviceGetName", cu.cuDeviceGetName(64, handle)).rstrip(b"\0").decode()
        raise UnsupportedDeviceError(f"GPU {device} ({name}, sm_{major}{minor}) is not supported: sm_80 or newer is needed")
    return f"sm_{major}0f" if major >= 10 else f"sm_{major}0"


class CudaKernel:
    """A kernel loaded into the primary context of one device."""

    def __init__(self, entry: Entry, device: int) -> None:
        self.entry = entry
        self.device = device
        _init()
        handle = _checked(f"cuDeviceGet({device})", cu.cuDeviceGet(device))
        self._context = _checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(handle))
        _checked("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))
        try:
            self._module = _checked(f"loading {entry.name} on GPU {device}", cu.cuModuleLoadData(entry.binary))
            name = entry.meta["entry_point"].encode()
            self._function = _checked(f"finding the kernel of {entry.name}", cu.cuModuleGetFunction(self._module, name))
            self.max_dynamic_smem = self._allow_all_smem(handle)
        finally:
            cu.cuCtxPopCurrent()
        self._calls: dict[tuple[int, tuple[int, int, int], int, int, int, bool], Callable[[], int]] = {}

    def _allow_all_smem(self, device: Any) -> int:
        """Let a launch ask for all the shared memory that a block may have; also loads the code now, not inside a capture."""
        limit = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        size: int = _checked("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(limit, device))
        size -= _checked("cuFuncGetAttribute", cu.cuFuncGetAttribute(static, self._function))
        _checked("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, dynamic, size))
        return size

    def launch(
        self,
        buffer_address: int,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: int = 1,
        smem: int = 0,
        stream: int = 0,
        overlap: bool = False,
    ) -> None:
        """Enqueue the kernel with the packed parameter struct at ``buffer_address``.

        With ``overlap``, on devices from sm_90 on, its blocks may start while the kernel before it in the stream still runs: for
        kernels that wait (``griddepcontrol.wait``) before they write, or rely on, memory.

        The driver copies the struct before this returns, so the buffer may be rewritten at once. The device's primary context becomes
        current in a thread that has none: torch does not see to that before a thread's first work of its own.

        Raises
        ------
        DriverError
            The driver refused the launch.
        """
        key = (buffer_address, grid, block, smem, stream, overlap)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls = {}
            call = self._calls[key] = self._prepare(*key)
        result = call()
        if result == _NO_CONTEXT:
            _checked("cuCtxSetCurrent", cu.cuCtxSetCurrent(self._context))
            result = call()
        if result:
            raise DriverError(f"{self.entry.name}: launching grid={grid} block={block} smem={smem} failed: {cu.CUresult(result).name}")

    def _prepare(
        self, buffer_address: int, grid: tuple[int, int, int], block: int, smem: int, stream: int, overlap: bool
    ) -> Callable[[], int]:
        """A launch with all its arguments converted: converting them anew at every launch would show."""
        overlap = overlap and int(device_arch(self.device)[3:].rstrip("f")) >= 90
        attributes = (ctypes.addressof(_OVERLAP), 1) if overlap else (None, 0)
        config = _LaunchConfig(*grid, block, 1, 1, smem, stream, *attributes)
        params = (ctypes.c_void_p * 1)(buffer_address)  # the driver's array of pointers to parameters: one, to the struct
        call: Callable[[], int] = partial(_launch_function(), ctypes.byref(config), ctypes.c_void_p(int(self._function)), params, None)
        return call


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` whose value is a number."""

    _fields_ = (("id", ctypes.c_uint), ("_pad", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


_OVERLAP = _LaunchAttribute(id=int(cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION), value=1)


@cache
def _launch_function() -> Any:
    """``cuLaunchKernelEx`` through ctypes: with prepared arguments it costs less than the bindings' own call."""
    flags = cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _ = _checked("cuGetProcAddress", cu.cuGetProcAddress(b"cuLaunchKernelEx", 12000, flags))
    return ctypes.CFUNCTYPE(ctypes.c_int)(int(address))  # no argument types: the checks would cost as much as the call


@cache
def _init() -> None:
    try:
        returned = cu.cuInit(0)
    except Exception as error:  # the bindings raise RuntimeError or their own error when libcuda is absent
        raise DriverError(f"the CUDA driver cannot be loaded: {str(error).splitlines()[0]}") from error
    _checked("cuInit", returned)


def _checked(what: str, returned: Any) -> Any:
    result, *values = returned
    if result != cu.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{what} failed: {result.name}")
    return values[0] if len(values) == 1 else tuple(values)
