"""Formats of calls: found in a template, written under constraint, and read back by the rules of the format itself."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

pytest.importorskip("fastapi")

from decoders.constraints import (
    FORMATS,
    Called,
    CallFormat,
    CallSpec,
    LLGuidance,
    Thinking,
    Vocabulary,
    compiled,
    unpack,
)
from decoders.constraints.call_arguments import Progress
from decoders.constraints.schemas.raw_text import Parameters
from decoders.constraints.specs import JsonSchema
from decoders.errors import GrammarError, UnknownNameError
from decoders.prompts.templates import CallStyle, format_named
from decoders.server.bodies import Message, Tool
from decoders.server.grammars import Calling
from decoders.server.prompts import Conversations, _without_system
from decoders.server.reasoning import Reasoning
from decoders.server.refusals import Refusal

from ..turns import slow_but
from .test_chat import ASKED, ROUTE, post


def template(calls: str, ask: str = "<assistant>") -> str:
    """Messages in plain marks, and the calls of an assistant's message as `calls` has them."""
    answer = "{% if m.tool_calls %}" + ask + calls + "</s>{% else %}<{{ m.role }}>{{ m.content }}</s>{% endif %}"
    tools = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    return (
        tools + "{% for m in messages %}" + answer + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"
    )


def each(text: str, between: str = "") -> str:
    """`text` for each call, which is called c."""
    joint = "{% if not loop.last %}" + between + "{% endif %}"
    return "{% for call in m.tool_calls %}{% set c = call.function %}" + text + joint + "{% endfor %}"


ARGUMENTS = "{{ c.arguments | tojson }}"
JSON = '{"name": "{{ c.name }}", "arguments": ' + ARGUMENTS + "}"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
BEGIN, ONE, SEP, CLOSE, END = DEEPSEEK
NAME, NEW_LINE = "{{ c.name }}", "{{ '\\n' }}"
GLM = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


def parameters(opening: str, middle: str, closing: str) -> str:
    """Each parameter between marks, strings as they are."""
    pair = "{{ k }}" + middle + "{{ v if v is string else v | tojson }}"
    return "{% for k, v in c.arguments.items() %}" + opening + pair + closing + "{% endfor %}"


