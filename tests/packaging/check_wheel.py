"""Builds the wheel, installs it alone in a clean environment and looks at it the way a user would.

    python tests/packaging/check_wheel.py

Run it where the dependencies are installed: the clean environment borrows them instead of installing them again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from decoders.cli.new_plugin import template
from decoders.engine.model.kernels.cpu import build as cpu

ROOT = Path(__file__).parents[2]
WEIGHTS = [
    f"decoders/demo/models/{name}/{file}"
    for name in ("target", "draft", "target/medusa", "target/eagle3")
    for file in ("config.json", "model.safetensors")
]

# Nothing but our wheel is installed here yet, so whatever can be imported came with it.
NOT_IMPORTABLE = """
import importlib.util
for name in ("plugins", "grammars", "tests", "docs"):
    assert importlib.util.find_spec(name) is None, f"the wheel makes {name!r} importable"
assert importlib.util.find_spec("decoders") is not None
"""

WORKS = """
import sys
import decoders
assert sys.prefix in decoders.__file__, decoders.__file__
from decoders import demo
from decoders.constraints import library
assert "json.lark" in library.names(), library.names()
for name in library.names():
    assert library.read(name)
assert demo.available() and demo.prompts()
from decoders.registry import registry
assert "prompt_lookup" in registry().strategies()
assert "coupled" in registry().verifiers()
assert {info.status for info in registry().plugins()} == {"loaded"}, registry().plugins()
from decoders.engine.model.kernels import cpu
kernels = cpu.chosen().kernels
assert kernels is not None and sys.prefix in str(kernels.path), cpu.chosen()
"""


# Its last cells use what the first one has installed.
NOTEBOOK = """
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read("quickstart.ipynb", 4)
NotebookClient(notebook, kernel_name="python3", timeout=600).execute()
texts = [out.text for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "stream"]
assert any("the same text: True" in text for text in texts), texts
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        check_contents(wheel)

        python = environment(work / "clean")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=work)
        run(python, "-I", "-c", NOT_IMPORTABLE, cwd=work)
        borrow(python)
        run(python, "-I", "-c", WORKS, cwd=work)
        command = work / "clean" / "bin" / "decoders"
        for arguments in (
            ["--help"],
            ["--version"],
            ["strategies"],
            ["plugins", "--strict"],
            ["grammars", "json"],
            ["new-plugin", "my-idea"],
        ):
            run(command, *arguments, cwd=work)
        check_notebook(wheel, work)
    print(f"{wheel.name}: ok")


def environment(folder: Path) -> Path:
    """A new environment's interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def borrow(python: Path) -> None:
    """Lets the environment of `python` import what is installed here, but for this project, which pip would take for the wheel."""
    here, borrowed = Path(sysconfig.get_path("purelib")), python.parents[1] / "borrowed"
    borrowed.mkdir()
    for path in here.iterdir():
        if not path.name.startswith(("hf_decoders", "decoders")) and path.suffix != ".pth":
            (borrowed / path.name).symlink_to(path)
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    Path(site, "borrowed.pth").write_text(f"{borrowed}\n")


def check_notebook(wheel: Path, work: Path) -> None:
    """Runs the quickstart as somebody does who has uploaded it with the wheel: its first cell installs that."""
    python, folder = environment(work / "notebook"), work / "uploaded"
    borrow(python)
    folder.mkdir()
    for file in (wheel, ROOT / "docs" / "notebooks" / "quickstart.ipynb"):
        shutil.copy(file, folder)
    run(python, "-I", "-c", NOTEBOOK, cwd=folder)
    run(python, "-I", "-c", "import decoders, sys; assert sys.prefix in decoders.__file__", cwd=folder)


def build(folder: Path) -> Path:
    """The project's wheel, built beside torch, so that the kernels for CPUs are in it."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Raises AssertionError if something is missing from the wheel or has no business in it."""
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"decoders"}, sorted(tops)
    wanted = {"decoders/py.typed", "decoders/demo/prompts.json", "decoders/server/page/index.html", *WEIGHTS}
    wanted |= {f"decoders/_grammars/{path.name}" for path in (ROOT / "grammars").iterdir() if path.is_file()}
    wanted |= {f"decoders/_example/{path}" for path in template()}
    wanted |= {f"decoders/engine/model/kernels/cpu/{cpu.file_name(variant)}" for variant in cpu.variants()}
    assert wanted <= files, f"missing from the wheel: {sorted(wanted - files)}"


def run(*command: str | Path, cwd: Path) -> None:
    """Runs `command` quietly; its output is shown only if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed ({done.returncode}): {' '.join(map(str, command))[:200]}")


if __name__ == "__main__":
    main()
