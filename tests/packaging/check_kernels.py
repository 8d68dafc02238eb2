"""Compiles every variant of the CPU's kernels for this kind of machine without a warning, also with clang where it is installed, and
tests what this one would not run by itself: the best variant with the address and undefined-behaviour sanitizers, variants whose
instructions the processor lacks with these in plain C++, and, where there are a cross compiler and an emulator, the variant for Arm.

    python tests/packaging/check_kernels.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from decoders.engine.model.kernels.cpu import build
from decoders.engine.model.torch_compat import has_instructions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")
#: Variants that `emulated.h` makes run on processors with the instructions of the last one.
EMULATED, EMULATED_ON = ("amx", "avx512_bf16"), "avx512_vnni"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
#: Macs have clang, which does not know GCC's options for warnings.
CLANG, STRICT = "clang++", ("-Werror", "-Wno-unknown-warning-option")


def main() -> None:
    for program in filter(None, {build.compiler(), shutil.which(CLANG)}):
        with mock.patch.dict(os.environ, CXX=program), tempfile.TemporaryDirectory() as folder:
            for variant in build.variants():
                name = build.compile_into(Path(folder), variant, STRICT).name
                print(f"{name} of {program}: no warnings", flush=True)
    best = next(filter(has_instructions, build.variants()))
    test(best, SANITIZERS)
    print(f"{best}: nothing found by the sanitizers", flush=True)
    lacking = [variant for variant in EMULATED if variant in build.variants() and not has_instructions(variant)]
    for variant in lacking if has_instructions(EMULATED_ON) else ():
        test(variant, ("-include", str(HERE / "emulated.h"), *SANITIZERS), "-p", "tests.packaging.pretended_processor")
        print(f"{variant}: right with the instructions that this processor lacks in plain C++", flush=True)
    missing = [program for program in (CROSS_COMPILER, EMULATOR) if shutil.which(program) is None]
    if build.machine() == "aarch64" or missing:
        print(f"neon: not checked here, {', '.join(missing)} missing" if missing else "neon: the tests ran on it")
        return
    neon()


def test(variant: str, options: tuple[str, ...], *arguments: str) -> None:
    """Runs the tests of a variant that is compiled with `options` of sanitizers, among others."""
    with tempfile.TemporaryDirectory() as folder:
        build.compile_into(Path(folder, "hf-decoders", "kernels"), variant, options)
        environment = os.environ | {
            "XDG_CACHE_HOME": folder,
            "LD_PRELOAD": " ".join(library(name) for name in ("libasan.so", "libubsan.so")),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing at its end
            "DECODERS_CPU_KERNELS": variant,
        }
        tests = [str(path) for path in sorted((ROOT / "tests/engine/model/kernels").glob("test_cpu_*.py"))]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *arguments, "-k", variant, *tests]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


def library(name: str) -> str:
    compiler = build.compiler()
    assert compiler is not None
    return subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()


def neon() -> None:
    """Compiles the variant for Arm without a warning, and compares its functions with float64."""
    arm = mock.patch.object(build, "machine", return_value="aarch64")
    with arm, mock.patch.dict(os.environ, CXX=CROSS_COMPILER), tempfile.TemporaryDirectory() as folder:
        for name in ("torch_cpu", "c10"):  # in place of torch's, which are not for Arm
            subprocess.run(
                [CROSS_COMPILER, "-shared", "-x", "c++", os.devnull, "-o", f"{folder}/lib{name}.so"], check=True
            )
        print(f"{build.compile_into(Path(folder), 'neon', ('-Werror', f'-L{folder}')).name}: no warnings", flush=True)
        program = f"{folder}/against_float64"
        command = [
            CROSS_COMPILER,
            *build.FLAGS,
            "-Werror",
            "-static",
            f"-I{build.FOLDER}",
            HERE / "against_float64.cpp",
            "-o",
            program,
        ]
        subprocess.run(command, check=True)
        subprocess.run([EMULATOR, program], check=True)
    print("neon: right under an emulator")


if __name__ == "__main__":
    main()
