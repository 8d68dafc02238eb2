"""``python -m decoders_lab bench device``: the command line, if decoders and decoders_lab are on the path but not installed."""

from __future__ import annotations

import decoders_lab
from decoders.cli import main
from decoders.registry import registry

if __name__ == "__main__":
    if not set(decoders_lab.COMMANDS) <= set(registry().commands()):  # no entry point has added the commands
        registry().register(decoders_lab, "lab")
    main()
