"""``replayssm-jit rerun``: repeat a call that failed, from the inputs that ``REPLAYSSM_LOG_LEVEL=2`` kept."""

from __future__ import annotations

import pickle

import click

from . import CheckFailedError, CliError


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option("--device", metavar="DEVICE", help="where to run it, such as cpu or cuda:1 (default: the kind it came from)")
def rerun(path: str, device: str | None) -> None:
    """Repeat the call whose inputs FILE holds; exit code 1 when it fails again."""
    import torch

    from .. import dump

    try:
        held = dump.load(path)
        where = torch.device(held["device"] if device is None else device)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CliError(f"{path} holds no call: {error}") from None
    try:
        result = dump.repeat(held, where)
    except Exception as error:
        raise CheckFailedError(f"{held['call']} raised {type(error).__name__}: {error}") from None
    shape = f", which returned {result.dtype!s}{list(result.shape)}" if isinstance(result, torch.Tensor) else ""
    click.echo(f"{held['call']} passed{shape}")
