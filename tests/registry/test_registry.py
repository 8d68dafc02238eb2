"""Plugins: isolation of bad ones, name conflicts, lists, and registering by hand."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

import decoders
from decoders import Draft, constraints, hookimpl, verifiers
from decoders import registry as plugins
from decoders.cli.catalogue import _state
from decoders.constraints.base import Backend, CompiledGrammar, Language, Policy
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import PluginError, SettingsError, UnknownNameError
from decoders.registry import Registry, registry, reset_registry
from decoders.registry.resolve import resolve_backend, resolve_strategy, resolve_verifier
from decoders.settings import Settings
from decoders.strategies import PromptLookup
from decoders.strategy import Strategy
from decoders.verifiers import Coupled, TreeRejection, Verifier


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("BLOCK", "ALLOW", "STRICT"):
        monkeypatch.delenv(f"DECODERS_PLUGINS_{name}", raising=False)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    reset_registry()
    yield
    reset_registry()


def _not_called(self: Any, *arguments: Any) -> Any:
    raise NotImplementedError


def strategy_named(name: str, **declared: Any) -> type[Strategy]:
    return type("Fake", (Strategy,), {"name": name, "propose": _not_called} | declared)


def verifier_named(name: str) -> type[Verifier]:
    return type("Fake", (Verifier,), {"name": name, "outcomes": _not_called})


def backend_named(name: str) -> type[Backend]:
    return type("Fake", (Backend,), {"name": name, "compile": _not_called})


def hooking(name: str, function: Callable[..., Any]) -> object:
    """A plugin with one hook."""
    return type("Plugin", (), {name: decoders.hookimpl(function)})()


def plugin_with(*classes: object, verifiers: tuple[object, ...] = (), backends: tuple[object, ...] = ()) -> object:
    class Plugin:
        @decoders.hookimpl
        def decoders_strategies(self) -> list[object]:
            return list(classes)

        @decoders.hookimpl
        def decoders_verifiers(self) -> tuple[object, ...]:
            return verifiers

        @decoders.hookimpl
        def decoders_grammar_backends(self) -> tuple[object, ...]:
            return backends

    return Plugin()


class FakeEntryPoint(SimpleNamespace):
    value, pattern = "fake", metadata.EntryPoint.pattern

    def load(self) -> object:
        return self.loader()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that distributions are installed: ``install(("name", "distribution", plugin or function), …)``."""

    def installed(*points: tuple[str, str, Any]) -> None:
        found = [
            FakeEntryPoint(
                name=name,
                dist=SimpleNamespace(name=distribution, version="1.2"),
                loader=plugin if callable(plugin) else lambda plugin=plugin: plugin,
            )
            for name, distribution, plugin in points
        ]
        monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == "decoders" else [])

    return installed


def status_of(name: str, among: Registry) -> plugins.PluginInfo:
    return next(info for info in among.plugins() if info.name == name)


def fail_to_import() -> object:
    raise ImportError("libmissing.so: cannot open")


def test_built_ins_come_through_the_same_hook() -> None:
    info = registry().plugins()[0]
    assert (info.name, info.provider, info.status) == ("builtin", "hf-decoders", "loaded")
    assert info.hooks == tuple(
        f"decoders_{what}" for what in ("grammar_backends", "grammar_types", "grammars", "strategies", "verifiers")
    )
    assert "autoregressive" in info.strategies
    assert "coupled" in info.verifiers
    assert "llguidance" in info.grammar_backends
    assert registry().strategy("prompt_lookup") is registry().strategy("prompt-lookup") is PromptLookup
    assert registry().strategies()["prompt_lookup"].version == decoders.__version__
    assert registry().verifier("tree_rejection") is registry().verifier("Tree-Rejection") is TreeRejection
    assert [entry.cls for entry in registry().verifiers().values()] == list(verifiers.BUILT_IN)
    assert registry().verifiers()["coupled"].version == decoders.__version__


