"""Checks of the conformance kit. Each check is a function that raises an AssertionError, with the reason, if a strategy fails."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ..common.host_reads import as_recorded
from ..errors import PluginError, SettingsError
from ..registry.kinds import STRATEGY, Kind, check_traits
from ..strategy import Strategy
from .conditions import Conditions, run, run_alike
from .exactness import assert_same_tokens, prompts, reference
from .memory import parts_of
from .models import VOCAB
from .spy import spied
from .tape import HostReadError, RecordingError
from .toy_grammar import Matched, TokenAutomaton
from .wrapped import Replayed, ShapeError

#: Arguments of ``generate`` in checks that sample.
DRAWS = (dict(seed=1, temperature=0.3, top_k=0), dict(seed=7, temperature=0.8, top_k=40, top_p=0.95))


@functools.cache
def _automaton(seed: int, *stops: int) -> TokenAutomaton:
    return TokenAutomaton.random(seed, VOCAB, stops)


def check_class(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """The class has a name and a summary. Its methods take what the loop passes. Its declarations (``exact``, ``hints`` …) have the
    right types.
    """
    check_registrable(STRATEGY, type(strategy))
    check_traits(strategy, type(strategy).__name__)
    for part in parts_of(strategy):
        check_class(part)


def check_settings(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Settings are frozen, have descriptions, survive JSON, and reject unknown names."""
    cls, settings = strategy.settings_class, strategy.settings
    assert isinstance(settings, cls), f"settings are a {type(settings).__name__}, not a {cls.__name__}"
    assert cls.model_config.get("frozen"), f"{cls.__name__} must be frozen"
    for name, field in cls.model_fields.items():
        assert field.description, f"{cls.__name__}.{name} has no description"
        try:
            setattr(settings, name, getattr(settings, name))
        except ValidationError:
            continue
        raise AssertionError(f"{cls.__name__}.{name} can be changed in place; settings must be frozen")
    message = ""
    try:
        cls.parse({"no_such_setting": 1})
    except SettingsError as error:
        message = str(error)
    assert message, f"{cls.__name__} accepts unknown settings"
    assert "no_such_setting" in message, f"the error of an unknown setting does not name it: {message}"
    try:
        hash(settings)
    except TypeError as error:
        raise AssertionError(
            f"{cls.__name__}: {error}: declare a tuple, or for a dict decoders.settings.Table"
        ) from error
    again = cls.model_validate_json(settings.model_dump_json())
    assert again == settings, f"settings do not survive JSON: {settings!r} came back as {again!r}"
    for part in parts_of(strategy):
        check_settings(part)


