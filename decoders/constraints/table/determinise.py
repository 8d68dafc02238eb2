"""A regular expression as a minimal byte automaton.

A child process runs outlines_core, which determinises the expression: this may take exponential time and memory, and outlines_core
cannot be interrupted. The child's memory and processor time (not wall-clock time) are limited, so that the result does not depend on
the machine's load. The child imports only outlines_core (about 6 ms).
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import GrammarError
from ..patterns import limits
from ..patterns.automata import refined
from ..patterns.rust import check_part, not_read, shown

#: Longest regular expression, in characters.
LONGEST = 200_000
#: Greatest number of states before minimisation.
RAW_STATES = 16_384
#: Limits of the child process: processor seconds, and megabytes of memory.
SECONDS, MEGABYTES = 5, 1024

#: The automaton of outlines_core stops at the first alternative that matches (``1|12`` never matches ``12``). So the expression gets
#: END as its last character: then only whole texts match. END is a noncharacter, which no text contains.
END = "\U0010ffff".encode()
#: outlines_core lets a match begin anywhere, for which an automaton may need exponentially many states. So an empty alternative of
#: lower priority is added: it matches at the start of the input, so no match begins later. outlines_core then makes the first state
#: final and drops its transitions. So the expression begins with BEGIN, and no text begins in the first state.
BEGIN = "\0\0"

# A program for a bare interpreter. Writes the counts, states, transitions per state, targets, final states and bytes as raw arrays, and
# in the last line of stderr the processor seconds that it took.
_CHILD = (
    limits.BOUNDED
    + """
import gc, os, sys
bounded(float(sys.argv[4]))
gc.disable()
from array import array
from itertools import chain
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
def end(message=""):
    sys.stderr.write("%s\\n%.6f" % (message, time.process_time()))
    sys.stderr.flush()
    os._exit(bool(message))  # nothing is tidied up
sys.path.append(sys.argv[1])
from outlines_core import Index, Vocabulary
try:
    index = Index(sys.stdin.buffer.read().decode(), Vocabulary(256, {bytes([b]): [b] for b in range(256)}))
except ValueError as error:
    end("refused: " + str(error))
table, finals = index.get_transitions(), index.get_final_states()
if len(table) > int(sys.argv[3]):
    end("states: %d" % len(table))
