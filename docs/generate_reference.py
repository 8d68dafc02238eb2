"""Writes docs/reference/ from the code: ``python docs/generate_reference.py [FOLDER]``.

And, without a folder, what ``decoders strategies`` and the like list of this package, which they read without loading it.

Whatever is public and undocumented (a name without a docstring, a setting or an option without a description, a hook
without a contract) is an error here, and so in the tests.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

import decoders
from decoders import (
    cli,
    constraints,
    costs,
    demo,
    drafters,
    enabling,
    errors,
    hookspecs,
    registry,
    report,
    sampling,
    scheduling,
    settings,
    strategies,
    strategy,
    testing,
    text_memory,
    tree,
    verifiers,
)
from decoders.bench import synthetic
from decoders.cli import catalogue
from decoders.common import transformers_compat
from decoders.constraints import library
from decoders.heads import network_files
from decoders.hf import arguments
from decoders.prompts import reading, templates
from decoders.report import surroundings
from decoders.sampling.processors import OPERATIONS
from decoders.strategies import merged, mtp, ngram_table
from decoders.verifiers import verifier

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/generate_reference.py from the code. Do not edit. -->\n\n"


class UndocumentedError(Exception):
    """Something public lacks its documentation."""


def pages() -> dict[str, str]:
    """File name to content of every page of the reference."""
    made = {
        "README.md": contents, "api.md": api, "generate.md": generate, "strategies.md": strategy_page,
        "verifiers.md": verifier_page, "settings.md": settings_page, "hooks.md": hooks, "cli.md": command_line,
        "testing.md": kit, "errors.md": error_page,
    }  # fmt: skip
    return {name: NOTE + "\n".join(make()).rstrip() + "\n" for name, make in made.items()}


#: The bases on which strategies stand: their `__all__` is public.
BASES = ("draft_model", "draft_tree", "feature_drafter", "followed_text", "text_drafter")
#: Where the public names about heads live.
HEADS = {
    "decoders.heads.network_files": network_files.__all__,
    "decoders.heads.block_heads": ("BlockHead", "DraftedBlock", "HeadScores", "HeadFields", "MarkovHead"),
    "decoders.heads.dflash": ("DFlashConfig",),
    "decoders.heads.eagle3": ("Eagle3Config",),
    "decoders.heads.medusa": ("load_heads", "save_heads", "HeadsConfig", "search_tree", "accepted_length", "picture"),
    "decoders.training.medusa": ("train_medusa",),
    "decoders.training.texts": ("Job",),
}


def contents() -> Iterator[str]:
    yield "# Reference\n"
    yield "Made from the code, one page each:\n"
    yield "- [Python API](api.md): `decoders` and the modules that users call."
    yield "- [Arguments of generate](generate.md): ours, and those of transformers that are refused."
    yield "- [Strategies](strategies.md): what each one does, and its settings."
    yield "- [Verifiers](verifiers.md): the rules that decide how much of a draft is kept."
    yield "- [Settings](settings.md): settings of the loop, variables, files."
    yield "- [Hooks](hooks.md): what a plugin implements."
    yield "- [Command line](cli.md): commands and options."
    yield "- [Testing kit](testing.md): `decoders.testing`."
    yield "- [Errors](errors.md): every exception raised on purpose."
    yield "- [JSON Schema](json-schema.md): what is measured of it (made by docs/generate_schema_report.py)."
    yield "- [Designs of transformers](models.md): which are decoded and which refused (made by docs/generate_models.py)."


# --- Python -----------------------------------------------------------------------------------------------------------


def api() -> Iterator[str]:
    yield "# Python API\n"
    yield "## decoders\n"
    submodules = [name for name in decoders.__all__ if inspect.ismodule(getattr(decoders, name))]
    for name in sorted(set(decoders.__all__) - set(submodules)):
        yield from entry("decoders", name, getattr(decoders, name))
    links = {
        "testing": "[testing kit](testing.md)",
        "strategies": "[strategies](strategies.md)",
        "verifiers": "[verifiers](verifiers.md)",
        "demo": "below",
    }
    yield "Modules: " + ", ".join(f"`decoders.{name}` ({links[name]})" for name in submodules) + ".\n"
    names = ("Trait", "merged_traits", "HostRows", "HostStep", "check_draft", "finish_all")
    yield from section("decoders.strategy", {n: getattr(strategy, n) for n in names})
    yield from section("decoders.text_memory", {n: getattr(text_memory, n) for n in text_memory.__all__})
    yield from section("decoders.tree", {"NO_PARENT": tree.NO_PARENT})
    yield from section(
        "decoders.report", {n: getattr(report, n) for n in ("Timings", "GrammarUse", "Stage", "BUSY", "mean_length")}
    )
    yield from section(surroundings.__name__, {n: getattr(surroundings, n) for n in surroundings.__all__})
    names = ("RuntimeSettings", "Table", "load_settings", "parse_assignments")
    yield from section("decoders.settings", {n: getattr(settings, n) for n in names})
    names = (
        "registry", "reset_registry", "Registry", "PluginInfo", "Entry", "resolve_strategy", "resolve_verifier", "resolve_backend",
        "resolve_grammar", "grammar_or_file",
    )  # fmt: skip
    yield from section("decoders.registry", {n: getattr(registry, n) for n in names})
    names = ("suggest", "shortened", "canonical", "installing", "amount", "keywords_named")
    yield from section(
        "decoders.errors", {n: getattr(errors, n) for n in names}, "The [errors](errors.md), and for messages:"
    )
    yield from section("decoders.strategies.merged", {"Merged": merged.Merged})
    yield from section("decoders.strategies.mtp", {"use_mtp_layers": mtp.use_mtp_layers})
    yield from section("decoders.verifiers", {"normalised": verifier.normalised})
    names = ("NgramTable", "train_table")
    yield from section("decoders.strategies.ngram_table", {n: getattr(ngram_table, n) for n in names})
    for name in BASES:
        module = importlib.import_module(f"decoders.strategies.{name}")
        yield from section(module.__name__, {n: getattr(module, n) for n in module.__all__}, body(module, name))
    yield from section("decoders.sampling", {n: getattr(sampling, n) for n in sampling.__all__})
    names = (
        "Drafter", "Expansion", "Advance", "DraftVocabulary", "OtherVocabulary", "ModulePasses", "Forced", "OpensDraft", "OpensModule",
    )  # fmt: skip
    yield from section("decoders.drafters", {n: getattr(drafters, n) for n in (*names, "cache_keyword")})
    names = ("config_value", "decoder_layers", "set_attention", "cache_of", "compiled_on_any_device", "stop_tokens")
    yield from section("decoders.common.transformers_compat", {n: getattr(transformers_compat, n) for n in names})
    yield from section("decoders.costs", {n: getattr(costs, n) for n in costs.__all__})
    names = (
        "tokenizer_of", "compiles_grammars_with", "check_seconds", "cost_curve", "graphs_compiled", "OwnDefaults", "TokenPenalties",
    )  # fmt: skip
    yield from section(
        "decoders.enabling", {n: getattr(enabling, n) for n in names}, body(enabling, "decoders.enabling")
    )
    yield from section(
        "decoders.prompts.reading", {n: getattr(reading, n) for n in ("Content", "read_prompts", "encode")}
    )
    names = ("ChatStyle", "CallStyle", "MessageStyle")
    yield from section("decoders.prompts.templates", {n: getattr(templates, n) for n in names})
    yield from section("decoders.scheduling", {n: getattr(scheduling, n) for n in scheduling.__all__})
    yield from section("decoders.demo", {n: getattr(demo, n) for n in demo.__all__})
    yield from section("decoders.bench.synthetic", {"Synthetic": synthetic.Synthetic})
    for module, names in HEADS.items():
        members = {name: getattr(importlib.import_module(module), name) for name in names}
        yield from section(module, members)
    names = (
        "Policy", "Spec", "Language", "Backend", "CompiledGrammar", "Matcher", "Tabulated", "Tables", "pack", "unpack", "mask_words",
        "Vocabulary", "Lark", "JsonSchema", "Compilation", "compiled", "ThinkingMarkers", "FunctionCalls", "CallFormat", "Call",
        "ParsedAnswer", "spec_of_library",
    )  # fmt: skip
    yield from section("decoders.constraints", {n: getattr(constraints, n) for n in names})
    yield from section(
        "decoders.constraints.library", {n: getattr(library, n) for n in ("names", "find", "read", "Ready")}
    )


def kit() -> Iterator[str]:
    yield "# Testing kit\n"
    yield paragraph(testing, "decoders.testing") + "\n"
    for name in testing.__all__:
        if name != "CHECKS":
            yield from entry("decoders.testing", name, getattr(testing, name))
    yield "## Checks\n"
    yield "`decoders.testing.CHECKS`, in this order:\n"
    yield "| check | what must hold |\n| --- | --- |"
    for check in testing.CHECKS:
        yield f"| `{check.__name__}` | {paragraph(check, check.__name__)} |"


def error_page() -> Iterator[str]:
    yield "# Errors\n"
    yield "All in `decoders.errors`. Every one is a `DecodersError`.\n"
    yield "| error | also a | raised for |\n| --- | --- | --- |"
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and cls.__module__ == errors.__name__:
            bases = ", ".join(f"`{b.__name__}`" for b in cls.__bases__ if b not in (errors.DecodersError, Exception))
            yield f"| `{name}` | {bases} | {paragraph(cls, name)} |"


def section(module: str, members: dict[str, Any], about: str = "") -> Iterator[str]:
    yield f"## {module}\n"
    if about:
        yield f"{about}\n"
    for name, value in members.items():
        yield from entry(module, name, value)


def entry(module: str, name: str, value: Any) -> Iterator[str]:
    """One public name: signature, docstring and, of a class, its public methods."""
    where = f"{module}.{name}"
    yield f"### {where}\n"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        yield f"{constant(where, value)}\n"
        return
    call = vars(value).get("__call__") if getattr(value, "_is_protocol", False) else None  # a function by its type
    yield f"```text\n{kind(value) if call is None else ''}{name}{signature(call or value)}\n```\n"
    yield body(value, where)
    if call is not None:
        yield body(call, where)
    if not inspect.isclass(value):
        return
    if issubclass(value, settings.Settings) and value.model_fields:
        yield from fields(value, None, variables=False)
    for method, raw in vars(value).items():
        if method.startswith("_") or (not isinstance(raw, property | staticmethod | classmethod) and not callable(raw)):
            continue
        if inspect.isclass(raw) or method in getattr(value, "__dataclass_fields__", {}):
            continue  # a field is described under Attributes, whatever its default
        function = raw.fget if isinstance(raw, property) else getattr(value, method)
        if not function.__doc__ and any(method in vars(base) for base in value.__mro__[1:]):
            continue  # documented where it is declared
        shown = "" if isinstance(raw, property) else signature(function)
        yield f"- `{method}{shown}`: {indented(function, f'{where}.{method}')}"
    yield ""


def indented(value: Any, where: str) -> str:
    """A docstring under an item of a list: its prose on one line, arguments and errors below."""
    prose, *rest = body(value, where).strip().split("\n\n```text\n")
    lines = [" ".join(prose.split()), *(f"\n  ```text\n{textwrap.indent(block, '  ')}" for block in rest)]
    return "\n".join(lines)


#: What a data member of a public list of names is; there is no docstring to read.
CONSTANTS = {
    "decoders.testing.ARCHITECTURES": "Names of the tiny models that the loop decodes: {}.",
    "decoders.testing.RECURRENT": "Names of the tiny models with recurrent layers that the loop decodes: {}.",
    "decoders.testing.UNSUPPORTED": "Names of the tiny models that it must refuse: {}.",
    "decoders.demo.MODELS": "Names of the demo models: {}.",
    "decoders.constraints.Policy": "How text that a grammar forces may be spelled: `full` in any tokens, `canonical` only in "
    "the tokenizer's own; see [grammars](../how-to/grammars.md).",
    "decoders.costs.CAUTION": "How many times the tokens that its time would bring a draft token has to be expected to bring: "
    "what seems to pay is, on average, what is overrated. 1.15.",
    "decoders.heads.network_files.CONFIG": "`config.json`, the file that every network's folder has.",
    "decoders.heads.network_files.Whole": 'Type of a field: a whole number; `6.0` is one, `"6"` and `true` are none.',
    "decoders.heads.network_files.Count": "Type of a field: a whole number of at least 1.",
    "decoders.heads.network_files.Positive": "Type of a field: a number greater than 0.",
    "decoders.heads.network_files.Stamp": "Type of a stamp: name, time and size of each file, `tuple[tuple[str, int, int], ...]`.",
    "decoders.strategies.draft_tree.GRADES": "Probabilities at which the grade of a draft token goes up by one: {}.",
    "decoders.strategies.draft_tree.GRADE_RATES": "The usual rate at which tokens of each grade of `grades_of` are right, for "
    "`Strategy.grade_rates`: {}.",
    "decoders.strategies.draft_tree.TREE_NODES": "Nodes of a tree, root excluded, where neither the user nor measured costs say: 24.",
    "decoders.strategies.draft_tree.TreeForm": 'Type of a setting: the form of a tree, `"none"` (a chain), `"static"` or `"dynamic"`.',
    "decoders.strategies.draft_tree.NodeBudget": "Type of a setting: the node budget of a tree, root excluded; None: what the measured "
    "costs of a step allow.",
    "decoders.strategies.draft_tree.Children": "Type of a setting: most continuations of a node, 1 to 32.",
    "decoders.strategies.draft_tree.Beam": "Type of a setting: nodes of a dynamic tree that are continued per level, 1 to 32.",
    "decoders.prompts.reading.Content": "The content of a prompt: a text to continue, or the messages so far, for a chat template: "
    "`str | list[dict[str, str]]`.",
    "decoders.report.surroundings.WAITING": "The share of its time from which on `busy_share` says that code waits. 0.25.",
    "decoders.report.BUSY": "Share of its time, from 0 to 1, that a call may wait for a processor; above it, `Report` warns. 0.5.",
    "decoders.tree.NO_PARENT": "-1, the parent of the root in the lists of parents that `Topology` takes.",
    "decoders.hookimpl": "Decorator that marks a function of a plugin as the implementation of the [hook](hooks.md) of its name.",
}


def constant(where: str, value: Any) -> str:
    if where not in CONSTANTS:
        raise UndocumentedError(f"{where} is data: say in CONSTANTS of {Path(__file__).name} what it is")
    return CONSTANTS[where].format(", ".join(f"`{n}`" for n in value) if isinstance(value, Iterable) else "")


def kind(value: Any) -> str:
    return "class " if inspect.isclass(value) else ""


def signature(value: Any) -> str:
    """The signature as written. What other libraries declare is left out: it differs between their versions."""
    if inspect.isclass(value) and issubclass(value, Exception | BaseModel | dict):
        return ""  # an error is not made by users; settings are shown as a table
    made = inspect.signature(value)
    if any(not isinstance(p.annotation, str) and p.annotation is not p.empty for p in made.parameters.values()):
        return "(…)"
    text, previous = [], None
    for p in made.parameters.values():
        if p.kind is p.KEYWORD_ONLY and previous not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            text.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        text.append(f"{star}{p.name}" + (f": {p.annotation}" if p.annotation is not p.empty else "") + default_of(p))
        previous = p.kind
        if p.kind is p.POSITIONAL_ONLY and p.name != "self":
            text.append("/")
    returns = (
        f" -> {made.return_annotation}"
        if isinstance(made.return_annotation, str) and not inspect.isclass(value)
        else ""
    )
    return f"({', '.join(t for t in text if t != 'self')}){returns}"


def default_of(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    shown = repr(parameter.default)
    return " = …" if shown.startswith("<") else f" = {shown}"


def body(value: Any, where: str) -> str:
    """Prose as prose; from the first heading on (attributes, arguments, errors) the docstring as it stands."""
    text = plain(doc(value, where))
    heading = re.search(r"(?m)^(Attributes|Args|Returns|Raises|Class attributes|Yields):", text)
    prose, rest = (text[: heading.start()], text[heading.start() :]) if heading else (text, "")
    return prose.rstrip() + "\n" + (f"\n```text\n{rest}\n```\n" if rest else "")


def paragraph(value: Any, where: str) -> str:
    return " ".join(plain(doc(value, where).split("\n\n", 1)[0]).split())


def doc(value: Any, where: str) -> str:
    own = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    if inspect.isclass(value) and own and own.startswith(f"{value.__name__}("):
        own = None  # dataclasses write their signature there
    if not own or not own.strip():
        raise UndocumentedError(f"{where} has no docstring")
    return inspect.cleandoc(own)


def plain(text: str) -> str:
    """Docstring markup as Markdown: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


