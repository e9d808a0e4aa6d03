"""State and output errors of every checkpoint format against the float64 recurrence, over tens of thousands of tokens.

One data set a family, for replay in every format and for plain decode (the standard kernel, one token a launch, its state rounded at
each) in those of one plane: ``python benchmarks/accuracy.py --markdown accuracy.md``. Runs on the CPU backend, in minutes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import FAMILIES, make_inputs, make_weights, recurrence, relative_error, small_spec
from test_long_run import OPTIONAL, replay, slow

from replayssm_jit import ReplayCache
from replayssm_jit.specs import DTYPE_NAMES, STATE_FORMATS, ReplaySpec
from replayssm_jit.standard import StandardKernel

NAMES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}
PARTS = 512  # tokens at either end whose outputs are compared


def plain(spec: ReplaySpec, device: torch.device, weights, tokens, state):
    """One token a launch; the state is rounded to its dtype at each."""
    kernel = StandardKernel(spec, device)
    cache = ReplayCache.allocate(kernel.spec, num_layers=1, num_slots=1, device=device)  # encodes and decodes the state
    cache.load_state(0, [0], state[None])
    layer, slots, out = cache.layers[0], torch.zeros(1, dtype=torch.int32, device=device), []
    inputs = {k: v[None] for k, v in tokens.items()}
    for t in range(next(iter(tokens.values())).shape[0]):
        token = {k: v[:, t : t + 1] for k, v in inputs.items()}
        out.append(kernel.run(layer["state"], slots, scale=layer.get("scale"), **token, **weights)[0])
    return torch.cat(out), cache.read_state(0, [0])[0]


def rows(family: str, device: torch.device, length: int, seed: int):
    """Cells of one family's lines."""
    base = small_spec(family, heads=2, head_dim=64, state_dim=64, buffer_len=16, **{"groups" if family == "mamba2" else "key_heads": 1})
    generator = torch.Generator().manual_seed(seed)
    weights = slow(make_weights(base, generator, OPTIONAL))
    tokens = make_inputs(base, length, generator, OPTIONAL)
    state = torch.randn(base.shape("H", "P", "N"), generator=generator)
    want, final = recurrence(base, tokens, weights, state.double())
    weights, tokens = ({k: v.to(device) for k, v in given.items()} for given in (weights, tokens))
    state = state.to(device)
    ends = (slice(PARTS, 2 * PARTS), slice(-PARTS, None))  # the first tokens still see the initial state

    def line(kind, name, got, found):
        errors = [relative_error(got[part].cpu(), want[part]) for part in ends]
        return [NAMES[family], kind, name, f"{relative_error(found.cpu(), final):.1e}", f"{errors[0]:.2e} / {errors[1]:.2e}"]

    for checkpoint, read in STATE_FORMATS:
        spec = replace(base, checkpoint_dtype=checkpoint, read_dtype=read)
        pair = DTYPE_NAMES[checkpoint] if checkpoint is read else f"{DTYPE_NAMES[checkpoint]}/{DTYPE_NAMES[read]}"
        for rounding in ("nearest", "stochastic") if checkpoint is not torch.float32 else ("nearest",):
            name = pair if rounding == "nearest" else f"{pair}, stochastic"
            yield line("replay", name, *replay(replace(spec, rounding=rounding), device, weights, tokens, state, seed + 1))
        if checkpoint is read:
            yield line("plain decode", pair, *plain(spec, device, weights, tokens, state))


def main() -> None:
    """Run, and print the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--seed", type=int, default=70)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = options.family or FAMILIES
    found: dict[tuple[str, str], list[str]] = {}
    for family in families:
        for name, kind, pair, state, outputs in rows(family, options.device, options.tokens, options.seed):
            print(f"{name}: {kind}, {pair}: {state}, {outputs}", flush=True)
            found.setdefault((kind, pair), []).extend((state, outputs))
    head = ["kernel", "checkpoint/read", *(cell for family in families for cell in (f"{NAMES[family]}: state", "outputs"))]
    lines = [head, ["---"] * len(head), *([*key, *cells] for key, cells in sorted(found.items(), key=lambda item: item[0][0] != "replay"))]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    if options.markdown:
        options.markdown.write_text(table)
    else:
        print(table)


if __name__ == "__main__":
    main()