out = sys.stdout.buffer
array("Q", [len(table), sum(map(len, table.values())), len(finals)]).tofile(out)
array("I", table).tofile(out)
array("I", map(len, table.values())).tofile(out)
array("I", chain.from_iterable(d.values() for d in table.values())).tofile(out)
array("I", finals).tofile(out)
array("H", chain.from_iterable(table.values())).tofile(out)
out.flush()
end()
"""
)


@dataclass(frozen=True)
class ByteAutomaton:
    """A byte automaton. State 0 is dead; the language is empty if `start` is 0.

    Attributes:
        next: ``[S, 256]`` int32, the next state for each state and byte.
        accepting: ``[S]`` bool, whether a text may end in each state.
    """

    next: NDArray[np.int32]
    accepting: NDArray[np.bool_]
    start: int


def determinise(regex: str) -> ByteAutomaton:
    """The automaton, not minimised or trimmed, of the texts that match `regex` as a whole.

    Raises:
        GrammarError: `regex` is not an expression of Rust's ``regex``, or its automaton is too large.
    """
    if len(regex) > LONGEST:
        raise GrammarError(f"a regex of {len(regex)} characters; {_limit(f'{LONGEST} characters')}")
    check_part(regex)
    pattern = f"{BEGIN}(?:{regex}){END.decode()}|"
    module_spec = importlib.util.find_spec("outlines_core")
    if module_spec is None or module_spec.origin is None:
        raise GrammarError('backend="table" needs outlines_core, which is not installed')
    site_packages = str(Path(module_spec.origin).parent.parent)
    try:
        text = pattern.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"a regex with half a character (a lone surrogate) at {error.start}") from error
    limits.check(f"the automaton of {shown(regex)}")
    seconds = spent = min(SECONDS, limits.left())
    too_long = f"the automaton of {shown(regex)} is too large; {_limit(f'{seconds:.2g} s')}"
    arguments = site_packages, str(MEGABYTES << 20), str(RAW_STATES), str(seconds)
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, *arguments],
            input=text, capture_output=True, timeout=limits.PATIENCE * seconds, check=False,
        )  # fmt: skip
        message, _, took = child.stderr.decode(errors="replace").rpartition("\n")
        with suppress(ValueError):  # a killed child writes no number
            spent = float(took)
    except subprocess.TimeoutExpired as error:
        raise GrammarError(too_long) from error
    finally:
        limits.spend(spent)
    if child.returncode == -getattr(signal, "SIGPROF", 0):
        raise GrammarError(too_long)
    if child.returncode:
        raise GrammarError(_reason(regex, message))
    return _without_end(_parsed(child.stdout))


def _parsed(raw: bytes) -> ByteAutomaton:
    """The child's output as dense arrays; state 0 is dead, the other states keep the child's order."""
    states, moves, finals = (int(n) for n in np.frombuffer(raw, np.uint64, 3))
    words = np.frombuffer(raw, np.uint32, 2 * states + moves + finals, offset=24)
    names, counts, targets, ends = np.split(words, np.cumsum([states, states, moves]))
    symbols = np.frombuffer(raw, np.uint16, moves, offset=24 + words.nbytes)
    all_states = np.unique(np.concatenate([names, targets, ends]))
    transitions = np.zeros((len(all_states) + 1, 256), np.int32)
    is_byte = symbols < 256  # symbol 256 is outlines_core's own end marker
    sources = (np.searchsorted(all_states, np.repeat(names, counts)) + 1)[is_byte]
    destinations = (np.searchsorted(all_states, targets) + 1)[is_byte]
    transitions[sources, symbols[is_byte]] = destinations
    accepting = np.zeros(len(all_states) + 1, np.bool_)
    accepting[np.searchsorted(all_states, ends) + 1] = True
    # The state after the first byte of BEGIN: nothing leads to it, because the first state has lost its transitions.
    first_states = np.setdiff1d(sources, destinations)
    start = int(transitions[first_states[0], ord(BEGIN[1])]) if len(first_states) else 0
    return ByteAutomaton(transitions, accepting, start)


def _without_end(automaton: ByteAutomaton) -> ByteAutomaton:
    """`automaton` without :data:`END`: its accepting states are the states where END may come next.

    Transitions by END's first bytes are kept, because other characters may share the states that they lead to.
    """
    transitions = automaton.next.copy()
    reached = np.arange(len(transitions))
    for byte in END[:-1]:
        reached = transitions[reached, byte]
    accepting = automaton.accepting[transitions[reached, END[-1]]]
    accepting[0] = False
    transitions[reached[accepting], END[-1]] = 0
    return ByteAutomaton(transitions, accepting, automaton.start)


def _reason(regex: str, message: str) -> str:
    """Why the child process returned no automaton."""
    if message.startswith("states: "):
        return f"the automaton of {shown(regex)} has {message[8:].strip()} states; {_limit(f'{RAW_STATES} states')}"
    if not message.startswith("refused: "):
        return f"the automaton of {shown(regex)} is too large; {_limit(f'{MEGABYTES} MB')}"
    if "no transitions from state" in message:
        return not_read(regex, "a part of it matches nothing at all")
    return not_read(regex, message[9:].strip())


def _limit(limit: str) -> str:
    return f'the limit of backend="table" is {limit}; backend="llguidance" has no such limit'


def minimise(automaton: ByteAutomaton) -> ByteAutomaton:
    """The minimal automaton of the same language; every state but 0 is reachable and leads to the end of a text."""
    transitions, byte_class = columns(automaton.next)
    source, column = np.nonzero(transitions)
    target = transitions[source, column]
    ends = np.flatnonzero(automaton.accepting)
    useful = _reached(_grouped(source, target, len(transitions)), [automaton.start])
    useful &= _reached(_grouped(target, source, len(transitions)), ends.tolist())
    useful_edges = useful[source] & useful[target]
    source, column, target = source[useful_edges], column[useful_edges], target[useful_edges]
    # The first partition is by legal bytes and by whether the text may end.
    live = np.zeros((len(transitions), transitions.shape[1] + 1), np.bool_)
    live[source, column] = True
    live[ends, -1] = True
    states = np.flatnonzero(useful)
    blocks = np.full(len(transitions), -1, np.int64)
    blocks[states] = distinct(live[states])[0]
    successors = _grouped(source, target, len(transitions))
    predecessors = _grouped(target, source, len(transitions))
    blocks = np.array(refined(blocks.tolist(), states.tolist(), successors, predecessors), np.int64)
    block_number, representatives = distinct(blocks[states, None])
    number = np.zeros(len(transitions), np.int32)
    number[states] = block_number + 1
    representatives = np.concatenate([[0], states[representatives]])
    return ByteAutomaton(
        number[transitions[representatives]][:, byte_class],
        automaton.accepting[representatives],
        int(number[automaton.start]),
    )


def columns(transitions: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`transitions` ``[S, 256]`` with equal columns merged, ``[S, C]``; and for each byte its column, ``[256]``."""
    transposed = np.ascontiguousarray(transitions.T)
    byte_class, first = distinct(transposed)
    return np.ascontiguousarray(transposed[first].T), byte_class


def distinct(rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers the distinct rows of ``[n, m]``. Returns each row's number, ``[n]``, and the index of each number's first row, ``[k]``.

    The ``k`` distinct rows are numbered in the order of their first occurrence.
    """
    keys: list[bytes] = (
        np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0].tolist()
    )
    numbers = {row: number for number, row in enumerate(dict.fromkeys(keys))}
    number = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
    return number, np.unique(number, return_index=True)[1]


def _grouped(keys: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]], count: int) -> list[list[int]]:
    order = np.argsort(keys, kind="stable")
    flat = values[order].tolist()
    bounds = np.searchsorted(keys[order], np.arange(count + 1)).tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]


def _reached(successors: list[list[int]], start: list[int]) -> NDArray[np.bool_]:
    """``[S]``: the states reachable from `start`."""
    reached_states = {*start}
    todo = [*start]
    while todo:
        new = {*successors[todo.pop()]} - reached_states
        reached_states |= new
        todo += new
    reached = np.zeros(len(successors), np.bool_)
    reached[[*reached_states]] = True
    return reached
