"""The recurrence that reads and rewrites the state at every token: what replay is compared with, on the same backend and JIT.

Demo, benchmarks and tests share this host side. It holds no cache of its own: the state is any ``[slots, H, P, N]`` tensor of the
checkpoint dtype, one plane, and every write goes where ``write_slots`` says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch

from . import kernels, tactics
from .specs import ReplaySpec


def check_precision(checkpoint_dtype: torch.dtype, rounding: str = "nearest") -> None:
    """Refuse what the standard kernel has no form of.

    Raises
    ------
    ValueError
        The state is int16, or rounded stochastically.
    """
    if checkpoint_dtype is torch.int16:
        raise ValueError("the standard kernel has no int16 state; float32, bfloat16, float16, int8 and float8_e4m3fn it has")
    if rounding != "nearest":
        raise ValueError(f"the standard kernel rounds to nearest, not rounding={rounding!r}")


class StandardKernel:
    """The standard kernel of one spec on one device.

    Parameters
    ----------
    spec : ReplaySpec
        Shapes and dtypes. Its checkpoint dtype is the dtype of the state; its read plane and ring are ignored.
    device : torch.device or str
        ``cpu`` or a CUDA device.

    Raises
    ------
    ValueError
        The spec's checkpoint is int16 or rounded stochastically.
    replayssm_jit.jit.JitError
        The kernel cannot be built here.
    """

    def __init__(self, spec: ReplaySpec, device: torch.device | str) -> None:
        check_precision(spec.checkpoint_dtype, spec.rounding)
        self.spec = kernels.one_plane(spec)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.module = self.spec.module("standard", kernels.backend_of(self.device))
        self.kernel = kernels.load(self.module, self.device)

    def run(
        self,
        state: torch.Tensor,
        slots: torch.Tensor,
        write_slots: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        pad_slot: int = -1,
        **tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Apply the recurrence to T tokens of every row and return the output; arguments as in :meth:`prepare`."""
        first = tensors.get(self.spec.inputs[0].name)
        if out is None and first is not None and first.dim() > 2:
            out = torch.empty((*first.shape[:2], *self.spec.shape("H", "P")), dtype=self.spec.dtype, device=self.device)
        self.prepare(state, slots, write_slots, scale=scale, out=out, pad_slot=pad_slot, tensors=tensors)()
        assert out is not None
        return out

    def prepare(
        self,
        state: torch.Tensor,
        slots: torch.Tensor,
        write_slots: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None,
        pad_slot: int = -1,
        tensors: Mapping[str, torch.Tensor],
    ) -> Callable[[], None]:
        """Check and pack once, so that a benchmark times nothing but the kernel.

        Parameters
        ----------
        state : torch.Tensor
            ``[slots, H, P, N]``, checkpoint dtype, inner dimensions dense, any slot stride.
        slots : torch.Tensor
            int32 ``[rows]``: where each row reads its state.
        write_slots : torch.Tensor, optional
            int32 ``[rows, T]``: where the state after each token goes. By default every token rewrites the row's own slot.
        scale : torch.Tensor, optional
            float32 ``[slots, H, P]``, of a state of 8 bits an element, which needs it.
        out : torch.Tensor
            ``[rows, T, H, P]``, activation dtype.
        pad_slot : int
            Rows of this slot, or of a negative one, do nothing.
        tensors : mapping
            Inputs ``[rows, T, ...]`` and weights by the spec's names.

        Returns
        -------
        callable
            The launch, to be called as often as wanted.

        Raises
        ------
        ValueError, TypeError
            A tensor is missing, unknown, or of the wrong shape, dtype or device; the message names it.
        """
        spec = self.spec
        rows = slots.shape[0] if slots.dim() == 1 else -1
        self._check("slots", slots, (rows,), torch.int32)
        if not slots.is_contiguous():
            raise ValueError("slots must be contiguous")
        self._check("state", state, (state.shape[0], *spec.shape("H", "P", "N")), spec.checkpoint_dtype)
        if not state[0].is_contiguous():
            raise ValueError(f"state must be dense inside a slot, got strides {state.stride()}")
        if (scale is not None) != spec.scaled:
            raise ValueError(f"scale must be {'given with' if spec.scaled else 'None for'} a state of {spec.checkpoint_dtype}")
        if scale is not None:
            self._check("scale", scale, (state.shape[0], *spec.shape("H", "P")), torch.float32)
            if not scale[0].is_contiguous():
                raise ValueError(f"scale must be dense inside a slot, got strides {scale.stride()}")
        known = {i.name for i in spec.inputs} | {w.name for w in spec.weights}
        if tensors.keys() - known:
            raise TypeError(f"unknown tensors {sorted(tensors.keys() - known)}; accepted are {sorted(known)}")
        first = tensors.get(spec.inputs[0].name)
        if first is None or first.dim() < 2:
            raise ValueError(f"{spec.inputs[0].name} is required, [rows, T, ...]")
        tokens = first.shape[1]
        if out is None:
            raise ValueError("out is required, [rows, T, H, P]")
        if write_slots is None:
            write_slots = slots[:, None].expand(rows, tokens).contiguous()
        self._check("write_slots", write_slots, (rows, tokens), torch.int32)
        if not write_slots.is_contiguous():
            raise ValueError("write_slots must be contiguous")

        values: dict[str, int] = {
            "state": state.data_ptr(),
            "state_slot": state.stride(0),
            "slots": slots.data_ptr(),
            "write_slots": write_slots.data_ptr(),
            "rows": rows,
            "tokens": tokens,
            "num_heads": spec.heads,
            "pad_slot": pad_slot,
            "threads": torch.get_num_threads(),
        }
        keep = [state, slots, write_slots, out]
        if scale is not None:
            values |= {"scale": scale.data_ptr(), "scale_slot": scale.stride(0)}
            keep.append(scale)
        aligned = self._token_values(values, "out", out, rows, tokens, spec.shape("H", "P"), spec.dtype)
        for i in spec.inputs:
            given = tensors.get(i.name)
            if given is None:
                if not i.optional:
                    raise ValueError(f"{i.name} is required")
                continue
            aligned &= self._token_values(values, i.name, given, rows, tokens, spec.shape(i.outer, i.inner), spec.dtype_of(i.dtype))
            keep.append(given)
        for w in spec.weights:
            given = tensors.get(w.name)
            if given is None:
                if not w.optional:
                    raise ValueError(f"{w.name} is required")
                continue
            self._check(w.name, given, spec.shape(*w.dims), torch.float32)
            if not given.is_contiguous():
                raise ValueError(f"{w.name} must be contiguous")
            values[w.name] = given.data_ptr()
            keep.append(given)
        values["aligned"] = int(aligned)

        buffer = self.module.params.buffer()
        self.module.params.pack(buffer, **values)
        return self._launcher(buffer, rows, keep)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.device.type != self.device.type:
            raise ValueError(f"{name} must be on {self.device}, got {tensor.device}")

    def _token_values(
        self,
        values: dict[str, int],
        name: str,
        tensor: torch.Tensor,
        rows: int,
        tokens: int,
        inner: tuple[int, ...],
        dtype: torch.dtype,
    ) -> bool:
        """Record pointer and strides of a per-token tensor; True when it allows 16-byte loads."""
        self._check(name, tensor, (rows, tokens, *inner), dtype)
        if len(inner) == 2 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be dense in its last dimension, got strides {tensor.stride()}")
        values[name] = tensor.data_ptr()
        for axis, stride in zip(("row", "token", "outer"), tensor.stride(), strict=False):
            values[f"{name}_{axis}"] = stride
        if len(inner) == 1:
            return True
        return not any(n % 16 for n in (tensor.data_ptr(), *(s * tensor.itemsize for s in tensor.stride()[:3])))

    def _launcher(self, buffer: ctypes.Array[ctypes.c_char], rows: int, keep: list[torch.Tensor]) -> Callable[[], None]:
        """Bind a packed buffer to the kernel; the tensors it points at live as long as the launch."""
        address, launch = ctypes.addressof(buffer), self.kernel.launch
        grid, threads = tactics.standard_grid(self.spec, rows), tactics.WARPS * 32

        def run(held: object = (buffer, keep)) -> None:
            launch(address, grid, threads, 0, kernels.current_stream(self.device))

        return run
