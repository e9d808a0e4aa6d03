"""Slots as bytes: offloading, preemption, moving a request to another process or machine.

A blob is ``prefix, digest, header, parts``. The prefix holds a magic, the version of the format, the length of the header and that of
the whole blob. The header is JSON: the spec, the number of layers, and every slot's cursors. Parts follow layer by layer in the order
of ``spec.cache_tensors``, each padded to 16 bytes: checkpoints, copies and scales ``[n, H, P, ...]``, two planes row by row whatever the
device, and of every ring the live entries only, ``[total history, outer, inner]``, slot by slot from the oldest. Byte order is
little-endian. An entry returns to the very place in the ring it came from, so that nothing that depends on it can differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import kernels
from .specs import ReplaySpec, spec_from

if TYPE_CHECKING:
    from .cache import ReplayCache

MAGIC = b"replayssm slots\n"
VERSION = 1
_PREFIX = struct.Struct("<16sIIQ")
_BODY = _PREFIX.size + hashlib.sha256().digest_size
_PADDING = 16
#: Rows and bytes of a row that lie together where the CUDA kernels keep two planes (templates/cuda/formats.jinja).
_PANEL = (16, 64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies keep every pattern, NaN and halves of planes included."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def export_slots(cache: ReplayCache, slots: list[int]) -> bytes:
    """Pack slots, all layers; waits for the device."""
    index = torch.tensor(slots, device=cache.device)
    cursors = {name: cursor[index].tolist() for name, cursor in cache.cursors.items()}
    header = json.dumps({"spec": cache.spec.describe(), "layers": len(cache.layers), **cursors}).encode()
    shapes = list(_parts(cache.spec, len(cache.layers), len(slots), sum(cursors["history"])))
    offset = _padded(_BODY + len(header))
    size = offset + sum(_padded(nbytes) for *_, nbytes in shapes)
    blob = bytearray(size)
    blob[_BODY : _BODY + len(header)] = header
    rows, places = _live_entries(cursors["ring_start"], cursors["history"], cache.spec.ring_len)
    entries = index[rows], torch.tensor(places, dtype=torch.int64, device=cache.device)
    for layer, name, shape, dtype, nbytes in shapes:
        if nbytes:
            tensor = bit_view(cache.layers[layer][name])
            part = torch.frombuffer(blob, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            if name.startswith("ring_"):
                part.copy_(tensor[entries[0], :, entries[1]])
            else:
                part.copy_(rearranged(cache, name, tensor[index], to_rows=True))
        offset += _padded(nbytes)
    _PREFIX.pack_into(blob, 0, MAGIC, VERSION, len(header), size)
    blob[_PREFIX.size : _BODY] = _digest(memoryview(blob))
    return bytes(blob)


def import_slots(cache: ReplayCache, slots: list[int], blob: bytes | bytearray | memoryview) -> None:
    """Unpack a blob into slots; negative ones are skipped.

    Raises
    ------
    ValueError, TypeError
        The blob is truncated, damaged, of another format, or of slots that do not fit; nothing has been touched then.
    """
    header, offset = _checked_header(cache, len(slots), blob)
    history = header["history"]
    rows, places = _live_entries(header["ring_start"], history, cache.spec.ring_len)
    kept = [row for row, slot in enumerate(slots) if slot >= 0]
    live = [i for i, row in enumerate(rows) if slots[row] >= 0]

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=cache.device)

    index = on_device([slots[row] for row in kept])
    entries = on_device([slots[rows[i]] for i in live]), on_device([places[i] for i in live])
    memory = bytearray(blob)
    for layer, name, shape, dtype, nbytes in _parts(cache.spec, len(cache.layers), len(slots), sum(history)):
        if nbytes:
            part = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            tensor = bit_view(cache.layers[layer][name])
            if name.startswith("ring_"):
                tensor[entries[0], :, entries[1]] = part[live].to(cache.device)
            else:
                tensor[index] = rearranged(cache, name, part[kept].to(cache.device), to_rows=False)
        offset += _padded(nbytes)
    for name, cursor in cache.cursors.items():
        cursor[index] = torch.tensor([header[name][row] for row in kept], dtype=cursor.dtype, device=cache.device)


def rearranged(cache: ReplayCache, name: str, tensor: torch.Tensor, *, to_rows: bool) -> torch.Tensor:
    """A copy of checkpoints, as integers, with their planes row by row instead of as the device has them, or the way back."""
    spec = cache.spec
    if name != "state" or not spec.two_planes or kernels.backend_of(cache.device) != "cuda":
        return tensor
    rows, width = _PANEL
    panels = spec.state_dim * tensor.itemsize // 2 // width
    pieces = tensor.contiguous().view(torch.int8).view(-1, *((panels, rows) if to_rows else (rows, panels)), width)
    return pieces.transpose(1, 2).contiguous().view(tensor.dtype).view(tensor.shape)


def _parts(spec: ReplaySpec, layers: int, slots: int, entries: int) -> Iterator[tuple[int, str, tuple[int, ...], torch.dtype, int]]:
    """Layer, tensor, shape, integer dtype and bytes of every part."""
    rings = {f"ring_{ring.name}": spec.shape(ring.outer, ring.inner) for ring in spec.rings}
    for layer in range(layers):
        for name, (inner, dtype) in spec.cache_tensors.items():
            shape = (entries, *rings[name]) if name in rings else (slots, *inner)
            yield layer, name, shape, _BITS[dtype.itemsize], math.prod(shape) * dtype.itemsize


def _live_entries(ring_start: list[int], history: list[int], ring_len: int) -> tuple[list[int], list[int]]:
    """Row and place in the ring of every live entry."""
    pairs = [(row, (start + i) % ring_len) for row, (start, h) in enumerate(zip(ring_start, history, strict=True)) for i in range(h)]
    return [row for row, _ in pairs], [place for _, place in pairs]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PADDING) * _PADDING


def _digest(blob: memoryview) -> bytes:
    """Digest of everything but the digest itself."""
    digest = hashlib.sha256(blob[: _PREFIX.size])
    digest.update(blob[_BODY:])
    return digest.digest()


def _checked_header(cache: ReplayCache, slots: int, blob: bytes | bytearray | memoryview) -> tuple[dict[str, Any], int]:
    """Header of a blob that is whole and fits, and where its parts begin."""
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise TypeError(f"blob must be bytes, got {type(blob).__name__}")
    view = memoryview(blob).cast("B")
    if len(view) < _BODY or bytes(view[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"blob must be what export returned, got {len(view)} bytes that begin with {bytes(view[: len(MAGIC)])!r}")
    _, version, header_size, size = _PREFIX.unpack_from(view)
    if version != VERSION:
        raise ValueError(f"blob must be of format version {VERSION}, got {version}")
    if len(view) != size:
        raise ValueError(f"blob must have the {size} bytes that it was exported with, got {len(view)}")
    if _digest(view) != view[_PREFIX.size : _BODY]:
        raise ValueError("blob is damaged: its digest does not match")
    header: dict[str, Any] = json.loads(bytes(view[_BODY : _BODY + header_size]))
    _check_fits(cache, slots, header)
    offset = _padded(_BODY + header_size)
    parts = _parts(cache.spec, len(cache.layers), slots, sum(header["history"]))
    if offset + sum(_padded(nbytes) for *_, nbytes in parts) != size:
        raise ValueError("blob has parts that are not those its header describes")
    return header, offset


def _check_fits(cache: ReplayCache, slots: int, header: dict[str, Any]) -> None:
    own = cache.spec
    if header["spec"] != own.describe():
        other = spec_from(header["spec"])
        names = [name for name, value in header["spec"].items() if own.describe().get(name) != value] or ["family"]
        raise ValueError(f"blob must be of this cache's spec, but differs in {', '.join(names)}: {other} is not {own}")
    if header["layers"] != len(cache.layers):
        raise ValueError(f"blob must be of {len(cache.layers)} layers, got {header['layers']}")
    if len(header["history"]) != slots:
        raise ValueError(f"slots must name the {len(header['history'])} slots of the blob, got {slots}")
    int64 = 2**63
    ranges = {"ring_start": (0, own.ring_len), "history": (0, own.buffer_len + 1), "position": (0, int64), "seed": (-int64, int64)}
    for name in own.cursors:
        if len(header[name]) != slots or any(not ranges[name][0] <= value < ranges[name][1] for value in header[name]):
            raise ValueError(f"blob has a {name} out of range")
