"""``replayssm-jit cache``: look after the compiled modules on disk."""

from __future__ import annotations

from pathlib import Path

import click

from ..jit import env
from ..jit.inventory import cache_clear, cache_list, cache_verify
from . import CheckFailedError


@click.group()
def cache() -> None:
    """List, check or delete compiled modules."""


def _directories() -> list[str]:
    """The read-only directories, and the cache."""
    return [*env.extra_cache_dirs(), env.cache_dir()]


@cache.command("list")
def list_() -> None:
    """List the modules and where they lie."""
    for directory in _directories():
        modules = cache_list(directory)
        total = sum(module.bytes for module in modules)
        click.echo(f"{directory}: {len(modules)} modules, {total / 2**20:.1f} MiB")
        for module in modules:
            note = f"damaged: {module.problem}" if module.problem else module.arch
            click.echo(f"  {module.bytes / 1024:8.1f} KiB  {Path(module.directory).name}  {note}")


@cache.command()
def verify() -> None:
    """Compare every file with its digest; exit code 1 when one differs."""
    damaged = [module for directory in _directories() for module in cache_verify(directory)]
    for module in damaged:
        click.echo(f"{module.directory}: {module.problem}")
    if damaged:
        raise CheckFailedError(f"{len(damaged)} modules are damaged; each is compiled anew when next needed")
    click.echo("every module is whole")


@cache.command()
def clear() -> None:
    """Delete every module of the cache; read-only directories are left alone."""
    click.echo(f"{cache_clear()} modules deleted from {env.cache_dir()}")
