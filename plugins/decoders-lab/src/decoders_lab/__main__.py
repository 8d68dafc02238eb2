"""``python -m decoders_lab bench device``: the command line where these are on the path and nothing is installed."""

from __future__ import annotations

import decoders_lab
from decoders.cli import main
from decoders.registry import registry

if __name__ == "__main__":
    if not set(decoders_lab.COMMANDS) <= set(registry().commands()):  # no entry point has brought them
        registry().register(decoders_lab, "lab")
    main()
