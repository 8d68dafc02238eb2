"""Draws the picture of docs/explanation/scheduling.md from a run: ``python docs/draw_scheduling.py``.

Seven requests on a tiny model, admitted to a lane of four rows; every column is a step. ``tests/docs`` compares the page with it.
"""

from __future__ import annotations

from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parent / "explanation" / "scheduling.md"
BEGIN, END = "<!-- run: drawn by docs/draw_scheduling.py -->\n", "<!-- end of run -->"
#: Name, tokens of the prompt, new tokens, and the step before which it arrives.
REQUESTS = (
    ("A", 6, 2, 0), ("B", 5, 4, 0), ("C", 4, 9, 0), ("D", 6, 8, 0), ("E", 150, 4, 1), ("F", 50, 5, 3), ("G", 4, 3, 8),
)  # fmt: skip
ROWS = 4


def run() -> str:
    """The rows of the batch, step by step."""
    import decoders
    from decoders.engine.decode.lane import Lane
    from decoders.testing import tiny_model

    model = decoders.enable(tiny_model("llama"))
    wrapper = vars(model)["generate"]
    waiting = []
    for name, prompt, new, step in REQUESTS:
        ids = torch.arange(5, 5 + prompt).remainder(90)[None] + 2
        call = wrapper.prepared(
            input_ids=ids, strategy="autoregressive", max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
            decoders_config={"compile": False, "prefill_chunk": 64, "reuse": False},
        )  # fmt: skip
        waiting.append((step, name, call))
    lane = Lane(waiting[0][2].engine, waiting[0][2].request, ROWS)
    names: dict[int, str] = {}
    columns: list[tuple[list[str], list[str], list[str]]] = []
    step = 0
    while waiting or lane.seats:
        arrived = [name for when, name, _ in waiting if when <= step]
        while lane.free and waiting and waiting[0][0] <= step:
            _, name, call = waiting.pop(0)
            names[id(lane.offer(call.request))] = name
            arrived.remove(name)
        # A pause so short that one piece is read in a step.
        ended = {id(member) for member in lane.advance(1e-9)}
        batch = [names[id(seat.member)] for seat in lane.rows]
        last = [name for key, name in names.items() if key in ended]
        reading = [names[id(seat.member)] for seat in lane.seats if seat.row is None]
        columns.append((_placed(columns, batch, last), reading, arrived))
        step += 1
    lane.close()
    return _drawn(columns)


def _placed(columns: list, batch: list[str], last: list[str]) -> list[str]:
    """Who was in which row during the step: rows of those who left after it are filled again from the step before or what is free."""
    running = [*batch, *last]
    before = [cell.rstrip("·") for cell in columns[-1][0]] if columns else [""] * ROWS
    rows = [name if name in running else "" for name in before]
    for name in running:
        if name not in rows:
            rows[rows.index("")] = name
    return [name + "·" if name in last else name for name in rows]


def _drawn(columns: list) -> str:
    lines = ["step     " + "".join(f"{index:<4}" for index in range(1, len(columns) + 1)).rstrip()]
    for row in range(ROWS):
        lines.append(f"row {row}    " + "".join(f"{rows[row]:<4}" for rows, _, _ in columns).rstrip())
    for label, kind in (("reading", 1), ("waiting", 2)):
        most = max(len(column[kind]) for column in columns)
        for place in range(most):
            cells = [column[kind][place] if place < len(column[kind]) else "" for column in columns]
            lines.append(f"{label if not place else '':<9}" + "".join(f"{cell:<4}" for cell in cells).rstrip())
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def page(text: str) -> str:
    """`text` with the picture as it is now."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + run() + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
