"""Decodes any number of prompts, of which only a few are in memory at once."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..enabling import refuse_misspelt
from ..errors import InputError, SettingsError, UnsupportedError
from ..report import Report
from ..strategy import Strategy
from .arguments import check_count
from .generation import Generation
from .scheduler import Scheduler

#: A prompt: text, token ids, or a mapping with a ``prompt`` and arguments of ``generate`` for this prompt. An exception is the error of
#: a prompt that could not be read.
Prompt = str | list[int] | Tensor | Mapping[str, Any] | Exception


@dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    Attributes:
        index: the prompt's position in the iterable, from 0.
        prompt: the prompt as given.
        tokens: new token ids.
        text: new text, None without a tokenizer.
        report: the report on the request; None if the request was refused.
        error: the error that ended the request; None if the request was completed.
    """

    index: int
    prompt: Any
    tokens: list[int]
    text: str | None
    report: Report | None
    error: Exception | None = None


def generate_many(
    model: PreTrainedModel, prompts: Iterable[Prompt], *, tokenizer: PreTrainedTokenizerBase | None = None,
    strategy: str | Strategy = "autoregressive", strategy_config: Mapping[str, Any] | None = None, rows: int = 8,
    slots: int = 4096, ordered: bool = True, errors: Literal["raise", "keep"] = "raise", **arguments: Any,
) -> Generator[Completion, None, None]:  # fmt: skip
    """Decodes `prompts` with in-flight batching: a row that ends makes room for the next prompt at once.

    Prompts are taken from the iterable when there is room, and completions are yielded when they are done. So a million prompts need
    only the memory of a few. In float32, each completion has the tokens of a separate call of ``generate``.

    Args:
        model, tokenizer, strategy, strategy_config, rows, slots: see :class:`decoders.Scheduler`.
        prompts: text, token ids, or mappings with a ``prompt`` and arguments of ``generate`` for this prompt. An exception stands for a
            prompt that could not be read, and becomes the prompt's error.
        ordered: whether to yield completions in the order of the prompts; otherwise in the order in which they end. With `ordered`,
            completions wait until all prompts before them are completed, and at most 16 times `rows` prompts are in memory.
        errors: "raise" the first error, or "keep" each error in its prompt's completion and go on.
        arguments: arguments of ``generate`` for all prompts.

    Raises:
        SettingsError: `errors` has another value. InputError: `prompts` is a single prompt. Errors of requests, unless `errors` is
            "keep". Errors of the iterable, after all prompts taken before the error have been completed and yielded.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise InputError(
            f"prompts must be a list or another iterable, not a {type(prompts).__name__}: put a single prompt into a list, [prompt]"
        )
    if errors not in ("raise", "keep"):
        raise SettingsError(f"errors must be 'raise' or 'keep', not {errors!r}")
    check_count("rows", rows)
    if "queue" in arguments:
        raise UnsupportedError("generate_many() has no argument queue=: it submits a prompt when there is room for it")
    refuse_misspelt(arguments, generate_many)
    return _completions(
        model, iter(prompts), tokenizer, dict(strategy=strategy, strategy_config=strategy_config, rows=rows, slots=slots),
        ordered, errors == "raise", arguments,
    )  # fmt: skip


def _completions(
    model: PreTrainedModel, prompts: Iterator[Prompt], tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any],
    ordered: bool, raises: bool, arguments: dict[str, Any],
) -> Generator[Completion, None, None]:  # fmt: skip
    rows = options["rows"]
    ended: queue.SimpleQueue[_Request] = queue.SimpleQueue()
    with Scheduler(model, tokenizer=tokenizer, queue=18 * rows, **options, **arguments) as scheduler:
        line: deque[_Request] = deque()  # the requests in the order of their prompts, if `ordered`
        running, numbers, more = 0, count(), True
        failure: Exception | None = None  # an error of the iterable
        while more or running or line:
            # `rows` requests are decoded, and twice as many wait in the queue. With `ordered`, `line` also holds ended requests.
            while more and running < 3 * rows and len(line) < 16 * rows:
                try:
                    prompt = next(prompts)
                except StopIteration:
                    more = False
                    break
                except Exception as error:
                    more, failure = False, error
                    break
                request = _Request(next(numbers), prompt)
                request.submit(scheduler, ended)
                running += 1
                if ordered:
                    line.append(request)
            if running:
                scheduler._check_process()  # a forked child would wait forever
                request = ended.get()
                running -= 1
                if not ordered:
                    yield request.completion(raises)
            while line and line[0].done:
                yield line.popleft().completion(raises)
        if failure is not None:
            raise failure


@dataclass(eq=False)
class _Request:
    """A prompt that was submitted or refused."""

    index: int
    prompt: Prompt
    generation: Generation | None = None
    error: Exception | None = None

    def submit(self, scheduler: Scheduler, ended: queue.SimpleQueue[_Request]) -> None:
        try:
            if isinstance(self.prompt, Exception):
                raise self.prompt
            own = dict(self.prompt) if isinstance(self.prompt, Mapping) else {"prompt": self.prompt}
            if "prompt" not in own:
                raise InputError(
                    f"a mapping that stands for a prompt needs the key 'prompt', and has {sorted(map(str, own))}"
                )
            self.generation = scheduler.submit(own.pop("prompt"), **own)
            self.generation.add_done_callback(lambda _: ended.put(self))
        except Exception as error:
            self.error = error
            ended.put(self)

    @property
    def done(self) -> bool:
        return self.generation is None or self.generation.done()

    def completion(self, raises: bool) -> Completion:
        generation = self.generation
        error = self.error if generation is None else generation.exception()
        if error is not None and (raises or not isinstance(error, Exception)):
            raise error
        if generation is None:
            return Completion(self.index, self.prompt, [], None, None, self.error)
        tokenizer, text = generation.tokenizer or generation.call.request.models.tokenizer, None
        if tokenizer is not None:
            text = generation.text_by(tokenizer)
        return Completion(
            self.index,
            self.prompt,
            generation.tokens,
            text,
            generation.report,
            error if isinstance(error, Exception) else None,
        )