def test_grammar_backends_are_registered_named_and_resolved(install: Callable[..., None]) -> None:
    fast = backend_named("fast")
    install(("fast", "decoders-fast", plugin_with(backends=(fast,))))
    entries = registry().grammar_backends()
    assert [entry.cls for entry in entries.values()] == [*constraints.BUILT_IN, fast]
    assert (entries["fast"].provider, entries["fast"].version) == ("decoders-fast", "1.2")
    assert status_of("fast", registry()).grammar_backends == ("fast",)
    assert type(resolve_backend(None)) is constraints.Auto
    assert type(resolve_backend("Fast")) is type(resolve_backend(fast)) is fast
    mine = fast()
    assert resolve_backend(mine) is mine
    with pytest.raises(UnknownNameError, match=r"grammar backend.*Did you mean 'llguidance'\?"):
        resolve_backend("llguidence")
    with pytest.raises(SettingsError, match="not int"):
        resolve_backend(3)


def test_a_strategy_that_cannot_be_made_from_its_settings_is_refused() -> None:
    with pytest.raises(PluginError, match="must be made from its settings"):
        resolve_strategy(strategy_named("odd", __init__=lambda self: None))


class WithSettings(Backend):
    name = "with_settings"

    def __init__(self, size: int) -> None: ...

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("cls", "why"), [(WithSettings, "must be made without arguments"), (PromptLookup, "not a subclass")]
)
def test_what_is_no_grammar_backend_is_refused(cls: type, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        registry().register(plugin_with(backends=(cls,)), "bad")


def test_plugin_may_provide_verifiers_alone(install: Callable[..., None]) -> None:
    rules = hooking("decoders_verifiers", lambda self: [verifier_named("mine")])
    install(("rules", "decoders-rules", rules))
    info = status_of("rules", registry())
    assert (info.hooks, info.strategies, info.verifiers) == (("decoders_verifiers",), (), ("mine",))
    entry = registry().verifiers()["mine"]
    assert (entry.cls, entry.provider, entry.version) == (registry().verifier("mine"), "decoders-rules", "1.2")


def test_unknown_name_suggests_the_nearest_and_lists_what_was_not_loaded(install: Callable[..., None]) -> None:
    install(("lost", "decoders-lost", fail_to_import))
    with pytest.raises(UnknownNameError, match=r"strategy.*Did you mean 'prompt_lookup'\?.*Not loaded: lost"):
        registry().strategy("promt_lookup")
    with pytest.raises(
        UnknownNameError, match=r"verifier.*Did you mean 'rejection'\?.*block, coupled.*Not loaded: lost"
    ):
        registry().verifier("rejektion")
    with pytest.raises(UnknownNameError):
        registry().verifier("prompt_lookup")


def sys_exit() -> object:
    sys.exit("no licence")


class Undrafted(Strategy):
    name = "undrafted"


class BadSettings(PromptLookup):
    name = "bad_settings"
    settings_class = dict  # type: ignore[assignment]


class ChunkSettings(Settings):
    chunk: int = Field(1, description="How many.")


class Prefill(PromptLookup):
    name = "prefill"
    settings_class = ChunkSettings


class Hinted(PromptLookup):
    name = "hinted"
    hints = {"num_assistant_tokens": "lenght"}


class Undecided(Verifier):
    name = "undecided"


class Tuned(Coupled):
    name = "tuned"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold


def _hook_broke(self: Any) -> Any:
    raise RuntimeError("hook broke")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:", r"SyntaxError: invalid syntax \(.*broken_plugin.py:1\)"),
        ("import nothing_like_it", r"ModuleNotFoundError: .* 'nothing_like_it' \(.*broken_plugin.py:1\)"),
        (None, "ModuleNotFoundError: No module named 'broken_plugin'"),
    ],
)
def test_a_plugin_that_cannot_be_imported_names_its_own_line(
    monkeypatch, tmp_path, source: str | None, reason: str
) -> None:
    if source is not None:
        (tmp_path / "broken_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_plugin", None)
    point = metadata.EntryPoint("broken", "broken_plugin", "decoders")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    assert re.fullmatch(reason, str(status_of("broken", registry()).error))


