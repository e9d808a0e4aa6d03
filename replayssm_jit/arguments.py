"""The packed parameter struct of one layer's step, and what of it has to be written when."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from .jit.params import ParamStruct
from .specs import ReplaySpec
from .tokens import Signature, TokenLayout


class StepArguments:
    """One layer's packed parameters.

    Written in three parts, the rarest first: :meth:`pack` what the cache decides, :meth:`stamp` what plan and signature decide,
    :meth:`point` the addresses of every call.

    Parameters
    ----------
    params : ParamStruct
        The step's parameter struct.
    spec : ReplaySpec
        Declares the inputs.

    Attributes
    ----------
    address : int
        Of the packed struct, for a launch.
    weights, plan, signature
        What the struct was written for.
    out_shape : tuple of int
        Shape of the output.
    """

    def __init__(self, params: ParamStruct, spec: ReplaySpec) -> None:
        self._params = params
        self.weights: Mapping[str, torch.Tensor] | None = None
        self.plan: Mapping[str, int] | None = None
        self.signature: Signature | None = None
        self.out_shape: tuple[int, ...] = ()
        self._inputs: list[tuple[str, int]] = []
        self._aligned = False
        self._buffer = params.buffer()
        self.address = ctypes.addressof(self._buffer)
        # All 8-byte members come first, so one of them is a word of the buffer at its field's index.
        view = memoryview(self._buffer).cast("B")
        self._words = view[: len(view) // 8 * 8].cast("Q")
        self._flags = view.cast("i")
        self._flag_index = {f.name: params.offset(f.name) // 4 for f in params.fields if f.kind == "i32"}
        self._aligned_index = self._flag_index["aligned"]
        first, self._out_index = spec.inputs[0].name, params.index["out"]
        self._addresses = slice(params.index[first], self._out_index + 1)
        self._strides = slice(params.index[f"{first}_row"], params.index["out_outer"] + 1)
        self._none = array("Q", [0] * (len(spec.inputs) + 1))

    def pack(self, fields: Mapping[str, int], weights: Mapping[str, torch.Tensor] | None) -> None:
        """Write what the cache decides: tensors, weights and cursors of the layer."""
        self._params.pack(self._buffer, **fields)
        self.weights = weights

    def stamp(self, plan: Mapping[str, int], signature: Signature | None, layout: TokenLayout) -> None:
        """Write what the plan and the signature decide."""
        words, flags = self._words, self._flags
        words[self._addresses] = self._none
        words[self._strides] = layout.strides
        flags[self._flag_index["tokens"]] = layout.width
        for name, value in plan.items():
            if name in self._flag_index:
                flags[self._flag_index[name]] = value
            else:
                words[self._params.index[name]] = value
        self.plan, self.signature = plan, signature
        self.out_shape, self._inputs, self._aligned = layout.out_shape, layout.inputs, layout.aligned

    def point(self, tensors: Mapping[str, Any], out: torch.Tensor) -> None:
        """Write the addresses of one call."""
        words = self._words
        addresses = words[self._out_index] = out.data_ptr()
        for name, index in self._inputs:
            address = words[index] = tensors[name].data_ptr()
            addresses |= address
        self._flags[self._aligned_index] = self._aligned and addresses % 16 == 0
