"""``replayssm-jit demo``: a published model's shapes under a trace's traffic, standard against replay, everything checked."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import models
from ..specs import DTYPE_NAMES, MAX_BUFFER_LEN, MAX_TOKENS, ReplaySpec
from ..standard import check_precision
from . import CheckFailedError, CliError
from .serve import Phase, Summary
from .trace import read_trace

DEFAULT_MODEL = "nemotron-3-nano-4b"
#: fp32 bytes of state served, and requests at once, when the command line does not say: far more than any cache, little
#: enough for the time limit.
_STATE_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
_BATCH = {"cpu": 16, "cuda": 256}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


class _Range(click.FloatRange):
    """A range that NaN is outside of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


@click.command()
@click.option("--model", metavar="NAME", help=f"Published model (`replayssm-jit models` lists them).  [default: {DEFAULT_MODEL}]")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="config.json of a Hugging Face model, instead of --model.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="Requests: TIMESTAMP, ContextTokens, GeneratedTokens.  [default: a synthetic one]",
)
@click.option(
    "--backend", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True, help="auto: CUDA where there is a device."
)
@click.option("--acceptance", type=_Range(0, 1), default=0.8, show_default=True, help="Chance that a draft is accepted.")
@click.option(
    "--tokens-per-step",
    type=click.IntRange(2, MAX_TOKENS),
    default=4,
    show_default=True,
    help="1 + drafts of a verification step.",
)
@click.option("--buffer-len", type=click.IntRange(1, MAX_BUFFER_LEN), default=16, show_default=True, help="Most history a slot holds.")
@click.option("--checkpoint-dtype", type=click.Choice(list(_DTYPES)), help="What is kept of the state.  [default: the model's]")
@click.option(
    "--read-dtype",
    type=click.Choice(list(_DTYPES)),
    help="What steps read of it: a plane, a copy, or all.  [default: bfloat16 of a float32 checkpoint, all of others]",
)
@click.option("--batch", type=click.IntRange(1, 4096), metavar="N", help="Requests served at once.")
@click.option("--layers", type=click.IntRange(1, 512), metavar="N", help="Layers, instead of what fits.")
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=200, show_default=True, help="Decode steps; half as many verify.")
@click.option("--seconds", type=_Range(1), default=60.0, show_default=True, help="Stop serving after about this long.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of weights, tokens, states and acceptance.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the table's rows.")
def demo(
    model: str | None,
    config: Path | None,
    trace: Path | None,
    backend: str,
    acceptance: float,
    tokens_per_step: int,
    buffer_len: int,
    checkpoint_dtype: str | None,
    read_dtype: str | None,
    batch: int | None,
    layers: int | None,
    steps: int,
    seconds: float,
    seed: int,
    json_path: Path | None,
) -> None:
    """Serve a model's recurrent layers and compare replay with the standard kernel.

    A few hundred steps of plain decode, then steps with drafts. Every output is checked against the standard kernel, sampled
    heads against a float64 reference, and the final states at the end.
    """
    if model is not None and config is not None:
        raise CliError("--model and --config exclude each other")
    if tokens_per_step > buffer_len:
        raise CliError(f"--tokens-per-step must be at most --buffer-len {buffer_len}, got {tokens_per_step}")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise CliError(f"--json: there is no directory {json_path.absolute().parent}")
    requests = read_trace(trace)
    shapes = models.by_name(model or DEFAULT_MODEL) if config is None else models.from_config(config)
    device = _device(backend)
    given = {"checkpoint_dtype": checkpoint_dtype, "read_dtype": read_dtype}
    dtypes = {name: _DTYPES[value] for name, value in given.items() if value is not None}
    try:
        check_precision(dtypes.get("checkpoint_dtype", torch.float32))
    except ValueError as error:
        raise CliError(f"--checkpoint-dtype {checkpoint_dtype}: {error}, and replay is compared with it here") from error
    specs = [shapes.spec(buffer_len=buffer_len, max_tokens=tokens, **dtypes) for tokens in (1, tokens_per_step)]
    batch, layers = _fit(specs[-1], device, batch, layers, shapes.layers)

    console = Console()
    state = batch * layers * specs[0].state_elements * specs[0].checkpoint_dtype.itemsize
    console.print(
        f"{shapes.name} ({shapes.family}): {layers} layers, batch {batch}, {state / 2**20:.0f} MiB of state, on {_device_name(device)}",
        soft_wrap=True,
        highlight=False,
    )
    start = time.monotonic()
    summaries = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for spec, count, share in zip(specs, (steps, (steps + 1) // 2), (0.45, 1.0), strict=True):
            name = "decode" if spec.max_tokens == 1 else f"verify {spec.max_tokens} tokens"
            task = progress.add_task(name, total=count)
            phase = Phase(spec, device, layers, batch, acceptance, requests, seed)
            phase.run(count, start + share * seconds, lambda task=task: progress.advance(task))  # type: ignore[misc]
            summaries.append(phase.finish(shapes.name))
            del phase
    for summary in summaries:
        _report(console, summary)
    console.print(_table(summaries))
    if json_path is not None:
        _write_json(json_path, summaries)
    _judge(summaries)


def _device(backend: str) -> torch.device:
    if backend == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if backend == "cuda":
        raise CliError("--backend cuda: torch finds no CUDA device")
    return torch.device("cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"


def _fit(spec: ReplaySpec, device: torch.device, batch: int | None, layers: int | None, model_layers: int | None) -> tuple[int, int]:
    """Batch and layers: what was asked for, else as many layers as make enough state and fit into memory."""
    slot = spec.state_elements * spec.checkpoint_dtype.itemsize
    # Replay's cache, the standard kernel's snapshots, and room for the final comparison.
    row_bytes = spec.bytes_per_slot + (spec.max_tokens + 2) * slot
    fitting = int(0.7 * _free_bytes(device) // row_bytes)  # slots of one layer
    if batch is None:
        batch = max(1, min(_BATCH[device.type], fitting // (layers or 1)))
    if fitting < batch * (layers or 1):
        need = batch * (layers or 1) * row_bytes / 2**30
        raise CliError(f"--layers {layers or 1} --batch {batch} need {need:.1f} GiB, more than is free on {device}: lower them")
    if layers is None:
        layers = max(1, min(_STATE_BYTES[device.type] // (batch * slot), fitting // batch, model_layers or 512))
    return batch, layers


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _report(console: Console, summary: Summary) -> None:
    console.print(
        f"{summary.row.mode}: {summary.steps} steps, {summary.requests} requests admitted ({summary.context_tokens} context tokens), "
        f"{summary.finished} ended, {summary.generated_tokens} tokens generated; final states agree to {summary.state_error:.1e}",
        soft_wrap=True,
        highlight=False,
    )


def _table(summaries: list[Summary]) -> Table:
    table = Table(title="A step of all layers, standard / replay", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("mode", "batch", "T", "L", "MiB of state", "ms", "speed-up", "error"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for row in (summary.row for summary in summaries):
        table.add_row(
            *(row.mode, str(row.batch), str(row.tokens_per_step), str(row.buffer_len)),
            f"{row.state_bytes_standard / 2**20:.4g} / {row.state_bytes_replay / 2**20:.4g}",
            f"{row.us_standard / 1e3:.4g} / {row.us_replay / 1e3:.4g}",
            *(f"{row.speedup:.2f}", f"{row.max_rel_error:.1e}"),
        )
    return table


def _write_json(path: Path, summaries: list[Summary]) -> None:
    text = json.dumps([asdict(summary.row) for summary in summaries], indent=1) + "\n"
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise CliError(f"--json: cannot write {path}: {error.strerror or error}") from error


def _judge(summaries: list[Summary]) -> None:
    for summary in summaries:
        row = summary.row
        if not row.max_rel_error <= summary.output_bound:
            raise CheckFailedError(f"{row.mode}: outputs differ by {row.max_rel_error:.2e}, more than {summary.output_bound:.2e}")
        if not summary.state_error <= summary.state_bound:
            raise CheckFailedError(f"{row.mode}: final states differ by {summary.state_error:.2e}, more than {summary.state_bound:.2e}")
