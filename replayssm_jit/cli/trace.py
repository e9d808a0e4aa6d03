"""Requests of a trace, and the slots that serve them."""

from __future__ import annotations

import csv
import importlib.resources
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from . import CliError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
#: Requests offered against requests served: a few too many, so that a free slot is rarely idle for long.
LOAD = 1.5
#: Requests, of each slot, whose rate paces the trace: the day's first minutes are what a run serves.
PACING = 8
#: Steps in which an empty server fills up. Slots that start in different steps flush in different steps.
FILL_STEPS = 16


@dataclass
class Request:
    """One request of a trace; ``arrival`` in seconds after the first."""

    number: int
    arrival: float
    context: int
    generate: int


def read_trace(path: Path | None) -> list[Request]:
    """Read a trace in order of arrival; without a path the synthetic one that ships with the package.

    Raises
    ------
    CliError
        The file is unreadable, lacks a column, or holds a value that is not a time or a count.
    """
    if path is None:
        text = importlib.resources.files("replayssm_jit").joinpath("data/trace.csv").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"--trace: cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    return parse_trace(text.splitlines(), path or "the default trace")


def parse_trace(lines: Iterable[str], source: object) -> list[Request]:
    """Parse the lines of a trace."""
    rows = csv.DictReader(lines)
    missing = [c for c in COLUMNS if c not in (rows.fieldnames or ())]
    if missing:
        raise CliError(f"--trace: {source} has no column {missing[0]}; it needs {', '.join(COLUMNS)}")
    parsed: list[tuple[datetime, int, int]] = []
    for row in rows:
        try:
            parsed.append((_time(row["TIMESTAMP"]), _count(row["ContextTokens"], 0), _count(row["GeneratedTokens"], 1)))
        except (TypeError, ValueError) as error:
            raise CliError(f"--trace: {source}, line {rows.line_num}: {error}") from error
    if not parsed:
        raise CliError(f"--trace: {source} has no requests")
    parsed.sort(key=lambda entry: entry[0])
    start = parsed[0][0]
    return [Request(i, (when - start).total_seconds(), context, generate) for i, (when, context, generate) in enumerate(parsed)]


def _time(text: str) -> datetime:
    whole, _, fraction = text.strip().partition(".")
    fraction = fraction.rstrip("Z")
    if fraction and not fraction.isdigit():
        raise ValueError(f"TIMESTAMP must look like 2023-11-16 18:15:46.680, got {text!r}")
    try:
        when = datetime.fromisoformat(whole.rstrip("Z"))
    except ValueError:
        raise ValueError(f"TIMESTAMP must look like 2023-11-16 18:15:46.680, got {text!r}") from None
    return when + timedelta(seconds=float(f"0.{fraction}")) if fraction else when


def _count(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"token counts must be whole numbers from {least}, got {text!r}")
    return value


class Server:
    """Admits and ends requests as the trace says, first come first served; the trace repeats when it ends.

    The trace is paced to the server: a step takes as much trace time as makes the offered load :data:`LOAD`. The server starts when
    a whole batch of requests is waiting.

    Parameters
    ----------
    trace : list of Request
        In order of arrival.
    slots : int
        Requests served at once.
    tokens_per_step : float
        Tokens that a slot generates in a step, on average.
    """

    def __init__(self, trace: list[Request], slots: int, tokens_per_step: float) -> None:
        self._trace, self._next, self._offset = trace, 0, 0.0
        self._span = _span(trace)
        first = trace[: PACING * slots]
        served = slots * tokens_per_step * len(first) / sum(request.generate for request in first)
        self._step_seconds = LOAD * served * _span(first) / len(first)
        self._clock = trace[min(slots, len(trace)) - 1].arrival
        self._waiting: deque[Request] = deque()
        self._free = list(range(slots))[::-1]
        self._prefills = -(-slots // FILL_STEPS)
        self.active: dict[int, int] = {}  # slot -> tokens to go
        self.admitted = self.finished = self.context_tokens = self.generated_tokens = 0

    def admit(self) -> list[tuple[int, int]]:
        """Advance the clock by a step and admit who can be; returns (slot, number of the admission) of each."""
        self._clock += self._step_seconds
        if not self.active and not self._waiting:
            self._clock = max(self._clock, self._arrival())
        while self._arrival() <= self._clock:
            self._waiting.append(self._trace[self._next])
            self._next += 1
        admitted: list[tuple[int, int]] = []
        while self._waiting and self._free and len(admitted) < self._prefills:
            request, slot = self._waiting.popleft(), self._free.pop()
            self.active[slot] = request.generate
            self.admitted += 1
            self.context_tokens += request.context
            admitted.append((slot, self.admitted))
        return admitted

    def _arrival(self) -> float:
        """When the next request comes."""
        if self._next == len(self._trace):
            self._next = 0
            self._offset += self._span
        return self._trace[self._next].arrival + self._offset

    def accept(self, counts: dict[int, int]) -> None:
        """Count accepted tokens by slot; requests that have all of theirs free their slots."""
        for slot, count in counts.items():
            self.generated_tokens += count
            self.active[slot] -= count
            if self.active[slot] <= 0:
                del self.active[slot]
                self._free.append(slot)
                self.finished += 1


def _span(trace: list[Request]) -> float:
    """Seconds from the first request to where the next repetition may start."""
    return max(trace[-1].arrival, 1e-3) * (len(trace) + 1) / len(trace)
