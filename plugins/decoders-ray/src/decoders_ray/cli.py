"""The command ``decoders-ray``, which estimates the number of replicas for a load, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from decoders.costs import CostCurve

from .simulation import Load, Replica, replicas_for, sustainable

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Replicas of hf-decoders on a Ray cluster.")


@app.callback()
def main() -> None:
    """Replicas of hf-decoders on a Ray cluster."""


@app.command()
def simulate(
    curve: Annotated[
        Path, typer.Option(help="Measured costs of a model: a *.costs.json file of `decoders calibrate`.")
    ],
    rates: Annotated[str, typer.Option(help="Requests per minute.")] = "1000,10000,100000,1000000",
    prompt: Annotated[float, typer.Option(help="Mean tokens of a prompt.")] = 500,
    new: Annotated[float, typer.Option(help="Mean tokens of an answer.")] = 200,
    shared: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt that the replica has read before.")
    ] = 0.0,
    rows: Annotated[int, typer.Option(min=1, help="Requests that a replica decodes at a time.")] = 8,
    accepted: Annotated[float, typer.Option(min=1, help="Tokens that a row writes per step.")] = 1.0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes per row and step, the root included.")] = 1,
    first: Annotated[float, typer.Option(help="Most seconds to the first token, for 95 % of requests.")] = 2.0,
    each: Annotated[float | None, typer.Option(help="Most seconds per further token, for 95 % of requests.")] = None,
    price: Annotated[float, typer.Option(help="Price of a replica's machine per hour.")] = 1.0,
    headroom: Annotated[float, typer.Option(min=0.1, max=1, help="Share of a replica's capacity that is used.")] = 0.7,
    compiled: Annotated[bool, typer.Option(help="Use the costs of compiled steps, if they were measured.")] = False,
    requests: Annotated[int, typer.Option(min=100, help="Number of simulated requests per rate.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the number of replicas for a load, the seconds to the first token, and the cost of a million tokens."""
    measured = CostCurve.model_validate_json(curve.read_text(encoding="utf-8"))
    replica = Replica.of_curve(measured, compiled, rows=rows, accepted=accepted, nodes=nodes, shared=shared)
    load = Load(prompt, new)
    try:
        capacity, outcome = sustainable(replica, load, first, each, requests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    lines = []
    for per_minute in (float(rate) for rate in rates.split(",")):
        count = replicas_for(per_minute / 60, capacity, headroom)
        tokens = per_minute * 60 * load.new
        lines.append(
            {
                "requests_per_minute": per_minute, "replicas": count, "tokens_per_second": round(per_minute / 60 * load.new),
                "cost_per_hour": round(count * price, 2), "cost_per_million_tokens": round(count * price / tokens * 1e6, 4),
            }
        )  # fmt: skip
    figures = {
        "replica": {
            "requests_per_minute": round(60 * capacity, 2), "tokens_per_second": round(outcome.tokens_per_second, 1),
            "busy": round(outcome.busy, 3), "first_token": [round(s, 3) for s in outcome.first],
            "further_tokens": [round(s, 4) for s in outcome.each],
        },
        "loads": lines,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    one = figures["replica"]
    typer.echo(
        f"{measured.subject.model}, {measured.subject.dtype}, {measured.subject.device}\n"
        f"A replica of {rows} rows takes {one['requests_per_minute']} requests per minute, {one['tokens_per_second']} tokens/s; first "
        f"token {outcome.first[0]:.2f} s (95 %: {outcome.first[1]:.2f}), further tokens {1000 * outcome.each[0]:.0f} ms "
        f"({1000 * outcome.each[1]:.0f}).\n\n"
        "| requests/min | replicas | tokens/s | cost per hour | per million tokens |\n| ---: | ---: | ---: | ---: | ---: |"
    )
    for line in lines:
        typer.echo("| " + " | ".join(f"{value:,}" for value in line.values()) + " |")
