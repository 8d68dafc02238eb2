"""N-gram drafting against counts in plain Python."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import decoders
from decoders import demo
from decoders.engine.model.compiled.functions import CompiledFunction
from decoders.errors import SettingsError
from decoders.strategies import Ngram
from decoders.strategies.ngram import NgramState, mini_tree, spine
from decoders.strategies.ngram_table import NgramTable, load_table
from decoders.strategy import Sequences
from decoders.testing import tiny_model
from decoders.testing.exactness import decode, prompts

EAGER = {"compile": False}
V = 100


def propose(
    rows: list[list[int]], table: NgramTable | None = None, junk: int = 0, vocab: int = V, **values: Any
) -> list[list[int]]:
    """The draft tokens for ragged rows, counted by tensors and by Python; what lies behind a row's end is `junk`."""
    width = max(map(len, rows)) + 3
    strategy = Ngram(**values)
    orders = table.orders[: strategy.settings.max_ngram] if table else ()
    scratch = torch.full((len(rows), vocab), 10**6, dtype=torch.int32)  # whatever a step before left there
    tensors = tuple(tensor for order in orders for tensor in order)
    length = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([row + [junk] * (width - len(row)) for row in rows])
    s = strategy.settings
    drafted, known = mini_tree(tokens, length, s.widths, s.max_ngram, s.text_weight, scratch, *tensors)
    state = NgramState(mini_tree, scratch, tensors, [strategy._text() for _ in rows], append_only=False)
    draft = strategy.propose(state, Sequences(tokens, length, length, length < 0, length))
    draft.check(len(rows))
    assert draft.tokens.tolist() == drafted.tolist()
    assert draft.grades is not None and torch.equal(draft.grades[drafted >= 0], known[drafted >= 0])
    return draft.tokens.tolist()


def count_in_python(texts: list[list[int]], longest: int, kept: int) -> dict[tuple[int, ...], tuple[Counter, int]]:
    """Context to its most frequent followers (smaller token ids first among equals) and the count of all of them."""
    every: dict[tuple[int, ...], Counter] = {}
    for text in texts:
        for n in range(longest):
            for at in range(n, len(text)):
                every.setdefault(tuple(text[at - n : at]), Counter())[text[at]] += 1
    best = {key: sorted(counts.items(), key=lambda item: (-item[1], item[0])) for key, counts in every.items()}
    return {key: (Counter(dict(best[key][:kept])), counts.total()) for key, counts in every.items()}


def draft_token_in_python(
    text: list[int],
    widths: tuple[int, ...],
    longest: int,
    table: dict[tuple[int, ...], tuple[Counter, int]],
    text_weight: int = 1,
) -> list[int]:
    """Stupid back-off by its definition, one depth after the other."""
    own = count_in_python([text], longest, V)
    context, spine_tokens, others = list(text), [], []
    for width in widths:
        score: dict[int, float] = {}
        order: dict[int, tuple] = {}
        for n in range(longest):  # the longest context has the last word
            if n > len(context):
                break
            key = tuple(context[len(context) - n :])
            mine, theirs = own.get(key, (Counter(), 0)), table.get(key, (Counter(), 0))
            counts = Counter({token: text_weight * count for token, count in mine[0].items()}) + theirs[0]
            total = text_weight * mine[1] + theirs[1]
            score = {token: 0.4 * value for token, value in score.items()}
            for token, count in counts.items():
                seen = [at for at in range(n, len(text)) if text[at] == token and tuple(text[at - n : at]) == key]
                rank = list(theirs[0]).index(token) if token in theirs[0] else 0
                score[token] = count / total
                order[token] = (max(seen), 0, 0) if seen else (-1, n, -rank)
        best = sorted(score, key=lambda token: (int(score[token] * 2**40), order[token]), reverse=True)[:width]
        best += [-1] * (width - len(best))
        spine_tokens.append(best[0])
        others += best[1:]
        context.append(best[0])
    return spine_tokens + others


