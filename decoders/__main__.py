"""The command line, as ``decoders`` and as ``python -m decoders``."""

import sys


def main() -> None:
    """Entry point of the console script. Ctrl-C prints no traceback, even while the commands are being imported."""
    try:
        from .cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