# --- generate, strategies, settings, hooks ----------------------------------------------------------------------------

#: What each keyword of ours does.
OWN = {
    "strategy": "Name of a strategy ([list](strategies.md)), several names joined by `+`, a `Strategy` class or an instance of one. "
    "Without `strategy`, transformers' own `generate` runs.",
    "strategy_config": "Settings of the strategy, a dict. For `a+b`: a dict per strategy name, and `merged` for the joint tree.",
    "decoders_config": "Settings of the loop for this call, a dict: see [settings](settings.md#the-loop).",
    "seed": "Seed of the sampling noise. The same seed gives the same tokens under every exact strategy.",
    "generator": "A `torch.Generator` that the seed is drawn from. Not together with `seed`.",
    "verifier": "The rule that decides which draft tokens are accepted: a name ([list](verifiers.md)), a class or an object. "
    "Default `coupled`.",
    "verifier_config": "Settings of the rule, a dict: see [verifiers](verifiers.md).",
    "grammar": "Grammar that constrains the output: a name of the library, `decoders.json_schema`, `regex`, `grammar`, `choice`, "
    "`after` or `tagged`, a type, a term of outlines, or a list with one for each prompt; see [grammars](../how-to/grammars.md). A "
    "name or a JSON schema may stand in the generation config.",
    "thinking": "Thinking budget: maximum number of reasoning tokens, after which the end marker is written; or a dict with "
    "`tokens`, `begin` and `end`, where the tokenizer has no known markers ([how](../how-to/grammars.md#a-budget-for-thoughts)). It "
    "may stand in the generation config.",
}


