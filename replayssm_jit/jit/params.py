"""The parameter struct of a kernel, declared once: the C struct and the Python packing both come from here.

A kernel takes one struct by value (CUDA) or by pointer (CPU). Fields are ordered widest first, so the C compiler inserts
no padding and :class:`struct.Struct` with native sizes gives the same bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_C_TYPES = {"ptr": "void*", "i64": "long long", "i32": "int", "f32": "float"}
_FORMATS = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}
_WIDTHS = {"ptr": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class Field:
    """One member of a parameter struct.

    Parameters
    ----------
    name : str
        Name of the member, the same in C and in Python.
    kind : {"ptr", "i64", "i32", "f32"}
        Its type. Strides are ``i64`` and count elements, not bytes.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class ParamStruct:
    """An ordered set of fields with its C source and its packing.

    Parameters
    ----------
    fields : tuple of Field
        Members, widest first.
    """

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, *, ptr: Iterable[str] = (), i64: Iterable[str] = (), i32: Iterable[str] = (), f32: Iterable[str] = ()) -> ParamStruct:
        """Build a struct from names grouped by type."""
        groups = {"ptr": ptr, "i64": i64, "i32": i32, "f32": f32}
        fields = tuple(Field(name, kind) for kind, names in groups.items() for name in names)
        if len({f.name for f in fields}) != len(fields):
            raise ValueError(f"parameter names must be unique, got {[f.name for f in fields]}")
        return cls(fields)

    @cached_property
    def c_source(self) -> str:
        """C definition of ``struct Params``."""
        body = "".join(f"  {_C_TYPES[f.kind]} {f.name};\n" for f in self.fields)
        return f'struct Params {{\n{body}}};\nstatic_assert(sizeof(Params) == {self.size}, "packing differs from the host\'s");\n'

    @cached_property
    def packer(self) -> struct.Struct:
        """Packer of all fields in declaration order."""
        tail = "4x" if sum(_WIDTHS[f.kind] for f in self.fields) % 8 else ""
        return struct.Struct("@" + "".join(_FORMATS[f.kind] for f in self.fields) + tail)

    @cached_property
    def size(self) -> int:
        """Size of the struct in bytes, trailing padding included."""
        return self.packer.size

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each field by name."""
        return {f.name: i for i, f in enumerate(self.fields)}

    def offset(self, name: str) -> int:
        """Byte offset of a field."""
        return sum(_WIDTHS[f.kind] for f in self.fields[: self.index[name]])

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """A zeroed buffer that holds one struct."""
        return ctypes.create_string_buffer(self.size)

    def pack(self, buffer: ctypes.Array[ctypes.c_char], **values: int | float) -> None:
        """Write a whole struct; fields not named are zero.

        Raises
        ------
        TypeError
            A value names no field.
        """
        unknown = values.keys() - self.index.keys()
        if unknown:
            raise TypeError(f"unknown parameters {sorted(unknown)}; the struct has {[f.name for f in self.fields]}")
        self.packer.pack_into(buffer, 0, *(values.get(f.name, 0) for f in self.fields))

    def layout(self) -> list[dict[str, object]]:
        """Name, type and byte offset of every field, for manifests."""
        return [{"name": f.name, "type": f.kind, "offset": self.offset(f.name)} for f in self.fields]
