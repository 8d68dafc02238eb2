"""Compiles every variant of the CPU's kernels for this kind of machine without a warning, and runs the tests of the best one that it
can run with the address and undefined-behaviour sanitizers.

    python tests/packaging/check_kernels.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from decoders.engine.model.kernels.cpu import build
from decoders.engine.model.torch_compat import has_instructions

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for variant in build.variants():
            print(f"{build.compile_into(Path(folder), variant, ('-Werror',)).name}: no warnings", flush=True)
    best = next(filter(has_instructions, build.variants()))
    with tempfile.TemporaryDirectory() as folder:
        build.compile_into(Path(folder, "hf-decoders", "kernels"), best, SANITIZERS)
        environment = os.environ | {
            "XDG_CACHE_HOME": folder,
            "LD_PRELOAD": " ".join(library(name) for name in ("libasan.so", "libubsan.so")),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing at its end
            "DECODERS_CPU_KERNELS": best,
        }
        tests = [str(path) for path in sorted((ROOT / "tests/engine/kernels").glob("test_cpu_*.py"))]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", best, *tests]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    print(f"{best}: nothing found by the sanitizers")


def library(name: str) -> str:
    compiler = build.compiler()
    assert compiler is not None
    return subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()


if __name__ == "__main__":
    main()