def generate() -> Iterator[str]:
    yield "# Arguments of generate\n"
    yield "## Ours\n"
    yield "For an enabled model. All but `strategy` need a strategy.\n"
    yield "| argument | meaning |\n| --- | --- |"
    for name in arguments.OWN:
        if name not in OWN:
            raise UndocumentedError(f"generate's {name}= is not described in OWN of {Path(__file__).name}")
        yield f"| `{name}` | {OWN[name]} |"
    yield "\n## Refused together with a strategy\n"
    yield "Each raises `UnsupportedError` before anything runs, in the call and in the generation config equivalent.\n"
    yield "| argument | what to do instead |\n| --- | --- |"
    for name, (_, advice) in arguments.REFUSED.items():
        yield f"| `{name}` | {advice} |"
    yield "\nValues that change nothing, such as `num_beams=1` or `use_cache=True`, are accepted. So is every other argument of"
    yield "transformers' `generate`, with the meaning that it has there; an argument of the model's forward pass is refused.\n"
    yield "## Translated\n"
    yield "In the call and in the generation config. A setting that is also given in our own words must agree.\n"
    yield "| argument | strategies | setting |\n| --- | --- | --- |"
    for name in arguments.HINTS:
        takers = [cls for cls in strategies.BUILT_IN if name in cls.hints]
        yield f"| `{name}` | {', '.join(f'`{cls.name}`' for cls in takers)} | {', '.join(f'`{cls.hints[name]}`' for cls in takers)} |"
    for name, (setting, _) in arguments.TRANSLATED.items():
        yield f"| `{name}` | all | `decoders_config={{{setting!r}: …}}` |"
    yield "\nBeside a strategy that has no such setting, a hint how to draft is refused.\n"
    yield "## Inside the step\n"
    yield (
        "These run vectorised over all nodes, inside the compiled step: "
        + ", ".join(f"`{name}`" for name in OPERATIONS)
        + ". If the call needs any other logits processor, all of them run on the host along the path that is taken: slower,"
    )
    yield "with the same result. See [how the loop works](../explanation/how-the-loop-works.md#processors-on-the-host)."


