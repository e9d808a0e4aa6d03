"""What the JIT is asked for: a plain description of one module, free of torch and of any family's knowledge."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .params import ParamStruct


@dataclass(frozen=True)
class ModuleSpec:
    """One specialization: one translation unit, one binary, one entry point.

    Parameters
    ----------
    name : str
        Name for humans; the files on disk carry it with a content hash.
    template : str
        Template to render, without its suffix, such as ``cuda/mamba2_step``.
    backend : {"cuda", "cpu"}
        Which compiler builds it.
    params : ParamStruct
        The struct that its entry point ``kernel`` takes.
    constants : tuple of (str, value)
        What the template is rendered with, sorted by name; values are str, int, float or bool.
    """

    name: str
    template: str
    backend: str
    params: ParamStruct
    constants: tuple[tuple[str, Any], ...]

    @cached_property
    def digest(self) -> str:
        """Digest of the whole description, the same in every process."""
        text = json.dumps([self.name, self.template, self.backend, self.params.c_source, self.constants])
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        # The generated hash would walk every field of the struct at each lookup.
        return hash(self.digest)
