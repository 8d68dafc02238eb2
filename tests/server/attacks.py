"""Attacks on a server: clients in a process of their own, ``python attacks.py URL NAME CLIENTS``."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
INNOCENT = {"prompt": "def add(a, b):", "max_tokens": 24, "deadline": 20.0}


#: A route and a body; without one it is asked with GET.
Asked = tuple[str, dict[str, Any] | bytes | None]


def schema(content: dict[str, Any], strict: bool = True) -> Callable[[int], Asked]:
    """A schema that differs from request to request."""

    def ask(number: int) -> Asked:
        format = {"type": "json_schema", "json_schema": {"schema": content | {"title": f"t{number}"}, "strict": strict}}
        return COMPLETE, INNOCENT | {"response_format": format}

    return ask


def lark(text: str) -> Callable[[int], Asked]:
    return lambda number: (
        COMPLETE, INNOCENT | {"response_format": {"type": "grammar", "grammar": f'{text}\nunused{number}: "a"\n'}}
    )  # fmt: skip


def pattern(text: str) -> Callable[[int], Asked]:
    return lambda number: (COMPLETE, INNOCENT | {"response_format": {"type": "regex", "regex": f"(?:{text})|{number}"}})


def levels(keyword: str, width: int, depth: int = 19) -> dict[str, Any]:
    """References that fan out."""
    inner = {f"l{n}": {keyword: [{"$ref": f"#/$defs/l{n + 1}"}] * width} for n in range(depth)}
    return {"$defs": {**inner, f"l{depth}": {"type": "integer"}}, "$ref": "#/$defs/l0"}


def objects(letters: str) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^.*{letter}.*$": {"type": "string"} for letter in letters}}


def called(number: int) -> Asked:
    functions = [{"name": f"f{n}", "parameters": objects("abcdefgh") | {"title": str(number)}} for n in range(64)]
    tools = [{"type": "function", "function": each} for each in functions]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", "max_tokens": 16}
    return CHAT, body


def settings(strategy: str, **config: Callable[[int], Any]) -> Callable[[int], Asked]:
    return lambda number: (
        COMPLETE,
        INNOCENT | {"strategy": strategy, "strategy_config": {name: value(number) for name, value in config.items()}},
    )


def image(width: int, height: int) -> str:
    """A data URL of a black image: a PNG of a bit per pixel, of two kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + width // 8)), 9)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


BLACK = {"url": image(4096, 4096)}


def content(text: str, route: str = COMPLETE) -> Callable[[int], Asked]:
    return lambda number: (route, text.encode())


ATTACKS: dict[str, Callable[[int], Asked]] = {
    "a pattern that backtracks": schema({"const": "a" * 40 + "!", "not": {"pattern": "^(a+)+$"}}, strict=False),
    "references that fan out": schema(levels("allOf", 10), strict=False),
    "alternatives that fan out": schema(levels("anyOf", 3)),
    "many patterns of names": schema(objects("abcdefghijkl")),
    "the same, gone at once": schema(objects("abcdefghijklm")),
    "counted patterns": schema({"allOf": [{"pattern": f".*{letter}.{{20}}"} for letter in "abc"], "type": "string"}),
    "two thousand properties": schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    ),
    "a regex of many states": pattern(".*a.{20}"),
    "a large regex": pattern("a" * 19_000),
    "characters of Unicode": pattern(r"(\w+\s\d+\W){30}"),
    "a regex that takes gigabytes": lark("start: /" + "(a|b|[x-z]*)" * 20_000 + "/"),
    "lines without a rule": content(
        json.dumps({"prompt": "a", "response_format": {"type": "grammar", "grammar": "\n" * 450_000}})
    ),
    "an ambiguous grammar": lark('start: start start start | start start | "a" | /[a-z]/'),
    "another ambiguous grammar": lark('start: x*\nx: x x | x x x | "a" | ""'),
    "nested repetitions": lark("start: a{0,5000}\na: b{0,5000}\nb: /x/{0,5000}"),
    "tools": called,
    "settings of a strategy": settings("suffix", alpha=lambda number: 1 + number % 9973 / 1e4),
    "as many strategies as there may be": settings("prompt_lookup", max_ngram=lambda number: 4 + number % 4),
    "metrics": lambda number: ("/metrics", None),
    "signs of life": lambda number: ("/health", None),
    "what is not there": lambda number: (f"/v1/{number}", None),
    "digits": content('{"prompt": "a", "temperature": ' + "9" * 400 + "}"),
    "a hundred thousand prompts": content(json.dumps({"prompt": ["a"] * 100_000})),
    "a megabyte of text": lambda number: (COMPLETE, {"prompt": f"{number} " + "word " * 200_000}),
    "a hundred thousand wrong prompts": content(json.dumps({"prompt": [{}] * 100_000})),
    "a megabyte of lists": content(
        '{"prompt": "a", "max_tokens": 1, "metadata": {"a": [' + ",".join(["[]"] * 300_000) + "]}}"
    ),
    "sixty thousand fields": content(json.dumps({"prompt": "a"} | {f"f{number}": 1 for number in range(60_000)})),
    "twenty thousand messages": content(json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000}), CHAT),
    "images of many pixels": content(
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": BLACK}]}]}), CHAT
    ),
    "a megabyte of JSON": content('{"prompt": "a", "metadata": {"a": ' + "[" * 500_000 + "]" * 500_000 + "}}"),
}
GONE = "the same, gone at once"
#: Seconds of an attack: at least, and at most if there are no answers yet for as many requests as there are clients.
SECONDS, LONGEST = 1.2, 5.0


def main(url: str, name: str, clients: int) -> None:
    import httpx

    told, numbers = Counter[str](), itertools.count()

    def ask() -> None:
        client = httpx.Client(base_url=url, timeout=0.3 if name == GONE else 60, trust_env=False)
        while True:
            route, body = ATTACKS[name](next(numbers))
            sent = json.dumps(body).encode() if isinstance(body, dict) else body
            method, headers = "GET" if sent is None else "POST", {"Content-Type": "application/json"}
            try:
                told[str(client.request(method, route, content=sent, headers=headers).status_code)] += 1
            except httpx.HTTPError as error:
                told[type(error).__name__] += 1

    for _ in range(clients):
        threading.Thread(target=ask, daemon=True).start()
    print("begun", flush=True)
    begun = time.monotonic()
    while (past := time.monotonic() - begun) < SECONDS or (past < LONGEST and sum(told.values()) < clients):
        time.sleep(0.05)
    print(json.dumps(told), flush=True)
    os._exit(0)  # what is still asked for is dropped


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