QUOTED = (
    '{% for k, v in c.arguments | dictsort %}{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}"
)
V3 = ONE + "{{ call.type }}" + SEP + "{{ c.name }}\n```json\n{{ '' + c.arguments }}\n```" + CLOSE
#: Of each format: the calls in a template as it is published, marks that are tokens, and its own rules, as an expression of one call.
PUBLISHED = {
    "hermes": (each("<tool_call>\n" + JSON + "\n</tool_call>", "\n"), ["<tool_call>", "</tool_call>"],
               r'\n?<tool_call>\n\{"name": ?"(?P<n>\w+)", ?"arguments": ?(?P<a>\{.*?\})\}\n</tool_call>'),
    "qwen3-coder": (
        each("<tool_call>\n<function=" + NAME + ">\n" + parameters("<parameter=", ">\n", "\n</parameter>\n")
             + "</function>\n</tool_call>", "\n"),
        ["<tool_call>", "</tool_call>"], r"\n?<tool_call>\n<function=(?P<n>\w+)>\n(?P<a>.*?)</function>\n</tool_call>"),
    "seed-oss": (
        each("<seed:tool_call>\n<function=" + NAME + ">\n" + parameters("<parameter=", ">", "</parameter>\n")
             + "</function>\n</seed:tool_call>", "\n"),
        ["<seed:tool_call>", "</seed:tool_call>"],
        r"\n?<seed:tool_call>\n<function=(?P<n>\w+)>\n(?P<a>.*?)</function>\n</seed:tool_call>"),
    "glm-4.5": (
        NEW_LINE + each("<tool_call>" + NAME + "\n" + parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
                        + "</tool_call>", NEW_LINE),
        GLM, r"\n?<tool_call>(?P<n>\w+)\n(?P<a>.*?)</tool_call>"),
    "glm-4.7": (
        each("<tool_call>" + NAME + parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>"),
        GLM, r"<tool_call>(?P<n>[^<]+)(?P<a>.*?)</tool_call>"),
    "minimax-m2": (
        NEW_LINE + "<minimax:tool_call>\n"
        + each('<invoke name="' + NAME + '">\n' + parameters('<parameter name="', '">', "</parameter>\n") + "</invoke>\n")
        + "</minimax:tool_call>",
        ["<minimax:tool_call>", "</minimax:tool_call>"],
        r'(?:<minimax:tool_call>)?\n<invoke name="(?P<n>\w+)">\n(?P<a>.*?)</invoke>(?:\n</minimax:tool_call>)?'),
    "gemma4": (each("<|tool_call>call:{{ c.name }}{{ '{' }}" + QUOTED + "}<tool_call|>"), ["<|tool_call>", "<tool_call|>", '<|"|>'],
               r"<\|tool_call>call:(?P<n>\w+)(?P<a>\{.*?\})<tool_call\|>"),
    "mistral": ("[TOOL_CALLS] [" + each(JSON[:-1] + ', "id": "{{ call.id }}"}', ", ") + "]", ["[TOOL_CALLS]"],
                r'(?:\[TOOL_CALLS\] \[)?\{"name": ?"(?P<n>\w+)", ?"arguments": ?(?P<a>\{.*?\})\}(?:, |\])'),
    "mistral-tekken": ("[TOOL_CALLS][" + each(JSON, ", ") + "]", ["[TOOL_CALLS]"],
                       r'(?:\[TOOL_CALLS\]\[)?\{"name": ?"(?P<n>\w+)", ?"arguments": ?(?P<a>\{.*?\})\}(?:, |\])'),
    "mistral-args": (each("[TOOL_CALLS]{{ c.name }}[ARGS]" + ARGUMENTS), ["[TOOL_CALLS]", "[ARGS]"],
                     r"\[TOOL_CALLS\](?P<n>\w+)\[ARGS\](?P<a>\{.*?\})(?=$|\[)"),
    "mistral-ids": (each("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ call.id }}[ARGS]" + ARGUMENTS), ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
                    r"\[TOOL_CALLS\](?P<n>\w+)\[CALL_ID\](?P<id>[a-zA-Z0-9]{9})\[ARGS\](?P<a>\{.*?\})(?=$|\[)"),
    "kimi-k2": ("<|tool_calls_section_begin|>"
                + each("<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>")
                + "<|tool_calls_section_end|>",
                ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                 "<|tool_calls_section_end|>"],
                r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>(?P<id>functions\.(?P<n>\w+):\d+)"
                r"<\|tool_call_argument_begin\|>(?P<a>\{.*?\})<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?"),
    "deepseek-v3": (BEGIN + each(V3, "\n") + END, [*DEEPSEEK],
                    rf"(?:{BEGIN}|\n){ONE}function{SEP}(?P<n>\w+)\n```json\n(?P<a>\{{.*?\}})\n```{CLOSE}(?:{END})?"),
    "deepseek-v3.1": (BEGIN + each(ONE + "{{ c.name }}" + SEP + ARGUMENTS + CLOSE) + END, [*DEEPSEEK],
                      rf"(?:{BEGIN})?{ONE}(?P<n>\w+){SEP}(?P<a>\{{.*?\}}){CLOSE}(?:{END})?"),
    "harmony": (each(" to=functions.{{ c.name }}<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>"),
                ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
                r"(?:<\|end\|><\|start\|>assistant)?<\|channel\|>commentary to=functions\.(?P<n>\w+)(?: <\|constrain\|>json)?"
                r"<\|message\|>"
                r"(?P<a>\{.*?\})<\|call\|>"),
    "llama3": (each('{"name": "{{ c.name }}", "parameters": ' + ARGUMENTS + "}"), [],
               r'\{"name": ?"(?P<n>\w+)", ?"parameters": ?(?P<a>\{.*?\})\}'),
}  # fmt: skip
#: A parameter and its value, of those that have each on its own.
PARAMETER = {
    "qwen3-coder": r"<parameter=(.*?)>\n(.*?)\n</parameter>\n",
    "seed-oss": r"<parameter=(.*?)>(.*?)</parameter>\n",
    "glm-4.5": r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>\n",
    "glm-4.7": r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>",
    "minimax-m2": r'<parameter name="(.*?)">(.*?)</parameter>\n',
}


def arguments_of(name: str, text: str) -> Any:
    """Arguments by the rules of the format, with the types of :data:`PARAMETERS`."""
    if name in PARAMETER:
        pairs = re.findall(PARAMETER[name], text, re.DOTALL)
        return {key: value if key == "b" or value in ("</s>", "}") else json.loads(value) for key, value in pairs}
    if name == "gemma4":
        text = re.sub(r'<\|"\|>(.*?)<\|"\|>', lambda string: json.dumps(string[1]), text, flags=re.DOTALL)
        text = re.sub(r"(?<=[{,])(\w+):", r'"\1": ', text)
    return json.loads(text)


PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"enum": [1, "</s>", "}"]}, "b": {"enum": ["1", "x\n\"<b>"]},
        "c": {"enum": [["a<", {"k": "\\"}], True]},
    },
    "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": n, "parameters": PARAMETERS}})
    for n in ("walk", "rest")
]


@pytest.fixture(scope="module")
def tokenizer_of(byte_tokenizer: Callable[..., Any]) -> Callable[[list[str], bool], Any]:
    """Bytes, and marks that are tokens, special or not."""

    def make(marks: list[str], special: bool) -> Any:
        fast = byte_tokenizer(["<pad>", "</s>", "<unk>"], unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
        fast.add_tokens(marks, special_tokens=special)
        return fast

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_format_is_found_in_a_template(name: str, tokenizer_of: Callable[..., Any]) -> None:
    calls, marks, _ = PUBLISHED[name]
    ask = "<|start|>assistant" if name == "harmony" else "<assistant>"
    style = Conversations(tokenizer_of(marks, True), template(calls, ask)).style
    assert style.reads_calls and style.reads_tools and style.special == bool(marks)
    found = style.format
    if name == "llama3":  # as any bare JSON, it is read from the template
        assert (found.opening, found.middle, found.closing) == ('{"name": "', '", "parameters": ', "}")
    else:
        assert found == format_named(name)
    assert style.as_text == (name == "deepseek-v3")


@pytest.mark.parametrize("name", ["hermes", "deepseek-v3", "kimi-k2", "llama3"])
def test_a_format_is_found_in_the_template_for_functions(name: str, tokenizer_of: Callable[..., Any]) -> None:
    """Of Hermes, Command R and others: a template with functions beside the default one, which leaves calls out."""
    calls, marks, _ = PUBLISHED[name]
    listing = "{% for tool in tools %}{{ tool }}{% endfor %}Say <tool_call>probe_function\n<arg_key>or [TOOL_CALLS]. "
    tokenizer = tokenizer_of(marks, True)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": listing + template(calls)}
    conversations = Conversations(tokenizer)
    style = conversations.style
    assert style.reads_calls and style.reads_tools and (name == "llama3" or style.format == format_named(name))
    call = {"id": "functions.walk:0", "function": {"name": "walk", "arguments": '{"a": 1}'}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    text = conversations.prompt([Message(role="user", content="go"), message], TOOLS, {})
    assert style.format.trigger in text and re.search(r'walk.*\{"a": 1\}', text, re.DOTALL)


def test_a_format_is_found_in_a_template_that_transformers_refuses_calls_with(tokenizer_of: Callable[..., Any]) -> None:
    calls, marks, _ = PUBLISHED["kimi-k2"]
    source = template("{% set ids = [] %}{% set _ = ids.append(1) %}" + calls)  # the sandbox forbids to change lists
    style = Conversations(tokenizer_of(marks, True), source).style
    assert style.format.name == "kimi-k2" and not style.reads_calls


def test_a_format_is_named(tokenizer_of: Callable[..., Any]) -> None:
    assert Conversations(tokenizer_of([], True), None, None, "harmony").style.format.name == "harmony"
    with pytest.raises(UnknownNameError, match="Unknown format of calls 'hermse'. Did you mean 'hermes'"):
        format_named("hermse")
    assert {*PUBLISHED} | {"json"} == {each.name for each in FORMATS}


def grammar_of(spec: Any, tokenizer: Any) -> Any:
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer), [1])
    return spec.compiled(vocabulary, lambda part: compiled(part, vocabulary, LLGuidance()).grammar), vocabulary


