"""The token inputs of a step: what their signature (shapes, strides, dtypes) decides, and whether it is accepted."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch

from . import checks
from .specs import Input, ReplaySpec

Signature = list[Any]
#: Layouts to remember; packed batches bring a new one for every number of tokens.
MAX_LAYOUTS = 1024


def signature(tensors: Mapping[str, Any], out: Any) -> Signature | None:
    """What validation depends on: names, shapes, strides, dtypes and devices; None where something is no tensor."""
    try:
        return [*tensors, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (out, *tensors.values())]]
    except AttributeError:
        return None


class TokenLayout:
    """Token inputs of one signature, validated.

    Parameters
    ----------
    spec : ReplaySpec
        Declares the inputs.
    device : torch.device
        Where they must be.
    tensors : mapping
        Inputs by name, ``[rows, T, outer, inner]`` or ``[tokens, outer, inner]``; None counts as absent.
    out : torch.Tensor, optional
        Output; a contiguous one is assumed when absent.
    rows, tokens : int
        Rows of the batch; tokens each must bring, or when packed may bring together (None: any number).
    packed : bool
        Whether the inputs are packed.

    Raises
    ------
    ValueError, TypeError
        An input is missing, unknown, or has the wrong shape, dtype, device or stride; the message names it.

    Attributes
    ----------
    inputs : list of (name, index)
        The inputs that are present, and the place of the address of each in the step's parameter struct.
    strides : array of uint64
        The struct's stride fields, from ``inputs[0]``'s first to ``out``'s last.
    width : int
        Tokens a row, padded; 0 when packed.
    out_shape : tuple of int
        Shape of the output.
    aligned : bool
        Whether the strides allow 16-byte loads.
    """

    __slots__ = ("aligned", "inputs", "out_shape", "strides", "width")

    def __init__(
        self,
        spec: ReplaySpec,
        device: torch.device,
        tensors: Mapping[str, torch.Tensor | None],
        out: torch.Tensor | None,
        rows: int,
        tokens: int | None,
        packed: bool,
    ) -> None:
        declared = {item.name: item for item in spec.inputs}
        present = {name: value for name, value in tensors.items() if value is not None}
        _check_names(spec, declared, set(tensors), set(present))
        leading = _leading(spec, present[spec.inputs[0].name], rows, tokens, packed)
        self.width = 0 if packed else leading[1]
        self.out_shape = (*leading, *spec.shape("H", "P"))
        self.inputs = [(name, spec.step_params.index[name]) for name in present]
        self.aligned = True
        fields = dict.fromkeys([*declared, "out"], (0, 0, 0))
        for name, tensor in present.items():
            item = declared[name]
            shape = (*leading, *spec.shape(item.outer, item.inner))
            fields[name] = self._add(name, tensor, shape, spec.dtype_of(item.dtype), device, packed, item.inner is not None)
        target = torch.empty(self.out_shape, dtype=spec.dtype, device="meta") if out is None else out
        fields["out"] = self._add("out", target, self.out_shape, spec.dtype, None if out is None else device, packed, True)
        self.strides = array("Q", [stride for strides in fields.values() for stride in strides])

    def _add(
        self, name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, packed: bool, wide: bool
    ) -> tuple[int, int, int]:
        """Strides of row, token and outer dimension of one checked tensor; ``wide`` ones are read in vectors."""
        tensor = checks.typed(name, value, shape, (dtype,), device)
        strides = tensor.stride()
        if wide and strides[-1] != 1 and shape[-1] > 1:
            raise ValueError(f"{name} must have a dense innermost dimension, got strides {strides}")
        # A dimension of one element is never stepped along, whatever stride a view gives it.
        steps = [stride if size > 1 else 0 for stride, size in zip(strides, shape, strict=True)]
        row, token, outer = (steps[0], steps[0], steps[1]) if packed else steps[:3]
        self.aligned &= not wide or all(stride * dtype.itemsize % 16 == 0 for stride in (row, token, outer))
        return row, token, outer


def _check_names(spec: ReplaySpec, declared: Mapping[str, Input], given: set[str], present: set[str]) -> None:
    unknown = given - declared.keys()
    if unknown:
        hint = "; weights are set once, by cache.set_weights" if unknown & {w.name for w in spec.weights} else ""
        raise TypeError(f"unknown argument {min(unknown)!r}; {spec.family} takes {sorted(declared)}{hint}")
    needed = {name for name, item in declared.items() if not item.optional}
    missing = needed - present
    if missing:
        raise TypeError(f"missing argument {min(missing)!r}; {spec.family} needs {sorted(needed)}")


def _leading(spec: ReplaySpec, value: object, rows: int, tokens: int | None, packed: bool) -> tuple[int, ...]:
    """Leading dimensions that every input must have, taken from the first: (rows, T), or (tokens,) when packed."""
    name = spec.inputs[0].name
    shape = list(checks.tensor(name, value).shape)
    if packed:
        if len(shape) != 3:
            raise ValueError(f"{name} must have 3 dimensions [tokens, outer, inner], got shape {shape}")
        if tokens is not None and shape[0] > tokens:
            raise ValueError(f"{name} must have at most the {tokens} tokens that the plan has parents for, got shape {shape}")
        return (shape[0],)
    if len(shape) != 4:
        raise ValueError(f"{name} must have 4 dimensions [rows, T, outer, inner], got shape {shape}")
    if shape[0] != rows:
        raise ValueError(f"{name} must have the plan's {rows} rows, got shape {shape}")
    if tokens is not None and shape[1] != tokens:
        raise ValueError(f"{name} must have the plan's {tokens} tokens a row, got shape {shape}")
    if not 1 <= shape[1] <= spec.max_tokens:
        raise ValueError(f"{name} must have 1 to max_tokens={spec.max_tokens} tokens a row, got shape {shape}")
    return (shape[0], shape[1])
