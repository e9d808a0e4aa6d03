"""The ``replayssm-jit`` command. Every foreseeable failure is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import click

from .. import __version__
from ..jit.errors import JitError


class CliError(click.ClickException):
    """A failure that the user can act on; exit code 2."""

    exit_code = 2


class CheckFailedError(click.ClickException):
    """A result is outside its bound; exit code 1."""

    exit_code = 1


class _Lazy(click.Group):
    """A group that imports a command when it is called: ``cache`` and ``models`` need not wait for the demo's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["demo", "cache", "models", "rerun"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "demo":
            from .demo import demo

            return demo
        if name == "cache":
            from .cache import cache

            return cache
        if name == "models":
            from .models import models

            return models
        if name == "rerun":
            from .rerun import rerun

            return rerun
        return None


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="replayssm-jit")
def cli() -> None:
    """Replay kernels for the recurrent layers of hybrid language models."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from ..models import ModelError

    warnings.showwarning = _show_warning
    try:
        code = cli.main(args, prog_name="replayssm-jit", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (JitError, ModelError) as error:
        return _fail(str(error), 2)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    first = message.strip().splitlines()[0] if message.strip() else "failed"
    click.echo(f"replayssm-jit: error: {first}", err=True)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"replayssm-jit: warning: {message}", err=True)
