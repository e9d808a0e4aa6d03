"""``python -m replayssm_jit``: the command line."""

from .cli import main

main()
