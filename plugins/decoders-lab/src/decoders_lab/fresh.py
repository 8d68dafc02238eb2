"""Measures a new process: time to the first token, compilation, memory.

:func:`in_new_process` starts ``python -m decoders_lab.fresh``. The new process reads a :class:`Job` as JSON from standard input, and
writes lines of JSON, ``{"progress": …}`` and at the end ``{"result": …}``, to standard output. All prompts are random tokens, and
no text ends early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from transformers import PreTrainedModel

import decoders
from decoders.bench.machine import resident
from decoders.bench.measurement import rotation
from decoders.bench.methods import BASELINE, Method, Sampling, strategy_methods, transformers_methods
from decoders.bench.shapes import SHAPES, build
from decoders.bench.timed_call import TimedCall, compiled_share, stamped, vocabulary_size
from decoders.bench.workloads import Workload

MODULE = "decoders_lab.fresh"
#: Number of lines at the end of standard error that are shown if the process ended without a result.
LINES = 3
#: Sampling arguments of the sampled calls.
SAMPLING = Sampling(temperature=0.7, top_k=50, top_p=0.9)
#: Number of new tokens of a call that measures prefill only.
FEW = 2
#: Number of new tokens in each turn of a chat.
TURN = 16


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        subject: a shape, "demo", or a checkpoint.
        dtype: dtype of the weights.
        strategy: a strategy's registry name; "" is transformers' ``generate``, for which only the first calls are measured.
        config: ``decoders_config`` of every call; empty for the default settings.
        prompt_lengths: lengths of prompts in tokens; all calls use the first length, except that prefill is measured at every length.
        new_tokens: number of new tokens of each call.
        repeats: number of rounds, in which methods take turns.
        history: number of prompt tokens of a chat's first turn; 0 measures no chat.
        question: number of tokens that the chat's second turn adds.
        patience: seconds to wait for background compilation before the methods are compared.
        threads: number of CPU threads; None keeps torch's number.
        device: the model's device; None is CUDA if there is one.
        spawned: ``time.time()`` at which the process was started.
    """

    subject: str
    dtype: str = "float32"
    strategy: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = (64, 512)
    new_tokens: int = 128
    repeats: int = 3
    history: int = 2000
    question: int = 50
    patience: float = 60.0
    threads: int | None = None
    device: str | None = None
    spawned: float = 0.0