@pytest.mark.parametrize("value", ["decoders-broken", "no module", ""])
def test_an_entry_point_that_names_no_module_is_listed_with_its_value(monkeypatch, value: str) -> None:
    points = [metadata.EntryPoint("broken", value, "decoders")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    assert f"the entry point {value!r} is neither a module nor" in str(status_of("broken", registry()).error)
    assert _state(points) != _state(())


class Widths(Settings):
    """A setting without a default."""

    width: int


Required = type("Required", (PromptLookup,), {"name": "required", "settings_class": Widths})
#: Declarations of the wrong type.
ODD: tuple[dict[str, Any], ...] = (
    {"summary": None}, {"needs": True}, {"exact": "no"}, {"on_device": 1}, {"auto_place": "first"}, {"auto_settings": ["length"]},
    {"hints": ["length"]}, {"hidden_layers": -1}, {"grade_rates": (2.0,)}, {"grade_rates": ("1",)}, {"grade_rates": [0.5]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (fail_to_import, r"ImportError: libmissing.so: cannot open \(.*test_registry.py:\d+\)"),
        (sys_exit, "SystemExit: no licence"),
        (hooking("decoders_strategies", _hook_broke), r"RuntimeError: hook broke \(.*test_registry.py:\d+\)"),
        (
            hooking("decoders_stratgies", lambda self: []),
            "no hook 'decoders_stratgies'. Did you mean 'decoders_strategies'",
        ),
        (hooking("decoders_strategies", lambda self, wanted: []), "wanted"),
        (hooking("decoders_strategies", lambda self: PromptLookup), "iterable of classes"),
        (hooking("decoders_strategies", lambda self: 3), "iterable of classes, not int"),
        (plugin_with(Prefill), "'chunk' of strategy 'prefill' would be read from DECODERS_PREFILL_CHUNK"),
        (plugin_with(Hinted), "'num_assistant_tokens' stands for setting 'lenght', which .* Did you mean 'length'"),
        (
            plugin_with(strategy_named("odd", hints={"num_asistant_tokens": "length"})),
            "Did you mean 'num_assistant_tokens'",
        ),
        (SimpleNamespace(), "no function marked"),
        (plugin_with(int), "builtins.int is not a subclass"),
        (plugin_with("lookahead"), "'lookahead' is not a subclass"),
        (plugin_with(Undrafted), "does not implement: propose"),
        (plugin_with(strategy_named("Camel-Case")), "snake_case"),
        (
            plugin_with(type("Fake", (Strategy,), {"name": "fake", "propose": lambda self, state: None})),
            r"Fake.propose\(self, state\) is called with \(self, state, sequences\): .* \(.*test_registry.py:\d+\)",
        ),
        (
            plugin_with(strategy_named("odd", obsrve=lambda self, state, step: None)),
            "obsrve is not an attribute of decoders.Strategy. Did you mean 'observe'",
        ),
        (plugin_with(strategy_named("odd", need_assistant=True)), "Did you mean 'needs_assistant'"),
        (plugin_with(BadSettings), "settings_class"),
        (plugin_with(Required), "setting 'width' of Widths must have a default"),
        *((plugin_with(strategy_named("odd", **wrong)), f"{next(iter(wrong))} must be") for wrong in ODD),
        (
            plugin_with(verifiers=(type("Set", (Coupled,), {"name": "set", "settings_class": Widths}),)),
            "have a default",
        ),
        (plugin_with(strategy_named("twin"), strategy_named("twin")), "two of the plugin.s strategies"),
        (hooking("decoders_verifiers", lambda self: Coupled), "decoders_verifiers must return an iterable of classes"),
        (plugin_with(verifiers=(PromptLookup,)), "PromptLookup is not a subclass of decoders.Verifier"),
        (plugin_with(verifiers=(Coupled(),)), "Coupled.* is not a subclass of decoders.Verifier"),
        (plugin_with(verifiers=(Undecided,)), "Undecided does not implement: outcomes"),
        (plugin_with(verifiers=(verifier_named("Camel-Case"),)), "snake_case"),
        (plugin_with(verifiers=(Tuned,)), "Tuned must be made without arguments.*'threshold'"),
        (
            plugin_with(verifiers=(verifier_named("twin"), verifier_named("twin"))),
            "two of the plugin's verifiers are named 'twin'",
        ),
        (plugin_with(strategy_named("sound"), verifiers=(int,)), "builtins.int is not a subclass of decoders.Verifier"),
    ],
)
def test_broken_plugin_is_listed_with_its_reason_and_stops_nobody(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, plugin: Any, reason: str
) -> None:
    install(("broken", "decoders-broken", plugin), ("fine", "decoders-fine", plugin_with(strategy_named("fine"))))
    info = status_of("broken", registry())
    assert (info.status, info.version, info.strategies, info.verifiers) == ("failed", "1.2", (), ())
    assert info.error is not None
    assert re.search(reason, info.error)
    assert set(registry().strategies()) >= {"fine", "prompt_lookup"}
    assert set(registry().verifiers()) >= {"coupled", "rejection"}
    assert "sound" not in registry().strategies()

    monkeypatch.setenv("DECODERS_PLUGINS_STRICT", "1")
    with pytest.raises(PluginError, match=r"'broken' \(decoders-broken 1.2\) failed to load"):
        Registry()


@pytest.mark.parametrize("kind", ["Strategy", "Verifier"])
def test_two_providers_of_one_name_leave_it_to_neither(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def get(found: Registry) -> type:
        return found.strategy("eagle") if kind == "Strategy" else found.verifier("eagle")

    def plugin(cls: Any, *others: type[Strategy]) -> object:
        return plugin_with(cls, *others) if kind == "Strategy" else plugin_with(*others, verifiers=(cls,))

    one, two = (strategy_named("eagle") if kind == "Strategy" else verifier_named("eagle") for _ in range(2))
    install(("first", "decoders-one", plugin(one, strategy_named("other"))), ("second", "dec-two", plugin(two)))
    claim = rf"{kind} 'eagle' is claimed by 'second' \(dec-two 1\.2\) and 'first' \(decoders-one 1\.2\)"
    with pytest.raises(PluginError, match=claim) as caught:
        get(registry())
    assert "DECODERS_PLUGINS_BLOCK=" in str(caught.value)
    assert "eagle" not in (*registry().strategies(), *registry().verifiers())
    assert "other" in registry().strategies()
    assert status_of("first", registry()).status == status_of("second", registry()).status == "conflict"

    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "dec_two")
    assert get(Registry()) is one
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "first, unrelated")
    assert get(Registry()) is two
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "")
    monkeypatch.setenv("DECODERS_PLUGINS_STRICT", "1")
    with pytest.raises(PluginError, match=f"{kind} 'eagle' is claimed by"):
        Registry()