def shown(tokens: list[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.removesuffix("</s>")


def drawn(matcher: Any, size: int, seed: int, tokens: list[int]) -> list[int]:
    """A text at random behind `tokens`, with the tokens that are forced."""
    mask, choose = torch.zeros((size + 31) // 32, dtype=torch.int32), random.Random(seed)
    tokens = [*tokens]
    while len(tokens) < 900 and (not tokens or tokens[-1] != 1):
        matcher.fill_mask(mask)
        allowed = unpack(mask, size).nonzero()[:, 0].tolist()
        forced = matcher.forced_tokens(1)
        token = choose.choice(allowed)
        if forced:
            assert allowed == forced
        if 1 in allowed and len(tokens) > 100:
            token = 1
        assert matcher.advance([token]) == 1
        tokens.append(token)
    return tokens


@pytest.mark.in_turns
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_all_arguments_of_a_schema_can_be_written(name: str, special: bool, tokenizer_of: Callable[..., Any]) -> None:
    marks, format = PUBLISHED[name][1], format_named(name)
    tokenizer = tokenizer_of(marks if special or name != "harmony" else [], special)
    calling = Calling(tuple(TOOLS), CallStyle(format), True, True)
    grammar, _ = grammar_of(calling.spec, tokenizer)
    allowed = [[*each["enum"], ...] for each in PARAMETERS["properties"].values()]  # type: ignore[attr-defined]
    for values in itertools.product(*allowed):
        arguments = {key: value for key, value in zip("abc", values, strict=True) if value is not ...}
        text = format.written([("walk", json.dumps(arguments))])
        # The end of a text is no token within a string.
        pieces = (piece for part in re.split("(</s>)", text) for piece in (part if part == "</s>" else [part]))
        tokens = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False).input_ids]
        matcher = grammar.start()
        assert (matcher.advance(tokens) == len(tokens)) == ("a" in arguments), text
        (call,) = calling.read(text, ended=True).calls
        assert json.loads(call.arguments) == arguments and call.complete


@pytest.mark.in_turns
@pytest.mark.parametrize(("special", "several"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_that_are_written_are_read_by_the_rules_of_the_format(
    name: str, special: bool, several: bool, tokenizer_of: Callable[..., Any]
) -> None:
    _, marks, rules = PUBLISHED[name]
    if name == "harmony" and not special:
        marks = []
    tokenizer, format = tokenizer_of(marks, special), format_named(name)
    counts = set()
    for required in (True, False):
        calling = Calling(tuple(TOOLS), CallStyle(format), required, several)
        grammar, vocabulary = grammar_of(calling.spec, tokenizer)
        for seed in range(4):
            matcher, before = grammar.start(), list[int]()
            if not required and format.trigger:
                text = f"Well. {format.trigger}"
                before = tokenizer(text, add_special_tokens=False).input_ids
                assert matcher.advance(before) == len(before)
            elif name == "harmony":
                before = tokenizer(format.opening, add_special_tokens=False).input_ids
                assert matcher.advance(before) == len(before)
            elif not required:
                before = tokenizer('{"name": ', add_special_tokens=False).input_ids
                matcher.advance(before)
            text = shown(drawn(matcher, len(vocabulary), seed, before), tokenizer)
            written = calling.read(text, ended=True)
            matches = [*re.finditer(rules, text.removeprefix("Well. "), re.DOTALL)]
            own = [(found["n"], arguments_of(name, found["a"])) for found in matches]
            assert own and "".join(found[0] for found in matches) == text.removeprefix("Well. "), text
            assert [(call.name, json.loads(call.arguments)) for call in written.calls] == own
            assert [call.id for call in written.calls] == [found.groupdict().get("id") for found in matches]
            judge = Draft202012Validator(PARAMETERS)
            assert all(judge.is_valid(arguments) for _, arguments in own)
            assert written.text == ("Well." if text.startswith("Well.") else "")
            counts.add(len(own))
            grown, known = (
                [calling.read(text[:end], ended=False) for end in range(len(text) + 1)],
                dict[int, Progress](),
            )
            assert grown == [calling.read(text[:end], False, known) for end in range(len(text) + 1)]
            for one, two in itertools.pairwise(grown):
                assert two.text.startswith(one.text) and len(two.calls) >= len(one.calls)
                assert all(b.arguments.startswith(a.arguments) for a, b in zip(one.calls, two.calls, strict=False))
    assert (max(counts) > 1) == (several and format.between is not None)


@pytest.mark.parametrize(
    "format", [format for format in FORMATS if format.notation is not None], ids=lambda each: each.name
)
def test_values_that_are_complete_are_not_read_again(format: CallFormat) -> None:
    arguments = {f"a{n}": [n, {"b": ["c", True]}] for n in range(9)} | {"a": "last"}
    text, functions, known = format.written([("f", json.dumps(arguments))]), {"f": None}, dict[int, Progress]()
    whole = format.read(text, functions)
    format.read(text[: text.index("last")], functions, False, known)
    ((begin, progress),) = known.items()
    begin += len(format.notation.opening if isinstance(format.notation, Parameters) else "{")
    assert progress.place > text.index("a8")
    hidden = text[:begin] + "?" * (progress.place - begin) + text[progress.place :]
    assert format.read(hidden, functions, True, known) == whole


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_white_space_is_read_in_one_pass(format: CallFormat) -> None:
    for part in (format.opening, f"{format.opening}f", f"{format.opening}f{format.middle}"):
        # The square of this takes minutes.
        assert not format.read(f"{format.begin}{part}{' ' * 200_000}", {"f": None}, ended=False).calls


def test_harmony_keeps_thoughts_calls_and_answers_apart(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of(PUBLISHED["harmony"][1], True)
    markers, format = Conversations(tokenizer, None, None, "harmony").thinking, format_named("harmony")
    assert markers is not None
    reasoning = Reasoning(markers, None)
    thought, message = "<|channel|>analysis<|message|>so to=functions.x", "<|end|><|start|>assistant"
    preamble = f"{message}<|channel|>commentary<|message|>One moment."
    call = f'{message}<|channel|>commentary to=functions.walk <|constrain|>json<|message|>{{"a": 1}}<|call|>'
    calling = Calling(tuple(TOOLS), CallStyle(format), False, True)
    parts = reasoning.parts(thought + preamble + call, True)
    assert [(part.kind, part.text) for part in parts[:2]] == [("thought", "so to=functions.x"), ("text", "One moment.")]
    written = calling.read(parts[2].text, True)
    assert parts[2].kind == "answer" and (written.text, [call.name for call in written.calls]) == ("", ["walk"])
    parts = reasoning.parts(f"{thought}{message}<|channel|>final<|message|>yes<|return|>", True)
    assert [(part.kind, part.text) for part in parts] == [("thought", "so to=functions.x"), ("text", "yes")]
    # Under constraint: a thought is free, its budget ends it, and where a call is required there is no answer.
    for required, budget in ((True, None), (False, None), (True, 20), (False, 20)):
        calling = Calling(tuple(TOOLS), CallStyle(format), required, True)
        thinking = Thinking(budget, markers.begin, markers.end)
        vocabulary = Vocabulary.of(tokenizer, len(tokenizer), [1])
        spec: Any = thinking.around(calling.spec, tokenizer("a").input_ids, vocabulary, tokenizer)
        grammar, _ = grammar_of(spec, tokenizer)
        matcher, ids = (
            grammar.start(),
            tokenizer("<|channel|>analysis<|message|>so I walk, ", add_special_tokens=False).input_ids,
        )
        assert matcher.advance(ids) == (len(ids) if budget is None else budget)
        if budget is not None:
            forced = shown(matcher.forced_tokens(99), tokenizer)
            ends = "<|channel|>commentary to=functions." if required else "<|channel|>final<|message|>"
            assert forced == f"<|end|><|start|>assistant{ends}"
            continue
        final = tokenizer("<|end|><|start|>assistant<|channel|>final", add_special_tokens=False).input_ids
        assert (matcher.advance(final) == len(final)) == (not required)
        if required:  # the last letter of what may not be written ends the message instead
            assert shown([matcher.replacements()[final[-1]]], tokenizer) == "<|end|>"
            matcher.rollback(len("fina"))
            assert shown([matcher.automaton.next_token(matcher.place.phase, matcher.place.node)], tokenizer) == "c"


@pytest.mark.parametrize("name", [format.name for format in FORMATS if format.notation is not None])
def test_what_no_grammar_expresses_is_judged_in_every_notation(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"items": {"type": "string"}, "type": "array", "uniqueItems": True}},
    }
    format = format_named(name)

    def language(strict: bool | None) -> Any:
        return CallSpec((Called.of("once", schema, strict),), format).language()

    for strict in (None, False):
        own = language(strict)
        assert "once: $.properties.p: uniqueItems is left to the validation of the finished text." in own.warnings
        for values in (["a", "b"], ["a", "a"]):
            text = format.written([("once", json.dumps({"p": values}))]).removeprefix(f"{format.begin}{format.mark}")
            text = text.removesuffix(f"{format.closing}{format.end}")
            if values == ["a", "b"]:
                own.whole(text)
            else:
                with pytest.raises(GrammarError, match=r"the arguments of once: .*breaks uniqueItems"):
                    own.whole(text)
    with pytest.raises(GrammarError, match="tools: once: .*uniqueItems"):
        language(True)


def test_system_messages_go_before_the_parts_of_the_next_user_message() -> None:
    system, parts = {"role": "system", "content": "Be brief."}, [{"type": "image"}]
    user = {"role": "user", "content": parts}
    merged = user | {"content": [{"type": "text", "text": "Be brief.\n\n"}, *parts]}
    assert _without_system([system, user, user]) == [merged, user]


def test_an_answer_is_judged_as_calls_or_as_text() -> None:
    items = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    format = format_named("hermes")
    spec = CallSpec(
        (Called.of("once", {"type": "object"}, None),), format, alone=False, text=JsonSchema(items, strict=False)
    )
    whole = spec.language().whole
    assert whole is not None
    whole(format.written([("once", "{}")]))
    whole('["a", "b"]')
    with pytest.raises(GrammarError, match="uniqueItems"):
        whole('["a", "a"]')


DEEP = '{"a": ' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*itertools.product(["hermes", "qwen3-coder", "gemma4"], ["[1]", '"x"', "null", "1", [1]]), ("gemma4", DEEP)],
)
def test_calls_of_the_history_have_an_object(name: str, arguments: Any, tokenizer_of: Callable[..., Any]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    conversations = Conversations(tokenizer_of([], True), template, None, name)
    call = {"function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    with pytest.raises(Refusal, match=r"messages\.0\.tool_calls.*: .*(an object|nested too deeply)"):
        conversations.prompt([message], [], {})


@pytest.mark.parametrize("name", slow_but(["harmony"], ["harmony", "qwen3-coder", "deepseek-v3", "gemma4"]))
def test_a_server_speaks_a_format(name: str, served: Any, service_of: Any, stream: Any, tokenizer_of: Any) -> None:
    calls, marks, _ = PUBLISHED[name]
    harmony = name == "harmony"
    tokenizer = tokenizer_of(marks, name in ("harmony", "gemma4"))
    ask = "<|start|>assistant<|channel|>analysis<|message|>" if harmony else "<assistant><think>"
    markers = None if harmony else ("<think>", "</think>")
    service = service_of(chat_template=template(calls, ask), tokenizer=tokenizer, thinking=markers)
    body: dict[str, Any] = {
        "tools": [tool.model_dump() for tool in TOOLS], "max_tokens": 190, "thinking_budget": 4, "temperature": 1,
        "parallel_tool_calls": False,
    }  # fmt: skip
    with served(service) as client:
        for choice, names in {
            "required": {"walk", "rest"},
            "rest": {"rest"},
            "allowed": {"walk"},
        }.items():
            asked: Any = {"type": "function", "function": {"name": choice}} if choice == "rest" else choice
            if choice == "allowed":
                tool = {"type": "function", "function": {"name": "walk"}}
                asked = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool]}}
            (whole,) = post(client, **body, tool_choice=asked, seed=2)["choices"]
            message = whole["message"]
            assert message["reasoning_content"] and not message["content"]
            assert {call["function"]["name"] for call in message["tool_calls"]} <= names
            assert all(json.loads(call["function"]["arguments"])["a"] for call in message["tool_calls"])
            assert whole["finish_reason"] == ("stop" if choice == "rest" else "tool_calls")
        parts = [
            c for chunk in stream(client, ROUTE, **ASKED, **body, tool_choice=asked, seed=2) for c in chunk["choices"]
        ]
        deltas = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        texts = [
            "".join(d["function"]["arguments"] for d in deltas if d["index"] == n)
            for n in range(len(message["tool_calls"]))
        ]
        assert texts == [call["function"]["arguments"] for call in message["tool_calls"]] and len(deltas) > 2 * len(
            texts
        )
        thoughts = [part["delta"]["reasoning_content"] for part in parts if "reasoning_content" in part["delta"]]
        assert "".join(thoughts) == message["reasoning_content"]
        for choice in ("auto", "none"):
            (whole,) = post(client, **body, tool_choice=choice, seed=2)["choices"]
            assert whole["finish_reason"] in ("stop", "length") and "tool_calls" not in whole["message"]
        call = {"id": "call_1", "type": "function", "function": {"name": "walk", "arguments": '{"a": 1}'}}
        messages = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "walked"}]  # fmt: skip
        assert (
            post(client, messages=messages, tools=body["tools"], tool_choice="none", max_tokens=2)["usage"][
                "prompt_tokens"
            ]
            > 80
        )
