"""Tests run offline, and on one thread each, so that they can run side by side."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU kernels run on the CPU, by Triton's interpreter. Drivers: NVIDIA's, AMD's, NVIDIA's in Windows' subsystem for Linux.
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/usr/lib/wsl/lib/libcuda.so.1"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # No pool of compilers beside every worker. Tests of a GPU are few processes, which wait for compilers most of the time.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Else inductor compiles a program for each of the processor's vector units.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

with suppress(ImportError):  # tests of a GPU do without it
    import hypothesis

    # 200 ms for an example are little on a busy machine; and of 100 examples the first 30 find nearly all that all find.
    hypothesis.settings.register_profile("any machine", deadline=None, max_examples=30)
    hypothesis.settings.register_profile("long", deadline=None, max_examples=100)  # .ci/run
    hypothesis.settings.load_profile("any machine")

# torch and transformers are imported where they are used: the process that only hands tests to others needs neither.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_costs, _numbers = tempfile.TemporaryDirectory(), itertools.count()  # not the user's own
os.environ.setdefault("DECODERS_COST_CACHE", _costs.name)
os.environ.setdefault("DECODERS_PRUNE", "0")  # by the clock: nearly nothing would be verified in rows of tiny models

gc.disable()  # nothing that is imported for the tests is garbage
atexit.register(gc.unfreeze)  # Triton, from 3.9 on, lists on stderr what is not freed at the end

#: Files with faults that the check of a design at the start must see.
PLANTED = ("test_counted_tokens.py", "test_own_masks.py", "test_self_check.py", "test_kept_checks.py")
#: Entries of a config that no layer reads.
OF_TOKENS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")

#: Modules imported since the survivors of the collector were set aside last.
MANY_MODULES = 100


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini(
            "timeout", "of pytest-timeout, which a machine that is lent for its GPU may lack, as it may lack hypothesis"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m gpu`` imports the tests of GPUs alone: the others take a minute, and what such a machine may not have."""
    other = collection_path.match("test_*.py") and collection_path.parent.name != "gpu"
    return (config.option.markexpr == "gpu" and other) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the tests must call them the same."""
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # the collector is busy enough with what torch makes
    gc.enable()
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_turns"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in matrices.items():
        _draw(name, cases)
    fleeting = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if fleeting:
        raise pytest.UsageError(f"the address of an object is no test id: {fleeting[0]}")
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def _draw(name: str, cases: list[Any]) -> None:
    """Marks as slow all cases of a test but the fewest in which every value of every parameter occurs.

    The values of one ``parametrize`` belong together, unless it is the only one: then each of its names has values of its own.
    """
    params = cases[0].callspec.params
    groups = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    groups = [tuple(n.strip() for n in (group.split(",") if isinstance(group, str) else group)) for group in groups]
    groups += [(other,) for other in params if not any(other in group for group in groups)]
    if len(groups) == 1:
        groups = [(one,) for one in groups[0]]
    if len(groups) < 2 or cases[0].get_closest_marker("in_turns").args:
        raise pytest.UsageError(f"{name}: in_turns draws of the values of several parameters, and takes no argument")
    quick = [case for case in cases if not case.get_closest_marker("slow")]
    values = {case: {(group, *(id(case.callspec.params[n]) for n in group)) for group in groups} for case in quick}
    drawn = dict.fromkeys(set().union(*values.values()), 0)
    while not all(drawn.values()):
        # As many new values as a case can have; the others those that were drawn least often.
        case = min(quick, key=lambda c: (-sum(not drawn[v] for v in values[c]), sum(drawn[v] for v in values[c])))
        for value in values[case]:
            drawn[value] += 1
        quick.remove(case)
    for case in quick:
        case.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Sets aside what imports and the tests of other files leave behind: torch, transformers and the compiler are a million objects,
    which every collection would look through again, and some code under test collects in every call.

    Again before each file: a command that sets objects aside for a while gives all of them back at its end.
    """
    if item.path != _file_seen[0] or len(sys.modules) - _modules_seen[0] > MANY_MODULES:
        _file_seen[0], _modules_seen[0] = item.path, len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """typer builds all commands anew for each one that is invoked, which takes longer than most of them do here."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def designs_are_checked_once() -> Iterator[None]:
    """Before a target decodes it is compared with its model, which takes a dozen passes: here once for each design that is wholly
    transformers' own, in each number format. In files that plant faults for the check to find, each target is compared.
    """
    import torch

    from decoders.engine.model import self_check
    from decoders.engine.model.modules_compat import hooks_of

    check, verdicts = self_check.check_tree_logits, {}

    def is_plain(model: Any) -> bool:
        return all(type(parameter) is torch.nn.Parameter for parameter in model.parameters()) and not any(
            any(hooks_of(module))
            or "forward" in vars(module)
            or not type(module).__module__.startswith(("torch.", "transformers."))
            for module in model.modules()
        )

    def once(target: Any, model: Any) -> int | None:
        if _file_seen[0] is None or _file_seen[0].name in PLANTED or not is_plain(model):
            return check(target, model)
        config = {name: value for name, value in model.config.to_dict().items() if name not in OF_TOKENS}
        key = (
            type(model), model.dtype, model.device, repr(config), target.precision, target.attends, target.static,
        )  # fmt: skip
        if key not in verdicts:
            verdicts[key] = check(target, model)
        return verdicts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "check_tree_logits", once)
        patch.setattr(self_check.kept_checks, "key_of", lambda *_: None)  # nothing is kept in the user's folder
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreted_sums_are_computed_once() -> None:
    """Triton's interpreter computes every sum of integers a second time, in 64 bits, for an assertion that it makes in debugging alone:
    a third of the time of a kernel.
    """
    with suppress(ImportError):
        from triton.runtime.interpreter import interpreter_builder

        if not interpreter_builder.options.debug:
            interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


@pytest.fixture(scope="session", autouse=True)
def interpreted_products_are_those_of_a_card(interpreted_sums_are_computed_once: None) -> Iterator[None]:
    """A card's ``tl.dot`` gives a row of a tile the same bits wherever it stands. That of the interpreter is numpy's product of the
    tiles, whose last rows some processors add in another order: here it multiplies row by row.
    """
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            from triton.runtime import interpreter

            numpy = interpreter.np

            def by_rows(a: Any, b: Any, dtype: Any) -> Any:
                return numpy.matmul(a[..., None, :], b[..., None, :, :], dtype=dtype)[..., 0, :]

            patch.setattr(interpreter, "np", SimpleNamespace(**{**vars(numpy), "matmul": by_rows}))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_compiles_by_the_clock() -> Iterator[None]:
    """Models that many tests share have run so long uncompiled that compiling them would begin in the middle of another test, sooner on
    a busy machine. Tests of that say when it is due.
    """
    import torch

    from decoders.engine.model.compiled import functions, tiers

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(tiers, "FORWARD_SECONDS", math.inf)
            patch.setattr(functions, "FUNCTION_SECONDS", math.inf)
        yield


@pytest.fixture(autouse=True)
def nothing_compiles_behind_a_test() -> Iterator[None]:
    """What a test compiles in the background ends with it: the next one has other patches, and Dynamo writes to what all share."""
    from decoders.engine.model.compiled import background

    yield
    for job in list(background._running):
        job.wait(240)


@pytest.fixture(autouse=True)
def no_costs_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test measures must not decide how large the drafts of the next one are."""
    monkeypatch.setenv("DECODERS_COST_CACHE", os.path.join(_costs.name, str(next(_numbers))))


