"""Work on grammars in processes that can be killed: it ends by itself, or with whoever waits for it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.constraints import Auto, Vocabulary
from decoders.errors import DeadlineError, GrammarError
from decoders.server.bodies import CompletionBody
from decoders.server.forks import exchanged
from decoders.server.refusals import Refusal
from decoders.server.workshop import Workshop, apply, broken_rule

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="work is done in threads there")
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [256])
#: llguidance compiles it for minutes, and takes gigabytes.
ENDLESS = {"type": "grammar", "grammar": "start: /" + "(a|b|[x-z]*)" * 20_000 + "/"}


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    shop = Workshop(VOCABULARY, Auto(), 2.0)
    yield shop
    assert shop._process is not None and shop._control is not None
    shop._control.close()
    assert shop._process.wait(20) == 0


def wanted(format: dict[str, Any]) -> Any:
    body = {"prompt": "a", "response_format": format}
    return CompletionBody.model_validate_json(json.dumps(body)).response_format


def schema(content: Any, strict: bool = True) -> Any:
    return wanted({"type": "json_schema", "json_schema": {"schema": content, "strict": strict}})


def patient() -> None:
    """Waits as long as it takes."""


def children(shop: Workshop) -> list[str]:
    assert shop._process is not None
    return Path(f"/proc/{shop._process.pid}/task/{shop._process.pid}/children").read_text().split()


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 100) + b"a part"], ids=["nothing", "a part"])
def test_an_answer_that_is_cut_off_is_none(sent: bytes) -> None:
    """`sent`: what the pipe holds when the process that answers is killed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def killed() -> None:
            _, descriptors, *_ = socket.recv_fds(theirs, 1, 2)
            os.write(descriptors[0], sent)
            for each in descriptors:
                os.close(each)

        thread = threading.Thread(target=killed)
        thread.start()
        assert exchanged(ours, b"task", patient) is None
        thread.join()


@pytest.mark.parametrize(
    "asked, backend, text",
    [
        (wanted({"type": "regex", "regex": "[ab]{3}"}), "table", b"aba"),
        (wanted({"type": "grammar", "grammar": 'start: "a" start "b" | ""'}), "llguidance", b"aabb"),
        (schema({"type": "object"}), "llguidance", b"{}"),
    ],
)
def test_grammars_come_back_whole(workshop: Workshop, asked: Any, backend: str, text: bytes) -> None:
    assert not workshop.known(asked)
    grammar = workshop.prepared(asked, patient)
    assert grammar.backend == backend and grammar.vocabulary is VOCABULARY
    matcher = grammar.start()
    assert matcher.advance([*text]) == len(text) and matcher.accepting
    assert workshop.known(asked) and workshop.prepared(asked, patient) is grammar


def test_what_is_wrong_is_said_as_ever(workshop: Workshop) -> None:
    with pytest.raises(GrammarError, match="uniqueItems") as error:
        workshop.prepared(schema({"type": "array", "uniqueItems": True}), patient)
    assert error.value.keyword == "uniqueItems"
    with pytest.raises(Refusal, match="has no rule") as refused:
        workshop.prepared(wanted({"type": "grammar", "grammar": "\n" * 500_000}), patient)  # read in no time, too
    assert (refused.value.status, refused.value.param) == (400, "response_format")


def test_texts_are_judged(workshop: Workshop) -> None:
    """Backtracking would take years for this pattern."""
    grammar = workshop.prepared(schema({"const": "a" * 40 + "!", "not": {"pattern": "^(a+)+$"}}, strict=False), patient)
    text = [*json.dumps("a" * 40 + "!").encode()]
    assert broken_rule(grammar, text, patient) is None
    assert "breaks const" in (broken_rule(grammar, [*b'"a"'], patient) or "")
    grammar.judge([*b'"a"'])  # a thread that decodes does not wait for it


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_what_nobody_waits_for_is_killed(workshop: Workshop, wait_until: Any) -> None:
    workshop.prepared(wanted({"type": "regex", "regex": "begun"}), patient)
    asked, seen = 0, False

    def check() -> None:
        nonlocal asked, seen
        asked, seen = asked + 1, bool(children(workshop))
        if asked == 3:
            raise DeadlineError("over")

    with pytest.raises(DeadlineError):
        workshop.prepared(wanted(ENDLESS), check)
    assert seen
    wait_until(lambda: not children(workshop), 10)
    assert not workshop.known(wanted(ENDLESS))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_what_it_started_is_killed_with_it(workshop: Workshop, wait_until: Any) -> None:
    def running() -> bool:
        commands = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                commands.append(each.read_bytes())
        return b"sleep\x0061.25\x00" in commands

    def check() -> None:
        if running():
            raise DeadlineError("over")

    with pytest.raises(DeadlineError):
        workshop._done(partial(apply, os.system, "sleep 61.25; true"), check)
    wait_until(lambda: not running(), 10)


@pytest.mark.slow  # two processes import the package; .ci/run runs it
def test_another_process_is_begun_where_one_was_killed(workshop: Workshop, caplog: Any) -> None:
    workshop.begin()
    assert workshop._process is not None
    os.kill(workshop._process.pid, signal.SIGKILL)
    workshop._process.wait(20)
    assert workshop.prepared(wanted({"type": "regex", "regex": "again"}), patient).backend == "table"
    assert "has ended with -9" in caplog.text


def test_processes_that_were_killed_leave_no_descriptors() -> None:
    shop, counts = Workshop(VOCABULARY, Auto(), 2.0), []
    for _ in range(3):
        shop.begin()
        counts.append(len(os.listdir("/proc/self/fd")))
        assert shop._process is not None
        shop._process.kill()
        shop._process.wait()
    assert counts[0] == counts[-1]


def test_a_workshop_is_forgotten_without_a_warning() -> None:
    shop = Workshop(VOCABULARY, Auto(), 2.0)
    shop.begin()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del shop
        gc.collect()
    assert not [each for each in warned if "still running" in str(each.message)]


@pytest.mark.slow
def test_what_is_remembered_is_bounded_in_bytes(workshop: Workshop, monkeypatch: Any) -> None:
    monkeypatch.setattr("decoders.server.workshop.KEPT_BYTES", 1)
    every = [wanted({"type": "regex", "regex": f"[ab]{{{number}}}"}) for number in (21, 22)]
    for each in every:
        workshop.prepared(each, patient)
    assert [workshop.known(each) for each in every] == [False, True]


@pytest.mark.slow
def test_what_takes_too_much_is_ended(workshop: Workshop) -> None:
    for asked in (
        wanted(ENDLESS),
        schema({"type": "object", "patternProperties": {f"^.*{c}.*$": {} for c in "abcdefghijkl"}}),
    ):
        with pytest.raises(GrammarError, match=r"takes (more|longer) than"):
            workshop.prepared(asked, patient)


def test_what_a_fork_imports_is_light() -> None:
    code = (
        "import sys, decoders.server.workshop as workshop\n"
        "assert not {'transformers', 'decoders.engine', 'decoders.registry'} & sys.modules.keys(), 'seconds of its time'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
