"""Strategies made of others say all that their parts say, and pass every hook on: nothing of the contract is forgotten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import decoders
from decoders.settings import Settings
from decoders.strategies import PromptLookup, Suffix
from decoders.strategies.merged import Merged, MergedSettings
from decoders.strategy import TRAITS, Context, Draft, PromptChunk, Sequences, Step, Strategy
from decoders.testing import decode, prompts, tiny_draft, tiny_model
from decoders.testing.spy import Spy
from decoders.testing.wrapped import Replayed, Wrapped

#: All that a strategy says or does.
PUBLIC = sorted(
    {name for name in dir(Strategy) if not name.startswith("_") and name != "declare"} | {"name", "settings"}
)
HOOKS = [name for name in PUBLIC if callable(getattr(Strategy, name, None)) and name != "settings_class"]
#: What is asked without an argument and no property: these a class or an instance sets.
PLAIN = [n for n in PUBLIC if n not in HOOKS and not isinstance(getattr(Strategy, n, None), property)]
PROPERTIES = [name for name in PUBLIC if name not in HOOKS and name not in PLAIN]

#: What of its parts a merged strategy says where one of two differs from the base class: what each part says must count.
MERGED = {
    "exact": False, "needs_assistant": True, "takes_assistant": True, "rests": False, "misses_steps": False, "timed": True,
    "rows_apart": False, "needs_grammar": True, "on_device": False, "prompt_logits": True,
    "reads_prompt": True, "observes": True, "finds_layers": True, "reads_layers": True, "rebatches": False, "limits": False,
}  # fmt: skip
#: What it says for itself, and why.
OF_ITS_OWN = {
    "name": "the names of all",
    "summary": "strategies are listed by class",
    "needs": "likewise",
    "settings": "the node budget; each part has its own",
    "settings_class": "likewise",
    "hints": "they are read for each part before these are merged",
    "auto_place": "auto chooses among strategies that are registered, and a merged one is made by a call",
    "auto_settings": "auto chooses among strategies that are registered, and a merged one is made by a call",
    "hidden_layers": "its layers are told by layers_for",
    "traits": "they are looked at one by one",
    "grade_rates": "a joint draft has no grades: those of several drafters are not on one scale",
}


class ProbeSettings(Settings):
    """None."""


class Bare(Strategy):
    """Overrides nothing but what it must."""

    name = "bare"

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.nothing(len(sequences.length), sequences.length.device)


class Watches(Bare):
    """Has an `observe`: strategies without one can be left out of steps whatever they say."""

    name = "watches"

    def observe(self, state: Any, step: Step) -> None: ...


#: Who was asked for what. No instance may change while it runs.
asked: list[tuple[str, str]] = []


class Probe(Strategy):
    """Says everything otherwise than the base class does, and notes what it is asked."""

    name = "probe"
    summary = "Another summary."
    needs = "luck"
    settings_class = ProbeSettings
    hints = {"num_assistant_tokens": "length"}
    auto_place, auto_settings = 5, {"length": 9}
    hidden_layers = (1,)
    grade_rates = (0.5,)

    def _note(self, hook: str, result: Any) -> Any:
        asked.append((self.name, hook))
        return result

    def start(self, context: Context) -> Any:
        return self._note("start", {})

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        return self._note("rebatch", {"again": True})

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return self._note("propose", Draft.nothing(len(sequences.length), sequences.length.device))

    def observe(self, state: Any, step: Step) -> None:
        self._note("observe", None)

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        self._note("prefill", None)

    def finish(self, state: Any) -> None:
        self._note("finish", None)

    def limit(self, state: Any, tokens: int) -> None:
        self._note("limit", None)

    def details(self, state: Any) -> dict[str, Any]:
        return self._note("details", {"what": "it did"})

    def keeps_rows(self, state: Any) -> bool:
        return self._note("keeps_rows", True)

    def compose(self, resolve: Any, registered: Any) -> None:
        self._note("compose", None)

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        return self._note("layers_for", (0,))

    def settings_in_force(self) -> dict[str, Any]:
        return self._note("settings_in_force", {"probed": True})


for _flag in PLAIN:  # flags that this file has not heard of, too
    if isinstance(getattr(Strategy, _flag, None), bool):
        setattr(Probe, _flag, not getattr(Strategy, _flag))


class Other(Probe):
    name = "other"


TOKENS = torch.zeros(1, 8, dtype=torch.int64)
ONE, NONE = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
SEQUENCES = Sequences(TOKENS, ONE * 4, ONE, ONE == 0, ONE)
BLOCK = torch.zeros(1, 1, dtype=torch.int64)
STEP = Step(BLOCK, BLOCK, BLOCK, NONE, ONE, torch.zeros(1, 1, 9), torch.zeros(1, 1, 4), SEQUENCES)
CHUNK = PromptChunk(BLOCK, BLOCK, BLOCK == 0, torch.zeros(1, 1, 4))
CONTEXT = Context(
    cast(Any, SimpleNamespace(config=None)), None, None, rows=1, slots=8, device=TOKENS.device, vocab_size=9, compile=lambda f: f,
    decoder_layers=2, sequences=SEQUENCES,
)  # fmt: skip
#: What each hook is called with behind its state.
ARGUMENTS: dict[str, tuple] = {
    "rebatch": (NONE, CONTEXT), "propose": (SEQUENCES,), "observe": (STEP,), "prefill": (CHUNK,), "finish": (), "limit": (3,),
    "details": (), "keeps_rows": (),
}  # fmt: skip
WITHOUT_STATE: dict[str, tuple] = {
    "start": (CONTEXT,),
    "layers_for": (None, 2),
    "settings_in_force": (),
    "compose": (None, {}),
}


def call(strategy: Strategy, hook: str, state: Any = None) -> Any:
    assert hook in ARGUMENTS or hook in WITHOUT_STATE, f"{hook} is new: say here what it is called with"
    given = WITHOUT_STATE[hook] if hook in WITHOUT_STATE else (state, *ARGUMENTS[hook])
    return getattr(strategy, hook)(*given)


def merged(*parts: Strategy) -> Merged:
    return Merged(parts, MergedSettings(nodes=16))


def test_whatever_a_strategy_declares_is_a_trait_and_has_a_rule() -> None:
    """What is no trait tells classes apart."""
    of_classes = ("name", "summary", "needs", "settings", "settings_class", "hints", "auto_place", "auto_settings")
    declared = {name for name in PLAIN if name not in of_classes}
    assert declared == set(TRAITS) == set(merged(Bare()).traits)


def test_hooks_that_are_overridden_are_declared_and_an_own_word_counts_more() -> None:
    class Says(Watches):
        observes = False

    class Below(Says):
        """Inherits the hook, and what was said of it."""

    class Drops(Watches):
        observe = Strategy.observe

    assert Watches.observes and not Bare.observes and not Says().observes and not Below().observes
    assert not Drops().observes
    assert type("Mixed", (type("Mixin", (), {"prefill": Probe.prefill}), Bare), {}).reads_prompt


def test_the_probe_differs_from_the_base_class_in_everything() -> None:
    plain, probe = Bare(), Probe()
    same = [name for name in (*PLAIN, *PROPERTIES) if getattr(plain, name) == getattr(probe, name)]
    assert not same, f"{same} of Strategy: give Probe another value"
    assert not [name for name in HOOKS if getattr(Probe, name) is getattr(Strategy, name)]


@pytest.mark.parametrize(
    "wrap", [Wrapped, Spy, functools.partial(Replayed, record=False)], ids=["any", "spy", "replayed"]
)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_wrapper_passes_everything_on(name: str, wrap: Callable[[Strategy], Strategy]) -> None:
    if name == "rests":
        assert not wrap(Probe()).rests, "what is watched is asked in every step"
        return
    if name not in HOOKS:
        for inner in (Probe(), Bare()):
            expected = inner.traits if name == "traits" else None
            assert getattr(wrap(inner), name) == (expected | {"rests": False} if expected else getattr(inner, name))
        return
    inner = Probe()
    wrapper = wrap(inner)
    state = wrapper.start(CONTEXT)
    asked.clear()
    result = call(wrapper, name, state)
    assert asked == [("probe", name)]
    expected = call(Probe(), name, state)
    assert repr(result) == repr(expected)


@pytest.mark.parametrize("name", [*PLAIN, *PROPERTIES])
def test_a_merged_strategy_combines_what_its_parts_say(name: str) -> None:
    if name in OF_ITS_OWN:
        assert name not in MERGED
        return
    assert name in MERGED, f"{name} of Strategy is neither combined by merged strategies nor listed with a reason"
    kind = Watches if name in ("rests", "misses_steps") else Bare
    assert getattr(merged(Probe(), Other()), name) == getattr(Probe(), name)
    for parts in ((Probe(), kind()), (kind(), Probe())):
        assert getattr(merged(*parts), name) == MERGED[name]
    assert getattr(merged(kind(), type("Two", (kind,), {"name": "two"})()), name) == getattr(kind(), name)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_merged_strategy_asks_all_its_parts(hook: str) -> None:
    both = merged(Probe(), Other())
    state = both.start(CONTEXT)
    if hook == "observe":
        both.propose(state, SEQUENCES)
    asked.clear()
    call(both, hook, state)
    assert [name for name, what in asked if what == hook] == ["probe", "other"]


def test_parts_say_by_their_names_what_they_did() -> None:
    both = merged(Probe(), Other())
    assert both.details(both.start(CONTEXT)) == {"probe": {"what": "it did"}, "other": {"what": "it did"}}
    model = decoders.enable(tiny_model("llama"))
    out = decode(
        model, prompts(1), Merged([Suffix(), PromptLookup()]), max_new_tokens=4, decoders_config={"compile": False}
    )
    assert list(out.report.details) == ["suffix"], "prompt_lookup has nothing to say"


def test_a_part_that_takes_a_draft_model_gets_it() -> None:
    model = decoders.enable(tiny_model("llama"))
    options = dict(max_new_tokens=4, decoders_config={"compile": False})
    out = decode(model, prompts(1), "prompt_lookup+auto", assistant_model=tiny_draft("llama"), **options)
    assert "speculative" in out.report.details["auto"]["candidates"]
