"""Runs the quick tests against the oldest versions that pyproject.toml allows.

python tests/packaging/lower_bounds.py                          # of all dependencies, also of a server
python tests/packaging/lower_bounds.py transformers -- -k fuzz  # of some packages, some tests
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Triton 3.6, which belongs to torch 2.11, makes numbers of arrays in its interpreter. numpy 2.4 refuses that, older ones warn.
INTERPRETER = "numpy<2.4"
#: What old versions deprecate says nothing about this package.
OPTIONS = ("-n", "2", "--dist", "worksteal", "-W", "ignore::DeprecationWarning")


def lower_bounds(packages: list[str]) -> list[str]:
    """``transformers==5.17.*`` for each of `packages`, a dependency ``transformers>=5.17``; for all dependencies without `packages`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["gguf"], *extras["bench"], *extras["serve"]]
    oldest = {m[1]: m[2] for line in lines if (m := re.match(r"([\w-]+)>=([\d.]+)", line))}
    unknown = sorted(set(packages) - set(oldest))
    if unknown:
        raise SystemExit(
            f"{', '.join(unknown)}: no dependency with a lower bound. Choose from: {', '.join(sorted(oldest))}"
        )
    return [f"{name}=={oldest[name]}.*" for name in packages or oldest]


def main() -> None:
    arguments = [*sys.argv[1:], "--"]
    end = arguments.index("--")
    packages, options = arguments[:end], arguments[end + 1 : -1]
    pins = lower_bounds(packages)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "oldest", with_pip=True)
        python = str(Path(folder) / "oldest" / "bin" / "python")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test,serve]", *pins, INTERPRETER], check=True
        )
        subprocess.run([python, "-m", "pip", "list"], check=True)
        command = [python, "-m", "pytest", *OPTIONS, *options]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
