"""The source text of a grammar for llguidance, compiling it within limits, and llguidance's error messages.

llguidance's compiler recurses along chains of rules, and a stack overflow kills the process. So the length of source texts is bounded,
and the compiling thread has a stack that a text of this length cannot fill (measured: 27 bytes of stack per byte of plain rules, 430
for negated terminals).

Nested terminals are expanded to one regular expression, which llguidance compiles in time cubic in the depth: 0.1 seconds at 500, 6
at 2000, minutes at 20,000. llguidance does not limit the depth, so it is limited here.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ...errors import GrammarError, shortened, suggest
from ..base import Language
from ..vocabulary import Vocabulary

T = TypeVar("T")

#: Greatest number of characters of a source text. Bytes of the compiling thread's stack: the minimum, and per character.
LONGEST = 512 * 1024
STACK, STACK_PER_CHARACTER = 16 * 1024 * 1024, 1024

#: Deepest nesting of terminals that is compiled; it takes 0.1 seconds.
DEEPEST = 500

#: llguidance's own limits. The fuel of the first lexer lasts about 20 ms, the fuel of a mask about 14 ms; 50,000 Earley items take
#: 2.5 ms (100 to 700 ms in the most ambiguous grammars found). A parser's row grows with the number of alternatives, to 20,000 items.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_items_in_row": 20_000,
    "max_lexer_states": 100_000, "max_grammar_size": 500_000, "precompute_large_lexemes": True, "verbose_errors": False,
}  # fmt: skip

#: Without this option, a mask allows only one token where bytes are forced, although llguidance would accept others.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
#: Strings, comments and regular expressions of Lark, which are skipped.
_QUOTED = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*|#[^\n]*|/[^/\\]*(?:\\.[^/\\]*)*/'
_LEXEMES = re.compile(
    _QUOTED + r"|(?P<token><[^<>\s]+>)"
    r"|\b(?P<option>max_tokens|stop|stop_capture|temperature)\s*=",
    re.DOTALL,
)
_RAW_BYTES = re.compile(r'%llguidance\s*\{[^}]*"allow_invalid_utf8"')
_REFUSED = {
    "max_tokens": "positions would depend on how a text is spelt; bound the length, as in /[a-z]{1,20}/",
    "stop": "it takes text back; use suffix=, which keeps it",
    "stop_capture": "it needs stop=, which takes text back",
    "temperature": "give it to generate",
}


def source(language: Language) -> str:
    """The text of `language` in llguidance's dialect of Lark.

    Raises:
        GrammarError: `language` has no notation that llguidance reads, uses a refused option, or is too long.
    """
    import llguidance

    if language.lark is not None:
        text = language.lark
        _refuse(language.name, text)
    elif language.regex is not None:
        if len(language.regex) - len(language.regex.rstrip("\\")) & 1:  # llguidance would ignore the last backslash
            raise GrammarError(f"{language.name}: the regular expression ends with a backslash that escapes nothing")
        text = f"start: /{llguidance.regex_to_lark(language.regex, '')}/" if language.regex else 'start: ""'
    else:
        raise GrammarError(f"{language.name}: llguidance reads Lark and regular expressions, and it has neither")
    if len(text) > LONGEST:
        raise GrammarError(
            f"{language.name}: {len(text):,} characters are more than the {LONGEST:,} that llguidance is given to compile: "
            + _smaller(language)
        )
    if language.lark is not None and (deep := depth(text)) > DEEPEST:
        raise GrammarError(f"{language.name}: terminals are nested {deep:,} deep, the limit is {DEEPEST}")
    return text + _OPTIONS


def _refuse(name: str, lark: str) -> None:
    if _RAW_BYTES.search(lark):
        raise GrammarError(f"{name}: allow_invalid_utf8 is not supported, texts are UTF-8", "allow_invalid_utf8")
    for lexeme in _LEXEMES.finditer(lark):
        token, option = lexeme["token"], lexeme["option"]
        if not token and not option:
            continue
        where = f"{name}, line {lark.count(chr(10), 0, lexeme.start()) + 1}"
        if token:
            raise GrammarError(
                f"{where}: {token} asks for a token by its name or number; grammars are about text, in which special "
                "tokens do not occur. Write the text in quotes",
                token,
            )
        raise GrammarError(f"{where}: {option}= is not supported: {_REFUSED[option]}", option)


def compile_matcher(tokenizer: Any, language: Language, text: str) -> Any:
    """A new ``LLMatcher`` for `text`, which :func:`source` returned for `language`.

    Raises:
        GrammarError: llguidance refuses `text` (the error quotes its message), or would ignore a part of it although ``language.whole``
            is None, so that finished texts are not checked either.
    """
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = _with_room(text, lambda: llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits))
    if matcher.is_error():
        raise _invalid(language, matcher.get_error())
    warnings = matcher.get_grammar_warnings()
    if warnings and language.whole is None:
        raise GrammarError(f"{language.name}: llguidance would ignore a part of it: {'; '.join(warnings)}")
    return matcher


def refuse_invalid(language: Language) -> None:
    """Raises the GrammarError that compiling `language` would raise for any vocabulary; checks only languages in Lark's notation."""
    import llguidance

    if language.lark is None:
        return
    text = source(language)
    limits = llguidance.LLParserLimits(**LIMITS)
    said = _with_room(text, lambda: llguidance.LLMatcher.validate_grammar(text, limits=limits))
    if said:
        raise _invalid(language, said)