@pytest.fixture(scope="session")
def only_trace() -> Callable[[pytest.MonkeyPatch], None]:
    """Called with a patch: Dynamo traces and guards as ever, and what it traced runs as it is. No C++ is generated and compiled,
    which takes longest.

    For tests of what is compiled when, and how often. What inductor makes of the graphs is tested without it.
    """
    import torch

    compile: Callable[..., Any] = torch.compile

    def trace(model: Any = None, *, backend: Any = "inductor", options: Any = None, **more: Any) -> Any:
        if backend == "inductor":
            kept = {name: value for name, value in (options or {}).items() if name == "guard_filter_fn"}
            backend, options = "eager", kept or None
        return compile(model, backend=backend, options=options, **more)

    return lambda patch: patch.setattr(torch, "compile", trace)


@pytest.fixture
def traced_only(only_trace: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test compiles as `only_trace` says."""
    only_trace(monkeypatch)


@pytest.fixture
def tiers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is worth it at once and takes no time, and compiled passes choose other tokens: each the next one of the vocabulary."""
    from decoders.engine.decode.verify import StepFunctions, settle
    from decoders.engine.model.blocks import ForwardResult
    from decoders.engine.model.compiled import tiers
    from decoders.engine.model.compiled.forward_pass import ForwardPass

    def run(self: Any, given: Any, kept: Any = None) -> ForwardResult:
        self.compiled_passes += 1
        plain = self.target.forward(given._replace(text=type(given.text)()))  # results of the text, too
        logits = plain.logits.roll(1, -1)
        return ForwardResult(logits if kept is None else logits[:, kept], plain.hidden, plain.layers)

    def mixed(self: Any, *given: Any) -> ForwardResult:
        *given, compiled = given
        plain = uncompiled_mixed(self, *given, False)
        self.compiled_passes += compiled
        return ForwardResult(plain.logits.roll(compiled, -1), plain.hidden, plain.layers)

    uncompiled_mixed = ForwardPass._mixed
    monkeypatch.setattr(ForwardPass, "_mixed", mixed)
    monkeypatch.setattr(tiers, "FORWARD_SECONDS", 0.0)
    monkeypatch.setattr(tiers.RegionalForward, "compile", lambda *_: None)
    monkeypatch.setattr(StepFunctions, "compiling", lambda self, target: lambda rows, count: None)
    monkeypatch.setattr(StepFunctions, "settle", lambda self, tiers, *arguments: settle(*arguments))
    monkeypatch.setattr(ForwardPass, "_run", run)


@pytest.fixture(params=["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def traced_or_compiled(request: pytest.FixtureRequest) -> str:
    """The test runs with `traced_only`, and, slow, as it is."""
    if request.param == "traced":
        request.getfixturevalue("traced_only")
    return request.param


_modules_seen = [0]
_file_seen: list[Path | None] = [None]


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token of the tiny models; 0 is the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<end>": 0} | {f"w{i}": i for i in range(1, 128)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """An enabled model, shared: whoever changes it takes `fresh`."""
    import decoders
    from decoders.testing import tiny_model

    return decoders.enable(tiny_model("llama"))


@pytest.fixture
def fresh() -> PreTrainedModel:
    """An enabled model of the test's own."""
    import decoders
    from decoders.testing import tiny_model

    return decoders.enable(tiny_model("llama"))


@pytest.fixture(scope="session")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' vocabulary: the printable characters and some pairs of them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from decoders.testing.models import VOCAB

    single = ["<pad>", "<unk>", *map(chr, range(32, 127))]
    pairs = [(a, b) for a in "etaoins" for b in "hrdlu"][: VOCAB - len(single)]
    vocab = {token: i for i, token in enumerate([*single, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def counting_texts() -> list[str]:
    """Thirty texts of its words that count on in steps of their own."""
    return [" ".join(f"w{1 + (start + step * i) % 90}" for i in range(60)) for start in range(10) for step in (1, 2, 3)]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes tokenizers with the named tokens first, then one for each byte: ``byte_tokenizer(["<pad>"], pad_token="<pad>")``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(names: list[str], **roles: str) -> PreTrainedTokenizerFast:
        vocab = {name: i for i, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=roles.get("unk_token")))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)

    return make
