"""Starts the processes of :mod:`.fresh` and reads their figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from .fresh import Job

MODULE = "decoders.bench.fresh"
#: Last lines of a process's standard error that are shown if it ended without a result.
LINES = 3


def in_new_process(
    job: Job, compile_cache: Path | None = None, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """The figures of `job` from a process of its own; ``error`` among them if it did not get through.

    Args:
        compile_cache: folder for what torch.compile keeps on disk; None leaves it where it is.
    """
    # The package that is running, wherever the process would find another one.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    if compile_cache is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", env=environment,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        result: dict[str, Any] | None = None
        try:
            process.stdin.write(json.dumps(asdict(replace(job, spawned=time.time()))))
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                result = message.get("result", result)
                if "progress" in message:
                    progress(message["progress"])
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if result is None:
            result = {"error": ending(process, errors)}
    return result


def ending(process: subprocess.Popen[str], errors: IO[str]) -> str:
    """How a process ended that gave no result, with the last lines of its standard error."""
    errors.seek(0)
    last = [line.strip() for line in errors.read().splitlines() if line.strip()][-LINES:]
    return f"the process ended with {process.returncode}: {' / '.join(last)}"
