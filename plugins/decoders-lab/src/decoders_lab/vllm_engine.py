"""vLLM in a separate process, because it needs other versions of torch and transformers."""

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
    """A vLLM engine that decodes loads until it is closed.

    Args:
        python: interpreter of an environment that has vLLM.
        model: the model's folder.
        dtype: torch's name of the dtype, or "auto".
        rows: greatest number of requests that share steps.
        slots: greatest number of tokens of a request, prompt included.
        threads: number of CPU threads; None leaves the choice to vLLM.

    Raises:
        DecodersError: the engine does not start.
    """

    def __init__(self, python: Path, model: str, dtype: str, rows: int, slots: int, threads: int | None = None) -> None:
        # vLLM runs in one process, like the other methods, and without the hub. By default, vLLM's cache would take half the memory.
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
        """Decodes a load. Raises DecodersError if the process ends, or if a request ends with too few or too many tokens."""
        times = self._ask([(request.seconds, request.prompt, request.new_tokens) for request in load])
        if times["tokens"] != [request.new_tokens for request in load]:
            raise DecodersError("vLLM wrote other numbers of tokens than requested")
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