def strategy_page() -> Iterator[str]:
    yield "# Strategies\n"
    yield "The built-in ones. `decoders strategies` also lists those of installed plugins.\n"
    for cls in [*strategies.BUILT_IN, merged.Merged]:
        yield f"## {cls.name if cls is not merged.Merged else 'a+b'}\n"
        if cls is not merged.Merged and not cls.summary:
            raise UndocumentedError(f"{cls.__name__}.summary is empty")
        yield body(cls, cls.__name__)
        needs = ", needs `assistant_model`" if cls.needs_assistant else ""
        needs += ", needs `grammar`" if cls.needs_grammar else ""
        if cls is merged.Merged:
            yield "Exact if all its parts are."
        else:
            yield f"Class `decoders.strategies.{cls.__name__}`; {'exact' if cls.exact else 'lossy'}{needs}."
        if not cls.settings_class.model_fields:
            yield "It has no settings.\n"
            continue
        yield f"Settings (`{cls.settings_class.__name__}`):\n"
        yield from fields(cls.settings_class, cls.name)
        if cls is merged.Merged:
            yield 'In a call: `strategy_config={"merged": {"nodes": 32}}`, beside the settings of the parts.\n'


def verifier_page() -> Iterator[str]:
    yield "# Verifiers\n"
    yield "The built-in ones. `decoders verifiers` also lists those of installed plugins;"
    yield "[writing a verifier](../plugins/writing-a-verifier.md) says how to make one.\n"
    yield "| name | what it does | exact | trees |\n| --- | --- | --- | --- |"
    for cls in verifiers.BUILT_IN:
        if not cls.summary:
            raise UndocumentedError(f"{cls.__name__}.summary is empty")
        exact, trees = ("yes" if flag else "no" for flag in (cls.exact, cls.trees))
        yield f"| [`{cls.name}`](#{cls.name}) | {cls.summary} | {exact} | {trees} |"
    yield "\nA verifier without trees judges chains only. Settings are given as `verifier_config`.\n"
    for cls in verifiers.BUILT_IN:
        yield f"## {cls.name}\n"
        yield body(cls, cls.__name__)
        yield f"Class `decoders.verifiers.{cls.__name__}`.\n"
        if cls.settings_class.model_fields:
            yield f"Settings (`{cls.settings_class.__name__}`):\n"
            yield from fields(cls.settings_class, None, variables=False)


