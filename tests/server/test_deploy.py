"""The image of ``decoders serve`` and the dashboard for its metrics."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with what follows each."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_copies_what_is_there_and_starts_the_server() -> None:
    from typer.main import get_command

    from decoders.cli import app

    allowed = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for word, rest in instructions():
        assert word in {
            "FROM",
            "RUN",
            "ARG",
            "WORKDIR",
            "COPY",
            "ENV",
            "USER",
            "VOLUME",
            "EXPOSE",
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD",
        }
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists() and f"!{source}" in allowed, source
    given = dict(instructions())
    name, command, *words = json.loads(given["ENTRYPOINT"]) + json.loads(given["CMD"])
    serve: Any = get_command(app).get_command(None, command)  # type: ignore[attr-defined]
    started = serve.make_context(command, words)
    assert name == "decoders" and started.params["host"] == "0.0.0.0" and given["EXPOSE"] == str(started.params["port"])
    assert given["ARG"] == "TORCH=cpu" and "whl/${TORCH}" in DOCKERFILE.read_text(encoding="utf-8")


def test_the_image_has_what_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    hooks = [hook["path"] for hook in wheel["hooks"].values()]
    needed = {"pyproject.toml", project["project"]["readme"], *wheel["packages"], *wheel["force-include"], *hooks}
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    assert needed <= copied


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0,
    reason="no docker runs here",
)
def test_the_image_builds_and_says_its_version() -> None:
    build = shlex.split("docker build --quiet --file deploy/Dockerfile .")
    image = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    run = ["docker", "run", "--rm", "--entrypoint", "decoders", image, "--version"]
    assert re.match(r"\d+\.\d+", subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    pytest.importorskip("prometheus_client")
    from decoders.server.metrics import Metrics

    class Pool:
        waiting = running = 0
        strategies = ()

    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    families = list(Metrics(Pool(), 1, "tiny").registry.collect())  # type: ignore[arg-type]
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    own = [family for family in families if not family.name.startswith("vllm:")]  # these say the same in vLLM's words
    samples = {family.name + end for family in own for end in ends[family.type]}
    assert set(re.findall(r"\bdecoders_\w+", shown)) == samples
    assert (
        len({panel["id"] for panel in dashboard["panels"]})
        == len({panel["title"] for panel in dashboard["panels"]})
        == 10
    )
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", shown)) - {"__rate_interval"} <= variables