def check_copies(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Copies by deepcopy and pickle have the same settings, and decode the same tokens."""
    for how, twin in (("deepcopy", copy.deepcopy(strategy)), ("pickle", pickle.loads(pickle.dumps(strategy)))):
        assert type(twin) is type(strategy), f"{how} returns a {type(twin).__name__}"
        assert twin.settings == strategy.settings, f"{how} changed the settings to {twin.settings!r}"
        inputs = prompts(1)
        with conditions.enabled(conditions.models[0]) as model:
            first = run(model, conditions.models[0], strategy, inputs, conditions, max_new_tokens=8)
            second = run(model, conditions.models[0], twin, inputs, conditions, max_new_tokens=8)
            assert_same_tokens(model, inputs, first.sequences, second.sequences, f"after {how}")


def check_drafts(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Every draft of a real call keeps the contract of :class:`~decoders.Draft`: shapes, dtypes, tokens and tree are valid.

    Hooks must not write to the loop's tensors, not even to positions after a row's text. Hooks must not change the strategy's instance,
    its settings, or the state of the process (random states, default dtype, grad mode).
    """
    for name, rows, options in conditions.combinations(({}, dict(do_sample=True, **DRAWS[0]))):
        with conditions.enabled(name) as model:
            run(model, name, spied(strategy), prompts(rows), conditions, **options)


def check_on_device(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A strategy that claims ``on_device`` can be recorded as a CUDA graph.

    Its hooks do not wait for the device, use no data of the host, and use the same shapes and tensors in every step. The drafts are the
    same whether hooks are called or replayed from a recording.
    """
    if not strategy.on_device:
        return
    name, inputs = conditions.models[0], prompts(2)
    eager = replace(conditions, compile=False)
    called, replayed = Replayed(strategy, record=False), Replayed(strategy, record=True)
    with conditions.enabled(name) as model, as_recorded():
        # The first call on a model is not checked, because hooks may create tensors from data of the host in the first call.
        run(model, name, strategy, inputs, eager, max_new_tokens=2)
        try:
            run(model, name, spied(strategy, forbid_host_reads=True), inputs, eager, max_new_tokens=12)
            for twin in (called, replayed):
                run(model, name, twin, inputs, eager, max_new_tokens=32)
        except (HostReadError, RecordingError, ShapeError) as error:
            raise AssertionError(f"claims on_device = True, but {error}") from error
    for number, (first, second) in enumerate(zip(called.drafts, replayed.drafts, strict=False)):
        assert first == second, (
            f"claims on_device = True, but proposes {first} in step {number + 1}, and {second} when it is replayed: what a hook "
            "changes must be tensors that it writes into, not numbers or other Python objects"
        )
    assert len(called.drafts) == len(replayed.drafts), (
        "claims on_device = True, but takes other steps when it is replayed"
    )
    assert called.rebound is None, (
        f"claims on_device = True, but its hooks change {called.rebound}, which a replay does not: change the contents of "
        "tensors, nothing else"
    )


def check_one_new_token(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """A call with ``max_new_tokens=1`` writes one token, however many are proposed."""
    for rows in (1, 3):
        name, inputs = conditions.models[0], prompts(rows)
        with conditions.enabled(name) as model:
            out = run(model, name, strategy, inputs, conditions, max_new_tokens=1)
            assert out.sequences.shape[1] == inputs["input_ids"].shape[1] + 1, (
                f"max_new_tokens=1 wrote {out.sequences.shape[1] - inputs['input_ids'].shape[1]} tokens"
            )
            if strategy.exact:
                expected = reference(model, inputs, max_new_tokens=1)
                assert_same_tokens(model, inputs, expected.sequences, out.sequences, f"one new token, batch {rows}")


def check_report(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """The report names the strategy, the report's figures add up, and the strategy's details can be written as JSON."""
    for rows in (1, 4):
        name, inputs = conditions.models[0], prompts(rows)
        with conditions.enabled(name) as model:
            out = run(model, name, strategy, inputs, conditions)
        report, new = out.report, out.sequences.shape[1] - inputs["input_ids"].shape[1]
        assert report.strategy == strategy.name, f"the report names {report.strategy!r}"
        assert report.exact == strategy.exact, f"the report says exact={report.exact}, the strategy {strategy.exact}"
        assert report.rows == rows and report.prompt_tokens == inputs["attention_mask"].sum(1).tolist(), (
            f"rows {report.rows}, prompt tokens {report.prompt_tokens}"
        )
        assert report.new_tokens == [new] * rows, (
            f"the report has new tokens {report.new_tokens}, and {new} per row were written"
        )
        total, row_steps = sum(report.new_tokens), sum(report.accepted_lengths)
        histogram = sum((n + 1) * count for n, count in enumerate(report.accepted_lengths))
        assert histogram == total, (
            f"accepted_lengths {report.accepted_lengths} account for {histogram} of {total} tokens"
        )
        assert report.accepted <= report.drafted, f"{report.accepted} accepted of {report.drafted} drafted"
        assert report.accepted <= total <= report.accepted + row_steps, (
            f"{report.accepted} accepted tokens, and at most one more in each of {row_steps} row-steps, cannot be {total} tokens"
        )
        assert report.steps <= row_steps <= report.steps * rows, f"{row_steps} row-steps in {report.steps} steps"
        try:
            json.dumps(report.details)
        except (TypeError, ValueError) as error:
            raise AssertionError(
                f"details returns values that JSON cannot hold: {report.details!r} ({error})"
            ) from error


def check_greedy_equals_transformers(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Greedy output equals transformers' own, for one row and for a left-padded batch of unequal rows."""
    for (m, name), (r, rows) in itertools.product(enumerate(conditions.models), enumerate((1, 4))):
        if (m + r) % 2 and len(conditions.models) > 1 and not conditions.thorough:
            continue  # check_finished_rows_idle covers these combinations
        inputs = prompts(rows)
        with conditions.enabled(name) as model:
            run_alike(model, name, strategy, inputs, conditions, f"{type(model).__name__}, greedy, batch {rows}")


def check_finished_rows_idle(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Rows that end early are padded, and do not change other rows. They write no further tokens, even if draft tokens after the end of
    the text are right.
    """
    for name, rows in itertools.product(conditions.models, (1, 4)):
        inputs = prompts(rows)
        with conditions.enabled(name) as model:
            plain = reference(model, inputs, max_new_tokens=conditions.new_tokens).sequences
            start = inputs["input_ids"].shape[1]
            stops = [int(plain[row, start + 3 + 5 * row]) for row in range(min(rows, 3))]
            what = f"rows that end at different times, batch {rows}"
            out = run_alike(model, name, strategy, inputs, conditions, what, eos_token_id=stops)
            first = [
                next((i + 1 for i, t in enumerate(row[start:].tolist()) if t in stops), conditions.new_tokens)
                for row in plain
            ]
            assert out.report.new_tokens == first, f"new tokens {out.report.new_tokens}, not {first}"


def check_sampling_equals_autoregressive(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """With the same seed, sampling writes the tokens that plain decoding writes."""
    for name, rows, draw in conditions.combinations(DRAWS):
        inputs = prompts(rows)
        with conditions.enabled(name) as model:
            what = f"{type(model).__name__}, sampling with {draw}, batch {rows}"
            run_alike(model, name, strategy, inputs, conditions, what, "autoregressive", do_sample=True, **draw)


def check_prefix_processors(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """Logits processors that read the text see, for each draft token, the row's text and the token's path in the tree."""
    for options in (dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=3)):
        for rows in (1, 4):
            name, inputs = conditions.models[0], prompts(rows)
            with conditions.enabled(name) as model:
                run_alike(model, name, strategy, inputs, conditions, f"{options}, batch {rows}", **options)


def check_grammars(strategy: Strategy, conditions: Conditions = Conditions()) -> None:
    """With grammars, a strategy writes the tokens of plain decoding. The rows have different grammars, and one row has no grammar."""
    stops = [5, 9]
    for seed, draw in ((1, {}), (2, dict(do_sample=True, **DRAWS[0]))):
        name, inputs = conditions.models[0], prompts(4)
        automata = [_automaton(10 * seed + row, *stops) for row in range(3)]
        grammars = [automata[0], Matched(automata[1]), None, automata[2]]
        with conditions.enabled(name) as model:
            options = dict(grammar=grammars, eos_token_id=stops, **draw)
            what = f"a grammar per row, {draw or 'greedy'}"
            out = run_alike(model, name, strategy, inputs, conditions, what, "autoregressive", **options)
            prompt = inputs["input_ids"].shape[1]
            for row, grammar in enumerate(grammars):
                tokens = out.sequences[row, prompt : prompt + out.report.new_tokens[row]].tolist()
                taken = grammar.start().advance(tokens) if grammar is not None else len(tokens)
                assert taken == len(tokens), f"row {row}: token {taken}, {tokens[taken]}, is illegal in its grammar"


def check_registrable(kind: Kind[Any], cls: type[Any]) -> None:
    """A class can be registered, and has a summary of one line."""
    try:
        kind.check(cls)
    except PluginError as error:
        raise AssertionError(str(error)) from error
    summary = cls.summary
    assert summary.strip() and "\n" not in summary, (
        f"{cls.__name__}.summary must be one line that says what it does, not {summary!r}"
    )