def _invalid(language: Language, message: str) -> GrammarError:
    unknown = re.search(r'unknown name: "(\w+)"', message)
    hint = f"\n{_instead(unknown[1], language.lark or '')}" if unknown else ""
    return GrammarError(f"{language.name}: llguidance cannot compile it: {reason(message)}{hint}")


def _instead(name: str, lark: str) -> str:
    """What to write instead of `name`, which the grammar does not define."""
    import llguidance

    rules = re.findall(r"^[?!]?(\w+)[^:\n]*:", lark, re.MULTILINE)
    imported = re.findall(r"^%import\b.*?(\w+)[ \t]*$", lark, re.MULTILINE)
    defined = {*rules, *imported}
    choices = suggest(name, defined) if defined - {"start"} else ""
    if choices.startswith("Did you mean"):
        return choices
    common = f"%import common.{name}"
    known = not llguidance.LLMatcher.validate_grammar(f"{common}\nstart: {name}")
    return f"Define it (`{common if known else f'{name}: …'}`), or write a text in quotes. {choices}".rstrip()


_stack_lock = threading.Lock()


def _with_room(text: str, call: Callable[[], T]) -> T:
    """Runs `call`, which compiles `text`, in a thread with a stack that is large enough for `text`; returns its result. A thread that
    starts at the same moment may get a stack of this size, too.
    """
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="llguidance-compile")
    with _stack_lock:
        before = threading.stack_size(max(STACK, len(text) * STACK_PER_CHARACTER))
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def reason(message: str) -> str:
    """llguidance's message without traces, and without the option that was added to the text."""
    said = message.split("<backtrace>")[0].split("<non-verbose/>")[0]
    lines = [line[:200] for line in said.splitlines() if _OPTIONS.strip() not in line]
    text = "\n".join(lines).strip()
    if "symbols.len()" in text:
        return "it has more than 65,000 symbols"
    return text.removeprefix("panic: ")


_TOKENS = re.compile(
    _QUOTED + r"|(?P<define>[?!]*_?[A-Za-z][\w\-]*)[ \t]*(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:"
    r"|(?P<name>_?[A-Za-z][\w\-]*)|(?P<open>[(\[~])|(?P<close>[)\]])|(?P<next>[|&])",
    re.DOTALL,
)


def _smaller(language: Language) -> str:
    """The end of an error message: which part of the language's text is large, and what to write instead."""
    if language.lark is None:
        return "take classes of characters and repetitions, or for many options the pattern that they share"
    rules = [line for line in language.lark.splitlines() if line.strip()]
    longest = max(rules, key=len)
    name = longest.partition(":")[0].strip()
    share = f"the longest of its {len(rules):,} lines, {shortened(name)!r}, has {len(longest):,}"
    return f"{share}; take classes of characters and repetitions, and fewer rules"


def depth(lark: str) -> int:
    """The greatest depth of nested brackets, negations and terminals, with terminals expanded (recursive terminals once)."""
    uses = _uses(lark)
    deepest: dict[str, int] = {}
    walk = [(name, False) for name in uses]
    begun: set[str] = set()
    while walk:  # not recursive: the depth is not bounded yet
        name, done = walk.pop()
        if done:
            deepest[name] = max((level + deepest.get(used, 0) for used, level in uses[name].items()), default=0)
        elif name not in begun:
            begun.add(name)
            walk.append((name, True))
            walk += [(used, False) for used in uses[name] if used in uses]
    return max(deepest.values(), default=0)


def _uses(lark: str) -> dict[str, dict[str, int]]:
    """For every definition, the depth at which it uses each terminal; the key "" stands for the definition's own brackets."""
    uses: dict[str, dict[str, int]] = {}
    inside: dict[str, int] = {}
    level = negations = 0
    for token in _TOKENS.finditer(lark):
        if name := token["define"]:
            inside = uses.setdefault(name.lstrip("?!"), {})
            level = negations = 0
        elif token["open"] == "~":
            negations += 1
        elif token["open"]:
            level += 1
        elif token["close"]:
            level = max(level - 1, 0)
        elif token["next"]:
            negations = 0
        name = token["name"] or ""
        if not name or name.lstrip("_")[0].isupper():
            inside[name] = max(inside.get(name, 0), 1 + level + negations)
    return uses


#: Greatest number of cached tries, one per vocabulary; a trie of 128k tokens takes 13 to 50 MB and 0.4 s.
KEPT_TOKENIZERS = 4
#: llguidance's mark of special tokens, which never occurs in UTF-8.
_MARKER = b"\xff"

_tokenizers: OrderedDict[str, Any] = OrderedDict()
_tokenizers_lock = threading.Lock()


def tokenizer_for(vocabulary: Vocabulary) -> Any:
    """The ``LLTokenizer`` of `vocabulary`, cached."""
    import llguidance

    with _tokenizers_lock:
        key = vocabulary.fingerprint
        if key not in _tokenizers:
            stops = list(vocabulary.stops)
            _tokenizers[key] = llguidance.LLTokenizer(
                cast("llguidance.TokenizerWrapper", _Wrapper(vocabulary)), n_vocab=len(vocabulary), eos_token=stops
            )
        _tokenizers.move_to_end(key)
        while len(_tokenizers) > KEPT_TOKENIZERS:
            _tokenizers.popitem(last=False)
        return _tokenizers[key]


class _Wrapper:
    """A vocabulary with the interface that llguidance expects of a tokenizer. Tokens without bytes are not in llguidance's trie."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stops[0]
        self.tokens = [b"" if text is None or text.startswith(_MARKER) else text for text in vocabulary.tokens]
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)
