"""Memory of caches: on the CPU on huge pages, where the system grants them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_LARGE = 4 << 20  # bytes from which on pages matter


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a zeroed tensor.

    A step walks far more memory than a TLB covers in small pages, and hardware prefetchers stop where a page ends: on huge pages
    a core reads up to 1.6 times as fast (``benchmarks/NOTES.md``). Linux hands them out by itself, or, as most systems are set up,
    when a program asks before it first touches the memory. A refusal changes nothing but speed.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor.
    dtype : torch.dtype
        Its dtype.
    device : torch.device
        Where it lies.

    Returns
    -------
    torch.Tensor
        Contiguous, all zero.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and sys.platform == "linux" and tensor.nbytes >= _LARGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
    return tensor.zero_()
