"""Compiles the CPU kernels for torch's stable ABI (2.11 or newer), to one shared object per kind of processor.

Compiling needs a C++ compiler and torch's headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
#: For each kind of machine, its variants with their compiler options, best variant first.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "avx512_bf16": _AVX512_BF16,
        "avx512_vnni": _AVX512_VNNI,
        "avx512": _AVX512,
        "avx2": _AVX2,
        "portable": (),
    },
    "aarch64": {"neon": (), "portable": ("-DDECODERS_PORTABLE",)},
}
#: The kernels use torch's stable ABI as of this version, 2.11.
_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
#: Warnings of uninitialized values are off, because GCC's AVX-512 header leaves values uninitialized on purpose (GCC bug 105593).
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
    _TARGET,
)  # fmt: skip


def machine() -> str:
    """The architecture of this machine's processor: "x86_64", "aarch64", or the system's name for another one."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def variants() -> dict[str, tuple[str, ...]]:
    """The variants for this kind of machine, best first; empty on systems other than Linux and macOS."""
    return VARIANTS.get(machine(), {"portable": ()}) if sys.platform in ("linux", "darwin") else {}


def compiler() -> str | None:
    """The path of the C++ compiler that CXX names; without CXX, of g++, clang++ or c++. None if no such compiler is found."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def digest(variant: str) -> str:
    """A hash of the kernels' sources and the variant's compiler options."""
    content = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.h")) + sorted(FOLDER.glob("*.cpp")))
    return hashlib.sha256(content + repr((FLAGS, variants()[variant])).encode()).hexdigest()[:16]


def file_name(variant: str) -> str:
    return f"kernels-{variant}-{digest(variant)}.so"


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lets one process at a time create `path`. If the file system has locks, other processes wait until this one is done or dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_into(folder: Path, variant: str, more: tuple[str, ...] = ()) -> Path:
    """Compiles a variant, and returns the shared object. Other processes never see a half-written file. more: further compiler options.

    Raises:
        OSError: there is no compiler, the folder cannot be written, or the compiler failed.
    """
    import torch

    program, to, home = compiler(), folder / file_name(variant), Path(torch.__file__).parent
    if program is None:
        raise FileNotFoundError("no C++ compiler: install g++ or clang, or set CXX")
    headers = [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    own = [*variants()[variant], f"-DDECODERS_NAMESPACE=decoders_{variant}"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        objects = {source: Path(beside) / f"{source.stem}.o" for source in sorted(FOLDER.glob("*.cpp"))}

        def run(*arguments: str | Path) -> None:
            command = [program, *FLAGS, *own, *more, *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"{program} does not compile the kernels for CPUs: {done.stderr.strip()[:2000]}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: run(*headers, "-c", source, "-o", objects[source]), objects))
        made = Path(beside) / to.name
        run("-shared", *objects.values(), "-o", made, *libraries)
        made.replace(to)
    return to