def settings_page() -> Iterator[str]:
    yield "# Settings\n"
    yield body(settings, "decoders.settings")
    yield "Each setting is taken from the first place that has it:\n"
    yield "1. the call (`strategy=`, `strategy_config=`, `decoders_config=`);"
    yield "2. the generation config (`strategy`, `strategy_config`);"
    yield "3. `decoders.enable`;"
    yield "4. the environment;"
    yield "5. the file: the one that `DECODERS_CONFIG` names, else `decoders.toml`, else `pyproject.toml`, in the working directory;"
    yield "6. its default.\n"
    yield "## The loop\n"
    yield body(settings.RuntimeSettings, "RuntimeSettings")
    yield from fields(settings.RuntimeSettings, None)
    yield "## Strategies\n"
    for cls in [*strategies.BUILT_IN, merged.Merged]:
        if cls.settings_class.model_fields:
            yield f"### {cls.name}\n"
            yield from fields(cls.settings_class, cls.name)
    yield "## Variables that are no settings\n"
    yield "| variable | meaning |\n| --- | --- |"
    described = {
        "config": "Path of the configuration file.",
        "plugins_block": "Plugins not to load: entry-point or distribution names, comma-separated.",
        "plugins_allow": "If set, the only plugins to load.",
        "plugins_strict": "`1`: a plugin that fails to load, or a name claimed twice, is an error.",
        "cpu_kernels": "Variant of the CPU kernels (`decoders doctor` shows which one is in use), or `off`, to use PyTorch's.",
        "api_key": "API keys of `decoders serve`, separated by spaces; clients must send one of them.",
    }
    for name in settings.NOT_SETTINGS:
        if name not in described:
            raise UndocumentedError(f"DECODERS_{name.upper()} is not described in {Path(__file__).name}")
        yield f"| `DECODERS_{name.upper()}` | {described[name]} |"