class _Fresh:
    """Makes the measurements of a job. Memory and first calls are measured before anything else."""

    def __init__(self, job: Job, progress: Callable[[str], None]) -> None:
        self.job, self.progress = job, progress
        self.figures: dict[str, Any] = {"imported": time.time() - job.spawned if job.spawned else None}
        self.prompts_made = 0

    def run(self) -> dict[str, Any]:
        """Measures everything, and returns the figures by name."""
        job, figures = self.job, self.figures
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.progress("load")
        begin = time.perf_counter()
        self.model = _load(job)
        weight_sum = sum(parameter.float().sum().item() for parameter in self.model.parameters())
        figures["loaded"] = time.perf_counter() - begin
        if weight_sum != weight_sum:
            raise ValueError("some weights are not a number")
        figures["weights"] = sum(p.numel() * p.element_size() for p in self.model.parameters())
        figures["parameters"] = self.model.num_parameters()
        self.vocabulary = vocabulary_size(self.model)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.context = context - job.new_tokens
        self.lengths = [n for n in job.prompt_lengths if n <= self.context] or [self.context]
        figures["memory"] = [{"after": "loading", "bytes": resident()}]
        begin = time.perf_counter()
        self.ours = self._method(job.strategy) if job.strategy else None
        self.baseline = _endless(transformers_methods(self.model, names=[])[0], self.vocabulary)
        figures["enabled"] = time.perf_counter() - begin
        self.first_call_at = time.perf_counter()
        self._calls()
        if self.ours is not None:
            self._settled()
            self._side_by_side()
            self._prefill()
            self._chat()
        return figures

    def _method(self, strategy: str, **config: Any) -> Method:
        (method,) = strategy_methods(self.model, [strategy], decoders_config={**self.job.config, **config})
        return _endless(method, self.vocabulary)

    def _prompt(self, length: int, rows: int = 1) -> Workload:
        """A prompt of random tokens that differ in every call, so that no call reuses keys and values of an earlier call."""
        self.prompts_made += 1
        generator = torch.Generator().manual_seed(self.prompts_made)
        ids = torch.randint(self.vocabulary, (rows, length), generator=generator)
        return Workload(f"{length}", "random", ids, torch.ones_like(ids))

    def _calls(self) -> None:
        """Measures the first calls of the process: greedy twice, sampled twice, and one with two rows."""
        method = self.ours or self.baseline
        sampled = replace(method, sampling=SAMPLING)
        self.figures["calls"] = []
        plan = [("greedy", method, 1), ("greedy again", method, 1), ("sampled", sampled, 1),
                ("sampled again", sampled, 1), ("two rows", method, 2)]  # fmt: skip
        for name, call_method, rows in plan:
            self.progress(f"{name} call")
            prompt = self._prompt(self.lengths[0], rows)
            begin = time.perf_counter()
            call, stamps = stamped(call_method, prompt, self.job.new_tokens)
            figures = {"call": name, "prompt_tokens": self.lengths[0], "rows": rows}
            figures |= {"seconds": time.perf_counter() - begin, **stamps, **of_report(call)}
            self.figures["calls"].append(figures)
            if not name.endswith("again"):
                self.figures["memory"].append({"after": f"{name} call", "bytes": resident()})
            if call.report is not None:
                cache = self.figures.get("cache_bytes") or 0
                self.figures["cache_bytes"] = max(cache, call.report.peak_memory)

    def _settled(self) -> None:
        """Makes calls until all steps of a call run compiled, or ``job.patience`` is over: first greedy calls, then sampled calls."""
        assert self.ours is not None
        self.figures["settled"] = {}
        for name, method in (("greedy", self.ours), ("sampled", replace(self.ours, sampling=SAMPLING))):
            self.progress(f"{name}: until all is compiled")
            end = time.perf_counter() + self.job.patience
            while True:
                call, _ = stamped(method, self._prompt(self.lengths[0]), self.job.new_tokens)
                share = compiled_share(call.report)
                give_up = time.perf_counter() > end or self.job.config.get("compile") is False
                if share == 1 or give_up:
                    break
            self.figures["settled"][name] = {
                "compiled_share": share,
                "seconds": time.perf_counter() - self.first_call_at,
            }
        self.figures["memory"].append({"after": "compiling", "bytes": resident()})

    def _side_by_side(self) -> None:
        """Measures transformers, and our method uncompiled and with the job's settings, in turns, greedy and sampled."""
        assert self.ours is not None
        uncompiled = replace(self._method(self.job.strategy, compile=False), name=f"{self.ours.name}, uncompiled")
        methods = [
            self.baseline,
            uncompiled,
            *([self.ours] if self.job.config.get("compile", True) is not False else []),
        ]
        self.figures["decoding"] = []
        for name, sampling in (("greedy", None), ("sampled", SAMPLING)):
            calls_of: dict[str, list[tuple[float, dict[str, Any]]]] = {method.name: [] for method in methods}
            for turn in range(self.job.repeats + 1):
                prompt = self._prompt(self.lengths[0])
                for method in rotation(methods, turn):
                    self.progress(f"{name}, side by side: {method.name}")
                    call, stamps = stamped(replace(method, sampling=sampling), prompt, self.job.new_tokens)
                    if turn and stamps["tokens_per_second"]:  # the first round warms up
                        calls_of[method.name].append((stamps["tokens_per_second"], of_report(call)))
            base = median(speed for speed, _ in calls_of[BASELINE])
            for method in methods:
                speed = median(speed for speed, _ in calls_of[method.name])
                shares = [f["compiled_share"] for _, f in calls_of[method.name] if f.get("compiled_share") is not None]
                self.figures["decoding"].append({
                    "method": method.name, "sampling": name, "tokens_per_second": speed, "ratio": speed / base,
                    "compiled_share": median(shares) if shares else None,
                    "range": [min(s for s, _ in calls_of[method.name]), max(s for s, _ in calls_of[method.name])],
                })  # fmt: skip

    def _prefill(self) -> None:
        """Measures the seconds to the first token at every prompt length, in turns with transformers."""
        assert self.ours is not None
        self.figures["prefill"] = []
        for length in self.lengths:
            self.progress(f"prefill of {length} tokens")
            times: dict[str, list[float]] = {"transformers": [], "ours": []}
            for turn in range(self.job.repeats + 1):
                prompt = self._prompt(length)
                for key, method in rotation([("transformers", self.baseline), ("ours", self.ours)], turn):
                    _, stamps = stamped(method, prompt, FEW)
                    if turn and stamps["first_token"] is not None:
                        times[key].append(stamps["first_token"])
            self.figures["prefill"].append({
                "prompt_tokens": length, "transformers": median(times["transformers"]), "first_token": median(times["ours"]),
                "ratio": median(times["ours"]) / median(times["transformers"]),
            })  # fmt: skip

    def _chat(self) -> None:
        """Measures the seconds to the first token of a chat's first turn, and of its second turn, which adds a question."""
        history = min(self.job.history, self.context - self.job.question - TURN)
        if history < 1:
            return
        ours = self._method(self.job.strategy, reuse=True)
        times: dict[str, list[float]] = {"first": [], "second": []}
        reused = [0]
        for turn in range(self.job.repeats + 1):
            self.progress(f"second turn after {history} tokens")
            opening, first = stamped(ours, self._prompt(history), TURN)
            ids = torch.cat([opening.sequences, self._prompt(self.job.question).input_ids], dim=1)
            answer, second = stamped(ours, Workload("chat", "chat", ids, torch.ones_like(ids)), TURN)
            # The first round warms up: in it, the first turn's prefill is slow, which would make the second turn look fast.
            if turn and first["first_token"] and second["first_token"]:
                times["first"].append(first["first_token"])
                times["second"].append(second["first_token"])
                reused = of_report(answer)["reused"]
        if times["first"]:
            first_token, second_first_token = median(times["first"]), median(times["second"])
            self.figures["chat"] = {
                "history": history, "question": self.job.question, "first_token": first_token,
                "second_first_token": second_first_token, "ratio": second_first_token / first_token, "reused": reused,
            }  # fmt: skip


