"""``replayssm-jit models``: the shapes that ship with the package."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from ..models import ModelError, published


@click.command()
def models() -> None:
    """List the published models whose shapes are known."""
    table = Table(box=None, pad_edge=False)
    for column, justify in (("model", "left"), ("family", "left"), ("heads", "right"), ("groups", "right"), ("head_dim", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for column in ("state_dim", "layers", "state a slot"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in published().values():
        fields = model.fields
        state = fields["heads"] * fields["head_dim"] * fields["state_dim"] * 4
        numbers = (fields["heads"], fields.get("groups", fields.get("key_heads")), fields["head_dim"], fields["state_dim"])
        try:
            model.spec()
            size = f"{state * (model.layers or 1) / 2**20:.1f} MiB" + ("" if model.layers else " a layer")
        except ModelError:
            size = "not supported"
        table.add_row(model.name, model.family, *map(str, numbers), str(model.layers or "-"), size)
    Console(width=140).print(table)