def test_strategy_and_verifier_may_share_a_name(install: Callable[..., None]) -> None:
    strategy, verifier = strategy_named("careful"), verifier_named("careful")
    install(
        ("first", "decoders-one", plugin_with(strategy)),
        ("second", "dec-two", plugin_with(strategy_named("coupled"), verifiers=(verifier,))),
    )
    assert status_of("first", registry()).status == status_of("second", registry()).status == "loaded"
    assert registry().strategy("careful") is strategy
    assert registry().verifier("careful") is verifier
    assert registry().verifier("coupled") is Coupled


def test_clashes_of_both_kinds_are_told_together(install: Callable[..., None]) -> None:
    greedy = plugin_with(
        strategy_named("prompt_lookup"), verifiers=(verifier_named("coupled"), verifier_named("extra"))
    )
    install(("greedy", "decoders-greedy", greedy))
    error = str(status_of("greedy", registry()).error)
    assert re.search("Strategy 'prompt_lookup' is claimed by.*Verifier 'coupled' is claimed by", error)
    assert registry().verifier("coupled") is Coupled
    assert "extra" in registry().verifiers()
    assert status_of("builtin", registry()).status == "loaded"


def test_plugin_of_no_known_distribution_is_to_be_blocked_not_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    point = FakeEntryPoint(name="stray", dist=None, loader=lambda: plugin_with(verifiers=(verifier_named("coupled"),)))
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    assert "Block one, for instance with DECODERS_PLUGINS_BLOCK=stray." in str(status_of("stray", registry()).error)