texts = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_draft_tokens_equal_counts_in_plain_python(rows, widths, data):
    longest, junk = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    proposed = propose(rows, junk=junk, widths=widths, max_ngram=longest)
    assert proposed == [draft_token_in_python(row, tuple(widths), longest, {}) for row in rows]


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=3), st.lists(texts.filter(lambda t: len(t) > 2), min_size=1), st.data())
def test_draft_tokens_from_text_and_table_equal_counts_in_plain_python(rows, corpus, data):
    longest, kept, weight = (data.draw(st.integers(1, most)) for most in (3, 5, 4))
    table = NgramTable.count([(torch.tensor(text), 0) for text in corpus], V, followers=kept)
    proposed = propose(rows, table, widths=(3, 2, 1), max_ngram=longest, text_weight=weight)
    expected = count_in_python(corpus, longest, kept)
    assert proposed == [draft_token_in_python(row, (3, 2, 1), longest, expected, weight) for row in rows]


def test_first_draft_token_of_each_depth_is_continued_and_its_siblings_are_others():
    assert spine((3, 2, 1)).parents == (-1, 0, 1, 2, 0, 0, 1)
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2]
    [draft_tokens] = propose([text], widths=(3, 2, 1))
    assert draft_tokens[:3] == [3, 5, 1]
    assert draft_tokens[5] == 4
    assert len({draft_tokens[0], *draft_tokens[3:5]}) == 3


def test_token_ids_of_a_large_vocabulary_are_kept_apart():
    text = [149_999, 149_998, 7, 149_999, 149_998]
    table = NgramTable.count([(torch.tensor([149_998, 7, 149_999, 149_999, 149_999]), 0)], 150_000)
    assert propose([text] * 3, vocab=150_000, widths=(1, 1, 1)) == [[7, 149_999, 149_998]] * 3
    assert propose([text], table, vocab=150_000, widths=(1, 1), max_ngram=2)[0] == [7, 149_999]


def table_of(*texts: list[int], **options: Any) -> NgramTable:
    return NgramTable.count([(torch.tensor(text), 0) for text in texts], V, **options)


def test_only_what_stands_behind_the_start_is_counted():
    table = NgramTable.count([(torch.tensor([1, 2, 3, 4]), 2)], V)
    assert table.tokens == 2
    assert [order.keys.tolist() for order in table.orders] == [[0], [2, 3], [1 * V + 2, 2 * V + 3]]
    assert table.orders[0].followers.tolist() == [[3, 4]]


def test_table_comes_back_from_its_file(tmp_path):
    table = table_of([1, 2, 3, 1, 2, 4], source="six tokens")
    table.save(tmp_path / "t.safetensors")
    again = NgramTable.load(tmp_path / "t.safetensors")
    assert (again.vocab_size, again.tokens, again.source) == (V, 6, "six tokens")
    for a, b in zip(table.orders, again.orders, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_table_is_written_through_links_beside_what_is_loaded_and_to_files_alone(tmp_path):
    path, link, pipe = tmp_path / "t.safetensors", tmp_path / "link.safetensors", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    table_of([1, 2, 3, 4, 5]).save(link)
    loaded = NgramTable.load(path)
    table_of([1, 2, 3]).save(link)
    assert loaded.orders[0].followers.tolist() == [[1, 2, 3, 4, 5]]
    assert link.is_symlink() and NgramTable.load(path).tokens == 3
    with pytest.raises(SettingsError, match="it is not a regular file"):
        table_of([1, 2, 3]).save(pipe)
    assert pipe.is_fifo() and len(os.listdir(tmp_path)) == 3


def test_file_is_read_again_only_when_it_was_written_again(tmp_path, monkeypatch):
    path, reads, load = tmp_path / "t.safetensors", [], NgramTable.load
    monkeypatch.setattr(NgramTable, "load", staticmethod(lambda p: reads.append(p) or load(p)))
    table_of([1, 2, 3]).save(path)
    cpu = torch.device("cpu")
    assert load_table(path, V, cpu) is load_table(path, V, cpu)
    assert len(reads) == 1
    table_of([1, 2, 3, 4]).save(path)
    os.utime(path, ns=(1, 1))
    assert load_table(path, V, cpu)[0].followers.tolist() == [[1, 2, 3, 4]]
    assert len(reads) == 2


def broken_tables(folder: Path) -> dict[str, tuple[Path, str]]:
    """Kind of defect to a file that has it and what the error must say."""
    good = table_of([1, 2, 3])
    made = {
        name: folder / f"{name}.safetensors"
        for name in ("text", "other", "version", "half", "totals", "range", "vocab")
    }
    made["text"].write_text("no safetensors")
    save_file({"x": torch.zeros(1)}, made["other"])
    about = {"format": "decoders-ngram-table", "version": "1", "vocab_size": "100", "max_ngram": "1", "tokens": "3"}
    save_file({"x": torch.zeros(1)}, made["version"], metadata=about | {"version": "9"})
    save_file({"x": torch.zeros(1)}, made["half"], metadata=about | {"source": ""})
    order = good.orders[0]
    NgramTable((order._replace(totals=order.totals[1:]),), V, 3, "").save(made["totals"])
    order.followers[0, 0] = V
    good.save(made["range"])
    NgramTable.count([(torch.tensor([1, 2, 3]), 0)], 4000).save(made["vocab"])
    return {
        "missing": (folder / "none.safetensors", "none.safetensors cannot be read: No such file"),
        "folder": (folder, "cannot be read|is not an n-gram table"),
        "text": (made["text"], "is not an n-gram table"),
        "other": (made["other"], "its format is None, not 'decoders-ngram-table'"),
        "version": (made["version"], "version '9', this package reads '1'"),
        "half": (made["half"], "is not an n-gram table"),
        "totals": (made["totals"], "is damaged"),
        "range": (made["range"], "is damaged"),
        "vocab": (made["vocab"], "vocabulary of 4000 tokens, the model's has 128"),
    }


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "other", "version", "half", "totals", "range", "vocab"])
def test_table_that_cannot_be_used_is_explained(kind, tmp_path):
    path, message = broken_tables(tmp_path)[kind]
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(SettingsError, match=message):
        decode(model, prompts(), Ngram(table=path), max_new_tokens=2, decoders_config=EAGER)


