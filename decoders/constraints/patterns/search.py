"""Whether a pattern is found in a text: by an automaton in linear time where the pattern is regular, else by ``re`` in a child process.

Python's ``re`` may take exponential time and holds the interpreter meanwhile; a child process can be ended.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from typing import Any, Self

from ...errors import GrammarError
from . import automata, ecma, limits

#: Answers lines of JSON, a pattern and a text, with 1 or 0, or with what is wrong with the pattern.
_CHILD = """
import json, re, sys
for line in sys.stdin:
    pattern, text = json.loads(line)
    try:
        answer = int(re.search(pattern, text) is not None)
    except (re.error, OverflowError, RecursionError) as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class Search:
    """Looks for patterns in texts; as a context, since it may have started a process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._known: dict[tuple[str, str], bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def found(self, pattern: Any, text: str) -> bool:
        """Whether `pattern` is found in `text`: as ECMA-262 has it, or as ``re`` does where it is not regular.

        Raises:
            GrammarError: neither reads it, or time is up.
        """
        if not isinstance(pattern, str):
            raise GrammarError(f"a pattern is a string, not {pattern!r}", "pattern")
        try:
            conditions = ecma.strings(pattern)
        except GrammarError:
            if (pattern, text) not in self._known:
                self._known[pattern, text] = self._asked(pattern, text)
            return self._known[pattern, text]
        return all(automata.matches(tree, text) is good for tree, good in conditions)

    def _asked(self, pattern: str, text: str) -> bool:
        limits.check("matching a pattern", "pattern")
        begin, left = time.perf_counter(), limits.left()
        child = self._started()
        killer = threading.Timer(min(left, threading.TIMEOUT_MAX), child.kill)
        killer.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([pattern, text]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            killer.cancel()
            limits.spend(time.perf_counter() - begin if math.isfinite(left) else 0)
        limits.check("matching a pattern", "pattern")
        answer = json.loads(line) if line else "the process that matches it has ended"
        if isinstance(answer, str):
            raise GrammarError(f"pattern {pattern[:80]!r}: {answer}", "pattern")
        return bool(answer)

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            command = [sys.executable, "-I", "-S", "-c", _CHILD]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