def test_blocked_plugin_is_not_even_imported(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(("crasher", "decoders-crasher", fail_to_import))
    monkeypatch.setenv("DECODERS_PLUGINS_STRICT", "1")
    for listed in ("crasher", "Decoders_Crasher"):
        monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", listed)
        assert status_of("crasher", Registry()).status == "blocked"


def test_listed_name_of_no_plugin_is_told(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(("fine", "decoders-fine", plugin_with(strategy_named("fine"))))
    assert registry().unmatched() == []
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "fin,decoders_fine")
    (said,) = Registry().unmatched()
    assert said.startswith("DECODERS_PLUGINS_BLOCK names 'fin', which no plugin is called. Did you mean 'fine'")


def test_allow_list_admits_only_the_named_and_always_the_built_ins(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(("a", "dist-a", plugin_with(strategy_named("a"))), ("b", "dist-b", plugin_with(strategy_named("b"))))
    monkeypatch.setenv("DECODERS_PLUGINS_ALLOW", "dist-b")
    found = Registry()
    assert "a" not in found.strategies()
    assert {"b", "autoregressive"} <= set(found.strategies())
    assert status_of("a", found).error == "not named in DECODERS_PLUGINS_ALLOW"


def test_register_and_unregister_by_hand() -> None:
    mine = strategy_named("mine")
    assert registry().register(plugin_with(mine), "notebook").status == "loaded"
    assert registry().strategy("mine") is mine
    with pytest.raises(PluginError, match="unregister it first"):
        registry().register(plugin_with(mine), "notebook")
    assert registry().register(plugin_with(strategy_named("mine")), "again").status == "conflict"
    with pytest.raises(PluginError, match="unregister"):
        registry().strategy("mine")
    registry().unregister("again")
    assert registry().strategy("mine") is mine
    assert status_of("notebook", registry()).status == "loaded"
    registry().unregister("notebook")
    with pytest.raises(UnknownNameError):
        registry().strategy("mine")
    with pytest.raises(UnknownNameError):
        registry().unregister("builtin")


def test_invalid_plugin_registered_by_hand_leaves_nothing_behind() -> None:
    before = registry().strategies()
    with pytest.raises(PluginError, match="'notebook' is invalid"):
        registry().register(plugin_with(strategy_named("good"), int), "notebook")
    assert registry().strategies() == before
    assert registry().register(plugin_with(strategy_named("good")), "notebook").status == "loaded"


def test_registry_is_built_once_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr("decoders.registry.plugins.Registry", lambda: built.append(Registry()) or built[-1])
    gate = threading.Barrier(8)
    found: list[Registry] = []

    def ask() -> None:
        gate.wait()
        found.append(registry())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert all(one is built[0] for one in found)


def test_plugin_that_needs_the_registry_while_loading_fails_alone(install: Callable[..., None]) -> None:
    install(("eager", "decoders-eager", registry))
    assert "while it is being loaded" in str(status_of("eager", registry()).error)
    assert registry().strategy("autoregressive")


def test_a_class_or_object_given_itself_is_checked_as_a_plugin_s_is():
    class Nameless(Strategy):
        def propose(self, state, sequences):
            return Draft.nothing(1, sequences.tokens.device)

    class Unfinished(Strategy):
        name = "unfinished"

    class NamelessVerifier(Verifier):
        def outcomes(self, block):
            raise NotImplementedError

    for resolve, cls, said in (
        (resolve_strategy, Nameless, "Nameless.name must be a snake_case string"),
        (resolve_strategy, Unfinished, "does not implement: propose"),
        (resolve_strategy, type("Dict", (Nameless,), {"name": "a", "settings_class": dict}), "settings_class must be"),
        (resolve_verifier, NamelessVerifier, "NamelessVerifier.name must be"),
        (resolve_backend, type("Bare", (Backend,), {}), "does not implement: compile"),
        (
            resolve_strategy,
            type("Blind", (PromptLookup,), {"observe": lambda self, state: None})(),
            "Blind.observe.* is called with",
        ),
        (
            resolve_verifier,
            type("Deaf", (Coupled,), {"outcomes": lambda self: None})(),
            r"Deaf.outcomes\(self\) is called with",
        ),
    ):
        with pytest.raises(PluginError, match=said):
            resolve(cls)


def test_a_class_registered_as_a_plugin_is_told_from_an_object():
    class House:
        @hookimpl
        def decoders_strategies(self):
            return []

    with pytest.raises(PluginError, match=r"House is a class: register an object, House\(\)"):
        registry().register(House, "house")
