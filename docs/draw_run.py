"""Draws docs/run.svg, the picture of README, from a run of the demo model: ``python docs/draw_run.py``.

Tokens that were drafted and accepted are coloured; the others are the model's own, one in each step.
"""

from __future__ import annotations

import html
from pathlib import Path

PICTURE = Path(__file__).parent / "run.svg"
PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

    def pop(self):
        return self.items.pop()

class Queue:
    def __init__(self):"""
STRATEGY, NEW_TOKENS, COLUMNS = "prompt_lookup", 36, 78
#: Height of a line, width of a character, edge: in pixels at a font size of 14.
LINE, CHARACTER, EDGE = 20, 8.43, 16
STYLES = {"prompt": "#8b949e", "own": "#e6edf3", "drafted": "#7ee787"}


def run() -> tuple[list[tuple[str, str]], str]:
    """Pieces of the text, each with its style, and what a line says of the run."""
    import decoders

    model, tokenizer = decoders.demo.load()
    with decoders.Scheduler(decoders.enable(model, tokenizer), strategy=STRATEGY) as scheduler:
        settings = {"compile": False, "prune": False}  # drafts do not depend on what steps cost here
        generation = scheduler.submit(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, decoders_config=settings)
        generation.result()
    tokens = generation.tokens
    pieces, texts = [("prompt", PROMPT)], ["", *(tokenizer.decode(tokens[: end + 1]) for end in range(len(tokens)))]
    for before, after, drafted in zip(texts, texts[1:], generation.drafted, strict=False):
        pieces.append(("drafted" if drafted else "own", after[len(before) :]))
    report = generation.report
    return pieces, f"{len(tokens)} tokens in {report.steps} steps: {report.accepted} of them were drafted and accepted"


def draw(pieces: list[tuple[str, str]], caption: str) -> str:
    """An SVG of the text on a dark ground."""
    lines: list[list[tuple[str, str]]] = [[]]
    for style, text in pieces:
        first, *others = text.split("\n")
        lines[-1].append((style, first))
        lines += [[(style, other)] for other in others]
    lines += [[], [("prompt", caption)]]
    width, height = 2 * EDGE + COLUMNS * CHARACTER, 2 * EDGE + LINE * len(lines)
    written = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img" aria-label="{caption}">',
        '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
    ]
    for number, line in enumerate(lines):
        spans = "".join(f'<tspan fill="{STYLES[style]}">{html.escape(text)}</tspan>' for style, text in line if text)
        # On each text: browsers do not hand it down from a group.
        written.append(f'<text x="{EDGE}" y="{EDGE + LINE * (number + 1) - 6}" xml:space="preserve">{spans}</text>')
    return "\n".join([*written, "</g>", "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(*run()), encoding="utf-8")
