"""Tokenizer and batches of the demo models' training."""

from __future__ import annotations

import pytest
from decoders_lab.demo.batches import Batches, encode
from decoders_lab.demo.shapes import END, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.demo import data


@pytest.fixture(scope="module")
def few():
    return [source for source in data.read_sources() if "/" not in source.path][:80]


@pytest.fixture(scope="module")
def tokenizer(few):
    return train_tokenizer((source.text for source in few), vocabulary=600)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_tokenizer_gives_back_any_text(tokenizer, text):
    text = text.replace(END, "")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "text", ["", " a , b . c 's", "\t\tif x :\n\n    y\r\n", "naïve ∑ 日本 🐍\x00", "don't ( x ) ?"]
)
def test_tokenizer_gives_back_awkward_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_is_reproducible(few, tokenizer):
    again = train_tokenizer((source.text for source in few), vocabulary=600)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_special_token_is_first_and_not_added_to_text(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert 0 not in tokenizer("def f():\n    pass\n")["input_ids"]


def test_stream_separates_documents(tokenizer):
    ids = encode(tokenizer, ["a\n", "b\n"])
    assert tokenizer.decode(ids.tolist()) == f"{END}a\n{END}b\n{END}"


def test_batch_depends_on_seed_and_step_alone(few, tokenizer):
    some = few[:10]
    first = Batches(some, tokenizer, seed=1, rows=4, length=32)
    second = Batches(some, tokenizer, seed=1, rows=4, length=32)
    second.batch(5000)  # a batch of another epoch does not change later batches
    assert first.batch(3).equal(second.batch(3))
    assert not first.batch(3).equal(first.batch(4))
    assert not first.batch(3).equal(Batches(some, tokenizer, seed=2, rows=4, length=32).batch(3))
    assert first.edit_rows == 1
    assert tokenizer.decode(first.batch(3)[-1]).startswith("# original\n")


def test_an_epoch_visits_every_window_once(tokenizer):
    sources = [data.Source("a.py", "".join(f"x{number} = {number}\n" for number in range(200)))]
    batches = Batches(sources, tokenizer, seed=0, rows=1, length=16)
    windows = (len(batches.stream) - 1 - 16) // 16
    rows = {tuple(batches.batch(step)[0].tolist()) for step in range(windows)}
    assert len(rows) == windows