def fields(cls: type[settings.Settings], section: str | None, variables: bool = True) -> Iterator[str]:
    """A table of a settings class; every field needs a description."""
    yield f"| setting | default | allowed | meaning |{' variable |' if variables else ''}"
    yield "| --- | --- | --- | --- |" + (" --- |" if variables else "")
    schema = cls.model_json_schema()["properties"]
    for name, field in cls.model_fields.items():
        if not field.description:
            raise UndocumentedError(f"{cls.__name__}.{name} has no description")
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        row = f"| `{name}` | {default} | {allowed(schema[name])} | {field.description} |"
        yield row + (f" `{settings.variable_of(section, name)}` |" if variables else "")
    yield ""


def allowed(schema: dict[str, Any]) -> str:
    """Type and bounds out of a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low} to {high}" if None not in (low, high) else f" ≥ {low}" if low is not None else ""
    return {"null": "none"}.get(schema.get("type", "any"), schema.get("type", "any")) + bounds


def hooks() -> Iterator[str]:
    yield "# Hooks\n"
    yield body(hookspecs, "decoders.hookspecs")
    for name, value in vars(hookspecs).items():
        if hasattr(value, f"{hookspecs.PROJECT}_spec"):
            yield f"## {name}\n"
            yield f"```text\n{name}{signature(value)}\n```\n"
            yield body(value, name)


# --- command line -----------------------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield f"{cli.app.info.help}\n"
    yield "`decoders --debug COMMAND …` shows the traceback of an error, `decoders --version` the version. Every command"
    yield "has `--help`. Expected errors end with exit code 2.\n"
    yield from commands(cli.app, "decoders")


def commands(app: Any, path: str) -> Iterator[str]:
    """Read off the functions themselves, so that the version of typer does not show."""
    for command in app.registered_commands:
        yield from command_entry(
            command.callback, f"{path} {command.name or command.callback.__name__.replace('_', '-')}"
        )
    for group in app.registered_groups:
        inner = f"{path} {group.typer_instance.info.name or group.name}"
        if group.typer_instance.info.invoke_without_command is True:  # a command by itself, too
            yield from command_entry(group.typer_instance.registered_callback.callback, inner)
        yield from commands(group.typer_instance, inner)


def command_entry(function: Callable[..., Any], path: str) -> Iterator[str]:
    """A command with its arguments."""
    yield f"## {path}\n"
    yield body(function, function.__name__)
    yield "| argument | default | meaning |\n| --- | --- | --- |"
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            continue
        annotated, info = typing.get_args(hints[name])[:2]
        if not info.help:
            raise UndocumentedError(f"{path}: {name} has no help")
        default = parameter.default
        shown = "" if default is parameter.empty or default is None or default is False else f"`{default}`"
        yield f"| {spelt(name, annotated, info)} | {shown} | {info.help} |"
    yield ""


def spelt(name: str, annotated: Any, info: Any) -> str:
    """How the argument is written: ``PROMPT``, ``--top-k INTEGER``, ``-s, --strategy TEXT``."""
    if type(info).__name__ == "ArgumentInfo":
        return f"`{name.upper()}`"
    flag = name.replace("_", "-")
    # In an annotation the first name that is declared arrives as the default.
    declared = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
    names = declared or [f"--{flag}/--no-{flag}" if annotated is bool else f"--{flag}"]
    value = "" if annotated is bool else f" {info.metavar or value_name(annotated)}"
    return f"`{', '.join(sorted(names, key=len))}{value}`"


def value_name(annotated: Any) -> str:
    inner = [a for a in typing.get_args(annotated) if a is not type(None)] or [annotated]
    one = (typing.get_args(inner[0]) or inner)[0]
    return {"int": "INTEGER", "float": "NUMBER", "Path": "PATH"}.get(getattr(one, "__name__", ""), "TEXT")


def builtin_listing() -> str:
    """What the registry has of this package itself, as the command line reads it."""
    own = {
        kind: [item for item in catalogue.taken(kind) if item["provider"] == "hf-decoders"] for kind in catalogue.KINDS
    }
    return catalogue.serialized({"state": ""} | own)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    if len(sys.argv) == 1:
        catalogue.BUILTIN_FILE.write_text(builtin_listing(), encoding="utf-8")


if __name__ == "__main__":
    main()
