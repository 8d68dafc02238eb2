"""Forced text is proposed in the tokens that the row was written with before."""

from __future__ import annotations

import pytest
import torch

from decoders.constraints.base import Language
from decoders.constraints.table.backend import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.engine.decode.grammar.device_guide import DeviceGuide
from decoders.engine.decode.grammar.history import WINDOW, DeviceHistory, HostHistory, spell
from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.tree import Topology

from .guides import output, sequences

CPU = torch.device("cpu")
KEY, QUOTE, K, E, Y, KE, COLON, STOP, ODD, YONE, ONE = range(11)
TOKENS = [b"key", b'"', b"k", b"e", b"y", b"ke", b":", None, None, b"y:1", b"1"]
VOCABULARY = Vocabulary(TOKENS, [STOP])


def spelled(text: list[int], forced: bytes, policy="full", limit: int = 8) -> list[int]:
    history = HostHistory()
    history.read(torch.tensor(text), len(text), VOCABULARY)
    return history.spell(forced, VOCABULARY, policy, limit)


def test_as_the_tokenizer_writes_it_where_the_row_has_no_history():
    assert spelled([QUOTE], b'key":') == [KEY, QUOTE, COLON]
    assert spelled([QUOTE], b'key":', limit=2) == [KEY, QUOTE]
    assert spelled([QUOTE], b"") == []


def test_what_followed_a_token_last_follows_it_again():
    assert spelled([QUOTE, K, E, Y, QUOTE], b'key":') == [K, E, Y, QUOTE, COLON]
    assert spelled([QUOTE, KEY, QUOTE, KE, Y, QUOTE], b'key"') == [KE, Y, QUOTE]


def test_what_followed_the_same_token_comes_before_what_began_with_the_byte():
    assert spelled([QUOTE, KE, ONE, K, E, QUOTE], b"key") == [KE]


def test_else_what_began_with_the_same_byte_last():
    """Nothing has followed "1"; the text begins "k" with a token of its own, and goes on from there by its history."""
    assert spelled([QUOTE, KE, ONE, K, E, ODD, ONE], b'key"') == [K, E, Y, QUOTE]


def test_a_history_that_does_not_fit_is_left():
    assert spelled([QUOTE, ODD, QUOTE], b"key:") == [KEY, COLON], "a token without text is no spelling"
    assert spelled([QUOTE, ONE, QUOTE], b"key:") == [KEY, COLON], "other text"
    assert spelled([QUOTE, K, E, YONE, QUOTE], b"key:") == [K, E], (
        "text behind what is forced, with which y: may be joined"
    )


def test_the_canonical_policy_leaves_no_choice():
    assert spelled([QUOTE, K, E, Y, QUOTE], b"key:1:", policy="canonical") == [KEY, COLON, ONE, COLON]


def test_text_that_was_taken_back_is_read_anew():
    history = HostHistory()
    history.read(torch.tensor([QUOTE, K, E]), 3, VOCABULARY)
    history.read(torch.tensor([QUOTE, KE, Y]), 3, VOCABULARY)
    assert history.after[QUOTE] == KE and history.begun[ord("k")] == KE


@pytest.mark.parametrize("length", [3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_the_device_learns_what_the_host_learns(length):
    text = torch.randint(0, len(TOKENS), (2, length), generator=torch.Generator().manual_seed(length))
    text[:, : length // 2] = -1  # a prompt that names no tokens
    device, hosts = DeviceHistory(2, VOCABULARY, CPU), [HostHistory(), HostHistory()]
    for taken in (length, length - 2, length):  # the last tokens are taken back, and others come
        text[:, taken - 1] = (text[:, taken - 1] + 1) % len(TOKENS)
        device.read(sequences(text[:, :taken].tolist()))
        for row, host in enumerate(hosts):
            host.read(text[row], taken, VOCABULARY)
    for row, host in enumerate(hosts):
        after = {token: int(worth) % len(TOKENS) for token, worth in enumerate(device.after[row]) if worth >= 0}
        begun = {byte: int(worth) % len(TOKENS) for byte, worth in enumerate(device.begun[row, :256]) if worth >= 0}
        assert host.after == after and host.begun == begun


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_on_the_device_spell_as_they_do_on_the_host(compiled):
    grammar = Table().compile(Language("keys", regex='("key":1:?){1,4}'), VOCABULARY)
    made: list[object] = []

    def compile(function):
        made.append(function)
        return torch.compile(function, fullgraph=True, dynamic=True) if compiled else function

    device = DeviceGuide.of([grammar, None, grammar], len(TOKENS), CPU, compile)
    host = HostGuide.of([grammar, None, grammar], len(TOKENS), CPU)
    assert device is not None and made == [spell]
    texts = [[ODD, E], [ODD, K], [ODD, QUOTE, KE, Y]]
    for new in ([QUOTE, K, E, Y, QUOTE, COLON, ONE], [QUOTE, KE, Y, QUOTE, COLON, ONE, COLON], [QUOTE, KE]):
        for guide in (host, device):
            guide.block(torch.tensor([new] * 3), Topology.chain(len(new)))
            guide.commit(output([[*new, 0]] * 3, [len(new)] * 3), torch.tensor([False] * 3))
        texts = [text + new for text in texts]
        run = host.forced(sequences(texts), 6)
        wanted = torch.nn.functional.pad(run, (0, 6 - run.shape[1]), value=-1)
        assert torch.equal(device.forced(sequences(texts), 6), wanted)
    assert run[0].tolist() == [Y, QUOTE, COLON, ONE], "as it was written the last time"