def of_report(call: TimedCall) -> dict[str, Any]:
    """Figures of a call from its report; empty for transformers, which has no report."""
    report = call.report
    if report is None:
        return {}
    t = report.timings
    return {
        "steps": report.steps, "compiled_share": compiled_share(report), "prefill": t.prefill,
        "compile_seconds": t.compile, "compilations": call.compilations,
        "reused": report.reused,
        "pack_seconds": t.pack,
        "background_seconds": t.background,
    }  # fmt: skip


def _load(job: Job) -> PreTrainedModel:
    dtype = getattr(torch, job.dtype)
    if job.subject in SHAPES:
        model = build(job.subject, dtype)
    elif job.subject == "demo":
        model = decoders.demo.load("target", dtype)[0]
    else:
        from decoders.common.checkpoints import load_model

        model = load_model(job.subject, dtype)
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` and loses its `self`


def _endless(method: Method, vocabulary: int) -> Method:
    """`method` with a stop token that is never chosen, so that all calls write equally many tokens."""
    return replace(method, arguments={**method.arguments, "eos_token_id": vocabulary})


def measure(job: Job, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Runs `job` in this process, and returns the figures by name. They describe a new process only if this process is new."""
    fresh = _Fresh(job, progress)
    try:
        return fresh.run()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return fresh.figures | {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}


def in_new_process(
    job: Job, compile_cache: Path | None = None, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Runs `job` in a new process, and returns its figures by name, or only an ``error`` if the process failed.

    Args:
        compile_cache: folder of torch.compile's disk cache; None uses the default.
    """
    # The new process imports the packages from the same folders as this one.
    packages = [str(Path(file).resolve().parents[1]) for file in (__file__, decoders.__file__)]
    path = os.pathsep.join(filter(None, [*packages, os.environ.get("PYTHONPATH")]))
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
    """How a process without a result ended, with the last lines of its standard error."""
    errors.seek(0)
    last = [line.strip() for line in errors.read().splitlines() if line.strip()][-LINES:]
    return f"the process ended with {process.returncode}: {' / '.join(last)}"


def main() -> None:
    """Reads a job from standard input and writes the figures to standard output. Other output goes to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as channel:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(**line: Any) -> None:
            channel.write(json.dumps(line, default=str) + "\n")
            channel.flush()

        values = json.load(sys.stdin)
        job = Job(**values | {"prompt_lengths": tuple(values["prompt_lengths"])})
        say(result=measure(job, lambda what: say(progress=what)))


if __name__ == "__main__":
    main()
