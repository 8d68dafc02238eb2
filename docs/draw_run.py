"""Draws the picture of README from a run of the demo model: ``python docs/draw_run.py``.

Words of tokens that were drafted and accepted are coloured; the model wrote one token in each step itself.
"""

from __future__ import annotations

import html
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import decoders
from decoders import Report

PICTURE = Path(__file__).parent / "run.svg"
#: Of the tree in how-the-loop-works.md, which is that of step STEP of `ngram`: one that fits a page.
PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

    def pop(self):
        return self.items.pop()

class Queue:
    def __init__(self):"""
NEW_TOKENS, COLUMNS = 36, 80
WIDTHS, STEP = (2, 2, 1, 1), 3
#: Height of a line, width of a character, edge: in pixels at a font size of 14.
LINE, CHARACTER, EDGE = 20, 8.43, 16
STYLES = {"prompt": "#8b949e", "own": "#e6edf3", "drafted": "#7ee787"}


def report_of(strategy: str, prompt: str = PROMPT, new_tokens: int = NEW_TOKENS, **settings: Any) -> Report:
    """What a call did."""
    model, tokenizer = decoders.demo.load()
    decoders.enable(model, tokenizer)
    inputs = tokenizer(prompt, return_tensors="pt")
    return model.generate(
        **inputs, strategy=strategy, strategy_config=settings, max_new_tokens=new_tokens, do_sample=False,
        return_dict_in_generate=True, decoders_config={"compile": False, "trace": True},
    ).report  # fmt: skip


def run() -> tuple[list[tuple[str, str]], str]:
    """Pieces of the text, each with its style, and what a line says of the run."""
    (prompt, *_) = decoders.demo.prompts("copy")
    report = report_of("prompt_lookup", prompt.text, 2 * len(prompt.text))
    pieces = [("drafted" if who else "own", text) for text, who in report.written.pieces()]
    assert "".join(text for _, text in pieces).strip() == prompt.answer.strip(), "a picture has a text that makes sense"
    caption = f"{report.new_tokens[0]} tokens in {report.steps} steps; {report.accepted} were drafted and accepted: words in green"
    return [("prompt", prompt.text), *whole_words(pieces)], caption


def whole_words(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """`pieces` in which each word has one style: one that the model wrote a part of is its own."""
    styles = [style for style, text in pieces for _ in text]
    written = "".join(text for _, text in pieces)
    for word in re.finditer(r"\w+", written):
        if "own" in styles[word.start() : word.end()]:
            styles[word.start() : word.end()] = ["own"] * len(word[0])
    characters = groupby(zip(styles, written, strict=True), key=lambda pair: pair[0])
    return [(style, "".join(text for _, text in run)) for style, run in characters]


def tree() -> str:
    """The tree of a step, as text."""
    return str(report_of("ngram", widths=WIDTHS).tree(STEP))


def draw(pieces: list[tuple[str, str]], caption: str) -> str:
    """An SVG of the text on a dark ground."""
    lines: list[list[tuple[str, str]]] = [[]]
    for style, text in pieces:
        first, *others = text.split("\n")
        lines[-1].append((style, first))
        lines += [[(style, other)] for other in others]
    while not lines[-1] or not any(text for _, text in lines[-1]):
        lines.pop()
    lines += [[], [("prompt", caption)]]
    width, height = 2 * EDGE + COLUMNS * CHARACTER, 2 * EDGE + LINE * len(lines)
    written = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img" aria-label="{caption}">',
        '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
    ]
    for number, line in enumerate(lines):
        runs = [(style, "".join(text for _, text in run)) for style, run in groupby(line, key=lambda piece: piece[0])]
        spans = "".join(f'<tspan fill="{STYLES[style]}">{html.escape(text)}</tspan>' for style, text in runs if text)
        # On each text: browsers do not hand it down from a group.
        written.append(f'<text x="{EDGE}" y="{EDGE + LINE * (number + 1) - 6}" xml:space="preserve">{spans}</text>')
    return "\n".join([*written, "</g>", "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(*run()), encoding="utf-8")
