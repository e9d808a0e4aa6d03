"""Inputs of one call in a file, and the call repeated from it.

The file is what ``torch.save`` makes of plain values and tensors: the call and its arguments with their strides and alignment, the
spec, the cursors, the plan, and of the cache only the slots and layers that the call names, two planes row by row whatever the device.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
from typing import Any

import torch

from .blob import bit_view, rearranged
from .cache import ReplayCache
from .jit import env
from .specs import spec_from
from .wrapper import ReplayWrapper

_FORMAT = 1
#: Calls that touch cursors at most; but for a commit of trees, which moves ring entries.
_NO_STATE = ("plan", "commit", "set_weights")
_count = itertools.count()


def write(owner: ReplayCache | ReplayWrapper, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Write a call's inputs to a new file in ``REPLAYSSM_LOG_DIR``, and return its path."""
    directory = env.log_dir()
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"{type(owner).__name__}.{name}-{os.getpid()}-{next(_count)}.pt")
    torch.save(_inputs(owner, name, args, kwargs), path)
    return path


def rerun(path: str, device: torch.device | str | None = None) -> Any:
    """Repeat the call whose inputs a file holds.

    Parameters
    ----------
    path : str
        What ``REPLAYSSM_LOG_LEVEL=2`` left behind.
    device : torch.device or str, optional
        Where to run it; by default on the kind of device it came from.

    Returns
    -------
    object
        What the call returns.

    Raises
    ------
    ValueError
        The file is of another format.
    Exception
        Whatever the call raises.
    """
    held = load(path)
    return repeat(held, torch.device(held["device"] if device is None else device))


def load(path: str) -> dict[str, Any]:
    """Read a file of :func:`write`."""
    held = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(held, dict) or held.get("format") != _FORMAT:
        raise ValueError(f"{path} must be a dump of format {_FORMAT}")
    return held


def repeat(held: dict[str, Any], where: torch.device) -> Any:
    """Repeat the call that a dump describes."""
    owner, name = held["call"].split(".")
    cache = _cache(held, where)
    target: ReplayCache | ReplayWrapper = cache
    if owner == "ReplayWrapper":
        target = wrapper = ReplayWrapper(cache, pad_slot=held["pad_slot"])
        if held["plan"] is not None and name != "plan":
            plan = {key: _unpack(value, where) for key, value in held["plan"].items()}
            wrapper.plan(**plan)
    cache.debug = held["debug"]
    args = [_unpack(value, where) for value in held["args"]]
    return getattr(target, name)(*args, **{key: _unpack(value, where) for key, value in held["kwargs"].items()})


def _inputs(owner: ReplayCache | ReplayWrapper, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    cache = owner if isinstance(owner, ReplayCache) else owner.cache
    try:
        named = inspect.signature(getattr(type(owner), name)).bind(owner, *args, **kwargs).arguments
    except TypeError:  # the call will say so itself
        named = {}
    plan = owner.planned if isinstance(owner, ReplayWrapper) else None
    slots = _named_slots(cache, [plan["slots"]] if name == "run" and plan else [named.get(k) for k in ("slots", "source", "destination")])
    layers = range(len(cache.layers))
    if name in _NO_STATE and named.get("accepted") is None:
        layers = range(0)
    elif "layer" in named:
        layers = range(named["layer"], named["layer"] + 1) if named["layer"] in layers else range(0)
    index = torch.tensor(slots, dtype=torch.int64, device=cache.device)
    return {
        "format": _FORMAT,
        "call": f"{type(owner).__name__}.{name}",
        "args": [_pack(value) for value in args],
        "kwargs": {key: _pack(value) for key, value in kwargs.items()},
        "spec": cache.spec.describe(),
        "device": cache.device.type,
        "debug": cache.debug,
        "num_slots": cache.num_slots,
        "num_layers": len(cache.layers),
        "pad_slot": getattr(owner, "pad_slot", -1),
        "plan": None if plan is None else {key: _pack(value) for key, value in plan.items()},
        "cursors": {cursor: tensor.cpu() for cursor, tensor in cache.cursors.items()},
        "slots": slots,
        "layers": {
            layer: {key: rearranged(cache, key, bit_view(tensor)[index], to_rows=True).cpu() for key, tensor in cache.layers[layer].items()}
            for layer in layers
        },
        "weights": {layer: {key: t.cpu() for key, t in (cache.weights[layer] or {}).items()} for layer in range(len(cache.layers))},
    }


def _cache(held: dict[str, Any], device: torch.device) -> ReplayCache:
    """A cache that holds what was dumped; layers that were not share the memory of one."""
    spec, num_slots = spec_from(held["spec"]), held["num_slots"]
    memory = ReplayCache.allocate(spec, max(1, len(held["layers"])), num_slots, device)
    place = {layer: i for i, layer in enumerate(held["layers"])}
    layers = [memory.layers[place.get(layer, 0)] for layer in range(held["num_layers"])]
    cursors = {name: tensor.to(memory.device) for name, tensor in held["cursors"].items()}
    cache = ReplayCache.from_tensors(spec, layers, cursors)
    index = torch.tensor(held["slots"], dtype=torch.int64, device=cache.device)
    for layer, tensors in held["layers"].items():
        for name, rows in tensors.items():
            bit_view(cache.layers[layer][name])[index] = rearranged(cache, name, rows.to(cache.device), to_rows=False)
    for layer, weights in held["weights"].items():
        if weights:
            cache.set_weights(layer, **{name: tensor.to(cache.device) for name, tensor in weights.items()})
    return cache


def _named_slots(cache: ReplayCache, given: list[Any]) -> list[int]:
    """Slots of the cache that some arguments name, whatever else those hold."""
    slots: set[int] = set()
    for value in given:
        values = value.flatten().tolist() if isinstance(value, torch.Tensor) and value.device == cache.device else value
        if isinstance(values, list | tuple | range):
            slots.update(slot for slot in values if type(slot) is int and 0 <= slot < cache.num_slots)
    return sorted(slots)


def _pack(value: Any) -> Any:
    """A value as plain data."""
    if isinstance(value, torch.Tensor):
        return {"tensor": _strided_copy(value, "cpu")} if value.device.type in ("cpu", "cuda") else {"repr": repr(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": torch.frombuffer(bytearray(value), dtype=torch.uint8) if len(value) else torch.empty(0, dtype=torch.uint8)}
    if isinstance(value, range | tuple):
        value = list(value)
    if isinstance(value, list) and value and all(isinstance(item, torch.Tensor) for item in value):
        return {"list": [_pack(item) for item in value]}
    if value is None or isinstance(value, bool | int | float | str) or (isinstance(value, list) and set(map(type, value)) <= {int, float}):
        return value
    return {"repr": repr(value)}


def _unpack(value: Any, device: torch.device) -> Any:
    """What :func:`_pack` packed; of what is no plain data its repr."""
    if isinstance(value, dict):
        if "tensor" in value:
            return _strided_copy(value["tensor"], device)
        if "list" in value:
            return [_unpack(item, device) for item in value["list"]]
        return ctypes.string_at(value["bytes"].data_ptr(), value["bytes"].numel()) if "bytes" in value else value["repr"]
    return value


def _strided_copy(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same values at the same strides and the same offset from a 16-byte boundary."""
    tensor = tensor.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.zeros(shift + span, dtype=tensor.dtype, device=device)
    memory[shift:].copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), shift)
