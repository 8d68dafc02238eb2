"""Measures the costs of grammars: the times to compile, to the first mask, per mask and per tree of draft tokens, and the memory.

Backends are measured on the same grammars, texts and trees, in turns.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
from rich.table import Table
from rich.text import Text

from decoders.bench.tables import plain_table, shown
from decoders.constraints import Backend, CompiledGrammar, Language, Tabulated, Vocabulary, mask_words, unpack
from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.errors import GrammarError
from decoders.tree import NO_PARENT, Topology

from .grammar_subjects import Subject

#: Number of nodes, and greatest depth, of a tree of draft tokens; number of places in a text where trees begin.
NODES, DEPTH, PLACES = 64, 8, 3
#: A grammar that was compiled for this many seconds in total is not compiled again.
PATIENCE = 2.0


@dataclass(frozen=True)
class Cost:
    """The cost of one grammar with one backend and one vocabulary; None for figures that could not be measured.

    Attributes:
        subject: name of the grammar.
        backend: name of the backend that was called.
        vocabulary: number of tokens of the vocabulary.
        compiled_by: the backend that compiled the grammar; not `backend` itself if `backend` chooses among other backends.
        language_ms: median time to convert the specification to a language.
        compile_ms: median time to compile the language.
        first_mask_ms: median time from the specification to the first mask.
        mask_us: median time of a mask along the text, over several walks, including the first.
        slow_mask_us: 99th percentile of the same times.
        tree_us: median time to compute the unpacked masks after all nodes of a tree of :data:`NODES` draft tokens, as the loop
            computes them on the host.
        memory: bytes by which compiling the grammar and walking along the text increased the allocated memory.
        states: number of states of the table's automaton.
        rows: number of masks that the table stores.
        error: why the grammar could not be compiled.
    """

    subject: str
    backend: str
    vocabulary: int
    compiled_by: str | None = None
    language_ms: float | None = None
    compile_ms: float | None = None
    first_mask_ms: float | None = None
    mask_us: float | None = None
    slow_mask_us: float | None = None
    tree_us: float | None = None
    memory: int | None = None
    states: int | None = None
    rows: int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Tree:
    """A tree of draft tokens after a text: the text's own next tokens, and other legal tokens.

    Attributes:
        taken: tokens before the tree.
        parents: parent of each node; the root is node 0, without a parent.
        tokens: token of each node; 0 for the root, which stands for the last of `taken`.
    """

    taken: list[int]
    parents: list[int]
    tokens: list[int]


def allocated() -> int | None:
    """Bytes allocated on the C heap, by Python and by extensions; None if psutil cannot report them.

    Small Python objects are not counted, because Python has a separate allocator for small objects.
    """
    if not hasattr(psutil, "heap_info"):  # psutil has the figure for glibc, macOS, Windows and FreeBSD
        return None
    gc.collect()
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


def prepare(backend: Backend, vocabulary: Vocabulary) -> float:
    """Seconds of the work that `backend` does once per vocabulary, including the compilation of a small grammar.

    The grammar is a string in quotation marks. Nearly the whole vocabulary is legal in it, and backends may prepare for such masks.
    """
    begin = time.perf_counter()
    for language in (Language("a string", regex='"[^"]*"'), Language("a string", lark='start: /"[^"]*"/')):
        try:
            backend.compile(language, vocabulary)
        except GrammarError:
            continue
        break
    return time.perf_counter() - begin


def measure(
    subject: Subject,
    backends: Sequence[Backend],
    vocabulary: Vocabulary,
    repeats: int,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Cost]:
    """The cost of `subject` with each of `backends`, for which :func:`prepare` was called. progress: called after each backend.

    Raises:
        ValueError: the subject's text does not follow its grammar.
    """
    compiled: list[tuple[Cost, CompiledGrammar | None]] = []
    for backend in backends:
        compiled.append(_compiled(subject, backend, vocabulary, repeats))
        progress(f"{subject.name}, {backend.name}, {len(vocabulary)} tokens")
    grammars = [grammar for _, grammar in compiled if grammar is not None]
    times: dict[int, list[float]] = {id(grammar): [] for grammar in grammars}
    for tree in trees(grammars[0], list(vocabulary.encode(subject.text))) if grammars else ():
        guides = [_guide(grammar, tree.taken) for grammar in grammars]
        draft_tokens, topology = torch.tensor([tree.tokens[1:]]), Topology.from_parents(tree.parents)
        for turn in range(repeats + 1):
            for grammar, guide in zip(grammars, guides, strict=True):
                begin = time.perf_counter()
                guide.block(draft_tokens, topology)
                if turn:  # the first turn warms up
                    times[id(grammar)].append((time.perf_counter() - begin) * 1e6)
                _forget(guide)
    return [
        cost if grammar is None else replace(cost, tree_us=statistics.median(times[id(grammar)]))
        for cost, grammar in compiled
    ]


def _guide(grammar: CompiledGrammar, taken: Sequence[int]) -> HostGuide:
    """A guide, with which the loop computes masks on the host, for one row, advanced by the tokens `taken`."""
    guide = HostGuide.of([grammar], len(grammar.vocabulary), torch.device("cpu"))
    for token in taken:
        guide.append(torch.tensor([token]))
    _forget(guide)
    return guide


def _forget(guide: HostGuide) -> None:
    """Drops the masks of the last block of `guide`, as committing a step does."""
    guide.table.clear()
    guide.positions = [text.settle(position) for text, position in zip(guide.texts, guide.positions, strict=True)]


def _compiled(
    subject: Subject, backend: Backend, vocabulary: Vocabulary, repeats: int
) -> tuple[Cost, CompiledGrammar | None]:
    """The cost without `tree_us`, and the compiled grammar, which is None if `backend` cannot compile it."""
    cost = Cost(subject.name, backend.name, len(vocabulary))
    before = allocated()
    try:
        grammar, marks = _compile(subject, backend, vocabulary)
    except GrammarError as error:
        return replace(cost, error=str(error)), None
    masks = sorted(_masks(grammar, list(vocabulary.encode(subject.text)), repeats))
    after = allocated()
    turns = [marks]
    while len(turns) < repeats and sum(turn[-1] for turn in turns) < PATIENCE:
        turns.append(_compile(subject, backend, vocabulary)[1])
    language_ms, compile_ms, first_mask_ms = (statistics.median(part) * 1e3 for part in zip(*turns, strict=True))
    tables = grammar.tables() if isinstance(grammar, Tabulated) else None
    cost = replace(
        cost, compiled_by=grammar.backend, language_ms=language_ms, compile_ms=compile_ms, first_mask_ms=first_mask_ms,
        mask_us=statistics.median(masks), slow_mask_us=masks[len(masks) * 99 // 100],
        memory=None if before is None or after is None else max(after - before, 0),
        states=None if tables is None else tables.next.shape[0], rows=None if tables is None else tables.masks.shape[0],
    )  # fmt: skip
    return cost, grammar


def _compile(
    subject: Subject, backend: Backend, vocabulary: Vocabulary
) -> tuple[CompiledGrammar, tuple[float, float, float]]:
    """A newly compiled grammar, and the seconds to create the language, to compile it, and in total until the first mask."""
    out = torch.empty(mask_words(len(vocabulary)), dtype=torch.int32)
    begin = time.perf_counter()
    language = subject.language()
    language_ready = time.perf_counter()
    grammar = backend.compile(language, vocabulary)
    grammar_ready = time.perf_counter()
    grammar.start().fill_mask(out)
    return grammar, (language_ready - begin, grammar_ready - language_ready, time.perf_counter() - begin)


def _masks(grammar: CompiledGrammar, tokens: list[int], repeats: int) -> Iterator[float]:
    """Yields the microseconds to compute every mask along `tokens`, which are walked `repeats` times.

    Raises:
        ValueError: the tokens do not follow the grammar.
    """
    out = torch.empty(mask_words(len(grammar.vocabulary)), dtype=torch.int32)
    for _ in range(repeats):
        matcher = grammar.start()
        for token in [*tokens, grammar.vocabulary.stops[0]]:
            begin = time.perf_counter()
            matcher.fill_mask(out)
            yield (time.perf_counter() - begin) * 1e6
            if not matcher.advance([token]):
                spelt = grammar.vocabulary.spell([token])
                raise ValueError(f"{grammar.language.name} with {grammar.backend}: the text goes on with {spelt!r}")


def trees(grammar: CompiledGrammar, tokens: Sequence[int]) -> list[Tree]:
    """Trees at :data:`PLACES` places along `tokens`. The trees do not depend on the backend of `grammar`."""
    generator = random.Random(0)
    size = len(grammar.vocabulary)
    out = torch.empty(mask_words(size), dtype=torch.int32)
    result = []
    for place in range(PLACES):
        taken = list(tokens[: len(tokens) * place // PLACES])
        matcher = grammar.start()
        matcher.advance(taken)
        parents, draft_tokens, depths = [NO_PARENT], [0], [0]
        paths: list[list[int]] = [[]]  # tokens on the path to each node
        while len(parents) < NODES:
            node = len(parents)
            parent = node - 1 if node <= DEPTH else generator.choice([n for n in range(node) if depths[n] < DEPTH])
            above = matcher.advance(paths[parent])
            matcher.fill_mask(out)
            ahead = len(taken) + node - 1
            legal = unpack(out, size).nonzero().flatten().tolist()
            draft_token = tokens[ahead] if node <= DEPTH and ahead < len(tokens) else generator.choice(legal)
            count = matcher.advance([draft_token])
            matcher.rollback(above + count)
            parents.append(parent)
            draft_tokens.append(draft_token)
            depths.append(depths[parent] + 1 if count and draft_token not in grammar.vocabulary.stops else DEPTH)
            paths.append([*paths[parent], draft_token])
        result.append(Tree(taken, parents, draft_tokens))
    return result


def cost_tables(costs: Sequence[Cost], seconds: Mapping[tuple[str, int], float]) -> list[Table]:
    """A table per vocabulary, with a row for each grammar and backend; captions list what could not be compiled, and why.

    Args:
        seconds: preparation time of each backend for each size of vocabulary.
    """
    return [
        cost_table([cost for cost in costs if cost.vocabulary == size], f"{size:,} tokens", seconds)
        for size in dict.fromkeys(cost.vocabulary for cost in costs)
    ]


def cost_table(costs: Sequence[Cost], title: str, seconds: Mapping[tuple[str, int], float]) -> Table:
    """One of the tables of :func:`cost_tables`: all `costs` have the same vocabulary."""
    columns = (
        "backend",
        "compile ms",
        "first mask ms",
        "mask µs",
        "p99 µs",
        f"{NODES}-node tree µs",
        "MB",
        "states",
        "rows",
    )
    table = plain_table(title, *columns)
    previous = None
    for cost in costs:
        if cost.error is not None:
            continue
        table.add_row(
            Text(cost.subject if cost.subject != previous else "", style="bold"),
            cost.backend if cost.backend == cost.compiled_by else f"{cost.backend}: {cost.compiled_by}",
            shown(cost.compile_ms, ".1f"), shown(cost.first_mask_ms, ".1f"), shown(cost.mask_us, ".1f"),
            shown(cost.slow_mask_us, ".0f"), shown(cost.tree_us, ".0f"),
            shown(None if cost.memory is None else cost.memory / 1e6, ".1f"), shown(cost.states, ",d"), shown(cost.rows, ",d"),
        )  # fmt: skip
        previous = cost.subject
    lines = [
        Text(f"{cost.backend} cannot compile {cost.subject}: {cost.error}") for cost in costs if cost.error is not None
    ]
    lines += [
        Text(f"{backend} prepares once per tokenizer: {prepare_seconds:.2f} s")
        for (backend, size), prepare_seconds in seconds.items()
        if any(cost.vocabulary == size for cost in costs)
    ]
    table.caption, table.caption_justify = Text("\n").join(lines), "left"
    return table
