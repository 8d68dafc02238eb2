"""vLLM beside a scheduler, in a process of its own: its versions of torch and transformers are others."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from decoders.bench.load import Arrival, LoadResult, result_of
from decoders.errors import DecodersError

from .fresh import ending
from .vllm_process import MARK


class Vllm:
    """An engine that serves loads until it is closed; between them it waits.

    Args:
        python: interpreter of an environment that has vLLM.
        model: folder.
        dtype: as torch calls it, or "auto".
        rows: most requests that share steps.
        slots: most tokens of a request, prompt included.
        threads: of the CPU; None leaves that to vLLM.

    Raises:
        DecodersError: the engine does not start.
    """

    def __init__(self, python: Path, model: str, dtype: str, rows: int, slots: int, threads: int | None = None) -> None:
        # In one process, as the others are, and nothing is looked for on the hub. GiB of keys and values: half the memory by default.
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "4"}
        environment = defaults | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 - open as long as the process
            "w+", encoding="utf-8", errors="replace"
        )
        script = Path(__file__).with_name("vllm_process.py")
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8", env=environment,
        )  # fmt: skip
        try:
            self._ask({"model": model, "dtype": dtype, "rows": rows, "slots": slots})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Vllm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, load: Sequence[Arrival]) -> LoadResult:
        """Raises DecodersError if it ends, or if a request got fewer tokens than it asked for."""
        times = self._ask([(request.seconds, request.prompt, request.new_tokens) for request in load])
        if times["tokens"] != [request.new_tokens for request in load]:
            raise DecodersError("vLLM gave other numbers of tokens than were asked for")
        return result_of("vLLM", load, 0.0, times["firsts"], times["ends"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _ask(self, message: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        for line in stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise self._ended()

    def _ended(self) -> DecodersError:
        self._process.wait()
        return DecodersError(f"vLLM: {ending(self._process, self._errors)}")
