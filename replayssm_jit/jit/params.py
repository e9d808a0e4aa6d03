"""The parameter struct of a kernel, declared once: the C struct and the Python packing both come from here.

A kernel takes one struct by value (CUDA) or by pointer (CPU). Fields are ordered widest first, so the C compiler inserts
no padding and :class:`struct.Struct` with native sizes gives the same bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    count : int
        Elements of an array member; 1 is a plain one.
    """

    name: str
    kind: str
    count: int = 1

    @property
    def width(self) -> int:
        """Bytes."""
        return _WIDTHS[self.kind] * self.count


@dataclass(frozen=True)
class ParamStruct:
    """An ordered set of fields with its C source and its packing.

    Parameters
    ----------
    fields : tuple of Field
        Members, widest first.
    name : str
        Name of the C struct.
    tables : tuple of ParamStruct
        Structs that a pointer member leads to.
    """

    fields: tuple[Field, ...]
    name: str = "Params"
    tables: tuple[ParamStruct, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        ptr: Iterable[str] = (),
        i64: Iterable[str] = (),
        i32: Iterable[str] = (),
        f32: Iterable[str] = (),
        name: str = "Params",
        tables: Iterable[ParamStruct] = (),
    ) -> ParamStruct:
        """Build a struct from names grouped by type; ``"name[4]"`` is an array of four."""
        groups = {"ptr": ptr, "i64": i64, "i32": i32, "f32": f32}
        fields = tuple(_field(text, kind) for kind, names in groups.items() for text in names)
        if len({f.name for f in fields}) != len(fields):
            raise ValueError(f"parameter names must be unique, got {[f.name for f in fields]}")
        return cls(fields, name, tuple(tables))

    def __reduce__(self) -> tuple[Any, ...]:
        return ParamStruct, (self.fields, self.name, self.tables)  # without what is cached: a struct.Struct cannot be pickled

    @cached_property
    def c_source(self) -> str:
        """C definition of the struct, after those of its tables."""
        body = "".join(f"  {_C_TYPES[f.kind]} {f.name}{f'[{f.count}]' if f.count > 1 else ''};\n" for f in self.fields)
        check = f'static_assert(sizeof({self.name}) == {self.size}, "packing differs from the host\'s");\n'
        return "".join(table.c_source for table in self.tables) + f"struct {self.name} {{\n{body}}};\n{check}"

    @cached_property
    def packer(self) -> struct.Struct:
        """Packer of all fields in declaration order."""
        tail = "4x" if sum(f.width for f in self.fields) % 8 else ""
        return struct.Struct("@" + "".join(_FORMATS[f.kind] * f.count for f in self.fields) + tail)

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
        return sum(f.width for f in self.fields[: self.index[name]])

    def buffer(self, count: int = 1) -> ctypes.Array[ctypes.c_char]:
        """A zeroed buffer that holds one struct, or several."""
        return ctypes.create_string_buffer(count * self.size)

    def pack(self, buffer: ctypes.Array[ctypes.c_char], at: int = 0, **values: int | float | Sequence[int]) -> None:
        """Write a whole struct, the one at index ``at``; fields not named are zero, and so is the rest of an array.

        Raises
        ------
        TypeError
            A value names no field.
        """
        unknown = values.keys() - self.index.keys()
        if unknown:
            raise TypeError(f"unknown parameters {sorted(unknown)}; the struct has {[f.name for f in self.fields]}")
        given: list[Any] = [values.get(f.name, 0) for f in self.fields]
        for i in self._arrays:
            elements = given[i] or ()
            given[i : i + 1] = [*elements, *[0] * (self.fields[i].count - len(elements))]
        self.packer.pack_into(buffer, at * self.size, *given)

    @cached_property
    def _arrays(self) -> tuple[int, ...]:
        return tuple(i for i, f in reversed(list(enumerate(self.fields))) if f.count > 1)

    def layout(self) -> list[dict[str, object]]:
        """Name, type and byte offset of every field, for manifests."""
        return [
            {"name": f.name, "type": f.kind if f.count == 1 else f"{f.kind}[{f.count}]", "offset": self.offset(f.name)} for f in self.fields
        ]


def _field(text: str, kind: str) -> Field:
    name, _, count = text.rstrip("]").partition("[")
    return Field(name, kind, int(count or 1))