@pytest.mark.parametrize(
    ("text", "vocab", "message"),
    [
        ([1, 2], 100, "no n-gram of 3 tokens"),
        ([1, 2, 100], 100, "must be 0 … 99, not 1 to 100"),
        ([1], 2**21, "at most 2097151 tokens"),
    ],
)
def test_text_that_cannot_be_counted_is_explained(text, vocab, message):
    with pytest.raises(SettingsError, match=message):
        NgramTable.count([(torch.tensor(text), 0)], vocab)


@pytest.mark.parametrize("widths", [(), (0,), (65,), (1,) * 17])
def test_widths_out_of_range_are_refused(widths):
    with pytest.raises(SettingsError, match="widths"):
        Ngram(widths=widths)


def test_table_in_the_settings_is_used_and_changes_no_token(tmp_path):
    model = decoders.enable(tiny_model("llama"))
    plain = decode(model, prompts(2), "autoregressive", max_new_tokens=24, decoders_config=EAGER)
    table = NgramTable.count([(row, 0) for row in plain.sequences], 128)
    table.save(tmp_path / "t.safetensors")
    without = decode(model, prompts(2), "ngram", max_new_tokens=24, decoders_config=EAGER)
    config = {"table": str(tmp_path / "t.safetensors"), "widths": [1] * 6}
    out = decode(model, prompts(2), "ngram", strategy_config=config, max_new_tokens=24, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain.sequences) and torch.equal(without.sequences, plain.sequences)
    assert out.report.mean_accepted_length > 3 > without.report.mean_accepted_length


@pytest.mark.skipif(not demo.available(), reason="the demo models are not in this checkout")
def test_demo_model_writes_the_same_text_in_fewer_steps():
    model, tokenizer = demo.load("draft")
    decoders.enable(model, tokenizer=tokenizer)
    inputs = dict(tokenizer(demo.prompts("copy")[0].text, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    plain = decode(model, inputs, max_new_tokens=48)
    out = decode(model, inputs, "ngram", max_new_tokens=48, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.report.mean_accepted_length > 1.5


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_draft_tokens_are_those_of_plain_tensor_code():
    compiled = CompiledFunction(mini_tree)
    table = tuple(t for order in table_of([1, 2, 3, 4, 1, 2, 4, 4, 2]).orders for t in order)
    generator = torch.Generator().manual_seed(0)
    for slots in (40, 57):
        tokens, length = torch.randint(0, 5, (3, slots), generator=generator), torch.tensor([slots, 2, 1])
        given = tokens, length, (3, 2), 3, 2, torch.zeros(3, V, dtype=torch.int32), *table
        for one, other in zip(compiled(*given), mini_tree(*given), strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_is_no_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="not a regular file"):
        NgramTable.load(tmp_path / "pipe")
