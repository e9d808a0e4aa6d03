"""What calls are told about: ``REPLAYSSM_LOG_LEVEL``, read when a cache or a wrapper is made. Off, nothing is wrapped and nothing paid.

Level 1 prints every call with the shapes of its arguments before it runs. Level 2 also writes its inputs to a file first, waits for the
device, and deletes the file when the call has succeeded: what raises, aborts the process or kills the context leaves its inputs
behind, and ``replayssm-jit rerun FILE`` repeats it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .jit import env


def attach(owner: Any, names: Iterable[str]) -> None:
    """Wrap methods of one object, if the environment asks for it now.

    Raises
    ------
    ValueError
        The environment asks for no known level.
    """
    level = env.log_level()
    if level:
        for name in names:
            setattr(owner, name, _logged(owner, name, level))


def _logged(owner: Any, name: str, level: int) -> Callable[..., Any]:
    method = getattr(owner, name)
    title = f"{type(owner).__name__}.{name}"

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        texts = [*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs.items())]
        _print(f"{title}({', '.join(texts)})")
        # A capture runs nothing, and nothing can be copied to the host in it.
        if level < 2 or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return method(*args, **kwargs)
        from . import dump  # which imports what it dumps

        try:
            path = dump.write(owner, name, args, kwargs)
        except (OSError, RuntimeError) as error:  # a full disk, a context that is lost already
            _print(f"the inputs of {title} cannot be kept: {error}")
            return method(*args, **kwargs)
        try:
            result = method(*args, **kwargs)
            device = getattr(owner, "cache", owner).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except BaseException as error:
            _print(f"{title} raised {type(error).__name__}: {error}; for its inputs: replayssm-jit rerun {path}")
            raise
        os.remove(path)
        return result

    return call


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dense = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{dense} on {value.device}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes[{len(value)}]"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def _print(message: str) -> None:
    print(f"replayssm-jit: {message}", file=sys.stderr, flush=True)
