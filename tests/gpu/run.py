"""All tests of a GPU, a process for each file, and in the first minutes whether the text is right, by strategy and dtype.

    python tests/gpu/run.py [--out FOLDER] [--jobs 16] [--seconds 540] [FILE …]

Needs pytest, and what decoders imports; nothing has to be installed. Every result is shown as it comes and is in
``FOLDER/NAME/gpu-tests.jsonl`` by then. The tests of whole texts begin first, dealt out to half of the processes, and are shown as a
table once all of them are over. What has not ended after so many seconds is ended, and named.
Exit status 1: a test failed, or did not run.
``GPU_TESTS_DEVICE=cpu`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: The test that is dealt out, and the names of its parameters.
TEXTS = "test_tokens_are_those_of_plain_decoding"
OF_TEXTS = re.compile(rf"{TEXTS}\[(?P<strategy>.+)-torch\.(?P<dtype>\w+)-(?P<rows>[^-]+)\]$")


@dataclass
class Job:
    """Tests that one process runs.

    Attributes:
        name: of its folder.
        arguments: of pytest.
        part: of the tests chosen by them, see conftest.py.
        results: what it has said so far, a line per test.
    """

    name: str
    arguments: list[str]
    part: str = ""
    process: subprocess.Popen[bytes] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def start(self, out: Path) -> None:
        folder = out / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu-tests.jsonl").unlink(missing_ok=True)
        paths = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
        # One thread each, and few compilers beside each of many processes.
        environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ, "PYTHONPATH": paths}
        with (folder / "output.txt").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *self.arguments],
                cwd=HERE.parents[1], env=environment | {"OUT": str(folder), "GPU_TESTS_PART": self.part},
                stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def news(self, out: Path) -> Iterator[dict[str, Any]]:
        """The results that have come since."""
        file = out / self.name / "gpu-tests.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[self._read :] if file.exists() else []
        for line in lines:
            if line.endswith("\n"):
                self._read += 1
                if "test" in (result := json.loads(line)):
                    self.results.append(result)
                    yield result

    @property
    def over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def trouble(self) -> str:
        """What is wrong besides tests that failed; 5: it had no test."""
        if self.process is None or self.process.returncode is None:
            return "not begun" if self.process is None else "not over"
        return (
            ""
            if self.process.returncode in (0, 1, 5)
            else f"pytest ended with {self.process.returncode}, see output.txt"
        )


def jobs_of(files: Sequence[Path], parts: int) -> list[Job]:
    """A process per file; the test of whole texts is dealt out to `parts`, which come first."""
    jobs, rest = [], []
    for file in files:
        own = [str(file)]
        if file.name == "test_strategies.py":
            jobs += [Job(f"texts-{n}", [*own, "-k", TEXTS], f"{n}/{parts}") for n in range(parts)]
            own += ["-k", f"not {TEXTS}"]
        rest.append(Job(file.stem, own))
    return jobs + rest


def table_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """Whether texts are right, by strategy, dtype and rows."""
    outcomes: dict[str, dict[str, str]] = {}
    for result in results:
        if (found := OF_TEXTS.search(result["test"])) is not None:
            column = f"{found['dtype']}, {found['rows']}"
            outcome = {"passed": "right", "failed": "WRONG"}.get(result["outcome"], result["outcome"])
            outcomes.setdefault(found["strategy"], {})[column] = outcome
    columns = sorted({column for own in outcomes.values() for column in own})
    widths = [max(map(len, ("strategy", *outcomes)), default=0), *map(len, columns)]
    lines = [["strategy", *columns], *([name, *(own.get(c, "?") for c in columns)] for name, own in outcomes.items())]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def cause(result: dict[str, Any]) -> str:
    """The error of a test that failed, in a line."""
    if result["outcome"] != "failed":
        return ""
    lines = result["said"].strip().splitlines() or [""]
    return ": " + next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:160]


def run(jobs: Sequence[Job], out: Path, at_once: int, seconds: float) -> None:
    """Runs `jobs` in their order, so many at once, and shows results as they come."""
    begun, texts_shown = time.monotonic(), False
    texts = [job for job in jobs if job.name.startswith("texts-")]
    try:
        while not all(job.over for job in jobs):
            running = [job for job in jobs if job.process is not None and not job.over]
            for job in [job for job in jobs if job.process is None][: at_once - len(running)]:
                job.start(out)
            time.sleep(0.2)
            passed = time.monotonic() - begun
            for job in jobs:
                for result in job.news(out):
                    print(
                        f"{passed:5.0f} s  {result['outcome']}  {result['test'].rpartition('/')[2]}{cause(result)}",
                        flush=True,
                    )
            if texts and not texts_shown and all(job.over for job in texts):
                texts_shown = True
                lines = table_of([result for job in texts for result in job.results])
                print("\n".join([f"\nAfter {passed:.0f} s, whether texts are right:", *lines, ""]), flush=True)
            if passed > seconds:
                break
    except KeyboardInterrupt:
        pass
    finally:
        for job in jobs:
            if job.process is not None and not job.over:
                job.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of this folder")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-tests")), help="default: $OUT, or gpu-tests"
    )
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="processes at once")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which everything is ended")
    options = parser.parse_args()
    files = [file.resolve() for file in options.files] or sorted(HERE.glob("test_*.py"))
    jobs = jobs_of(files, max(options.jobs // 2, 1))
    run(jobs, options.out.resolve(), options.jobs, options.seconds)
    results = [result for job in jobs for result in job.results]
    if any(OF_TEXTS.search(result["test"]) for result in results):
        print("\n".join(table_of(results)))
    failed = [result["test"] for result in results if result["outcome"] == "failed"]
    troubles = {job.name: job.trouble for job in jobs if job.trouble}
    for line in (*(f"FAILED {test}" for test in failed), *(f"{name}: {trouble}" for name, trouble in troubles.items())):
        print(line)
    count = sum(result["outcome"] == "passed" for result in results)
    print(f"{count} passed, {len(failed)} failed; everything is in {options.out}")
    return 1 if failed or troubles or not count else 0


if __name__ == "__main__":
    sys.exit(main())
