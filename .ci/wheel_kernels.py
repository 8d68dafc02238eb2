"""Puts the kernels for CPUs into a wheel that is built where torch and a compiler are: `python -m build --wheel --no-isolation`.

An isolated build has no torch; its wheel is for every machine, and the first process on a machine compiles the kernels.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "decoders/engine/model/kernels/cpu"


class Kernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("kernels_build", Path(self.root, KERNELS, "build.py"))
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(
            spec
        )  # not imported with its package, which imports what is not there yet
        spec.loader.exec_module(build)
        if version == "editable" or importlib.util.find_spec("torch") is None or build.compiler() is None:
            return
        self.folder = tempfile.TemporaryDirectory()
        for variant in build.variants():
            path = build.compile_into(Path(self.folder.name), variant)
            build_data["force_include"][str(path)] = f"{KERNELS}/{path.name}"
        if build.variants():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
