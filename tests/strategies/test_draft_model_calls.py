"""Draft models in unusual calls: short prompts, long texts, odd drafts, everything that ``generate`` can be asked for."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.engine.decode.drafters.counts import MIN_PENDING
from decoders.engine.model.compiled.forward_pass import ForwardPass
from decoders.strategies import Speculative, Staged, Threshold
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import Replay, assert_same_tokens, decode, prompts, reference, tiny_draft, tiny_model
from decoders.testing.models import ARCHITECTURES, VOCAB, Architecture

from ..turns import slow_but

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)
KINDS: dict[str, Strategy] = {
    "chain": Speculative(),
    "heuristic chain": Speculative(schedule="heuristic"),
    "one token": Speculative(length=1),
    "static tree": Speculative(tree="static"),
    "dynamic tree": Speculative(tree="dynamic"),
    "threshold": Threshold(max_length=6),
    "threshold tree": Threshold(tree="dynamic", max_length=8),
    "staged": Staged(stage="prompt_lookup"),
    "staged chain": Staged(stage="prompt_lookup", children=1),
}


def every_kind(quick: str) -> pytest.MarkDecorator:
    """All kinds, one of them in the quick run: tests take turns."""
    return pytest.mark.parametrize("strategy", slow_but([KINDS[quick]], KINDS.values()), ids=list(KINDS))


def llama(seed: int = 0, **options: Any) -> PreTrainedModel:
    return Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | options))(seed)


def ids(*lengths: int) -> dict[str, Tensor]:
    """A left-padded batch of random prompts."""
    width, generator = max(lengths), torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, tokens, 0), "attention_mask": mask.long()}


def assert_exact(
    model: PreTrainedModel, draft: PreTrainedModel | None, strategy: Any, inputs: dict[str, Tensor], new: int = 24,
    draws: Sequence[dict[str, Any]] = (SAMPLING, {}), **options: Any,
) -> Any:  # fmt: skip
    """Sampled and greedy text are those without a draft. Returns the report of the last call."""
    options = dict(max_new_tokens=new) | options
    assistant = {} if draft is None else {"assistant_model": draft}
    for draw in draws:
        plain = ("autoregressive", dict(decoders_config=EAGER)) if draw else (None, {})
        expected = reference(model, inputs, plain[0], **plain[1], **options, **draw)
        out = decode(model, inputs, strategy, decoders_config=EAGER, **assistant, **options, **draw)
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, f"{strategy!r}, {draw}")
    return out.report


@every_kind("threshold")
@pytest.mark.parametrize("lengths", [(1,), (1, 2, 9)], ids=str)
def test_behind_prompts_of_one_and_two_tokens_it_writes_what_plain_decoding_writes(target, near, strategy, lengths):
    assert_exact(target, near, strategy, ids(*lengths), draws=[SAMPLING])


@pytest.mark.slow
@every_kind("chain")
def test_a_text_that_outgrows_every_view_is_what_plain_decoding_writes(target, near, strategy):
    assert_exact(target, near, strategy, prompts(2), new=48, draws=[SAMPLING])


def test_the_target_as_its_own_draft_is_right_over_the_whole_of_a_long_text(target):
    for strategy in (Speculative(length=4), Speculative(tree="static", length=4)):
        report = assert_exact(target, target, strategy, prompts(2), new=50, draws=[{}])
        assert report.accepted_lengths == [0, 0, 0, 0, 20]


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_staged_drafts_of_a_repeating_text_stay_within_their_length(looping, length):
    """The stage is right so often that the passes could write many times the length."""
    strategy = Staged(stage="prompt_lookup", stage_config={"length": 64}, passes=6, length=length, children=1)
    report = assert_exact(looping, looping, strategy, prompts(2), new=40, draws=[{}])
    assert len(report.accepted_lengths) <= length + 1 and report.mean_accepted_length > (length + 1) / 2
    assert report.stages[0].tokens <= 2 * report.steps * length


@every_kind("staged")
def test_a_draft_whose_context_ends_before_the_text_does(target, strategy):
    draft = llama(max_position_embeddings=32)
    draft.load_state_dict(tiny_draft("llama").state_dict())
    assert_exact(target, draft, strategy, prompts(2), new=16)
    assert_exact(target, tiny_model("gpt2", seed=1), strategy, prompts(2), new=8, draws=[{}])


@pytest.mark.slow
def test_a_draft_with_learnt_positions_and_a_short_context(target):
    draft = Architecture("gpt2", MappingProxyType(dict(ARCHITECTURES["gpt2"].options) | {"n_positions": 16}))(0)
    for kind in ("chain", "dynamic tree", "threshold", "staged"):
        assert_exact(target, draft, KINDS[kind], prompts(2), new=12, draws=[SAMPLING])


@pytest.mark.slow
@every_kind("static tree")
def test_a_draft_with_a_sliding_window_changes_no_token(target, strategy):
    draft = tiny_model("mistral")
    draft.load_state_dict(tiny_draft("llama").state_dict())
    assert_exact(target, draft, strategy, prompts(3), new=40, draws=[{}])


@pytest.mark.parametrize("vocab", [pytest.param(112, marks=pytest.mark.slow), 160])
@every_kind("dynamic tree")
def test_heads_padded_to_another_size(target, strategy, vocab):
    draft = llama(vocab_size=vocab)
    with torch.no_grad():
        for own, other in zip(draft.parameters(), tiny_draft("llama").parameters(), strict=True):
            rows = min(len(own), len(other))
            own[:rows] = other[:rows]
        if vocab > VOCAB:
            draft.lm_head.weight[VOCAB:] *= 5  # padding that the draft would love to propose
    report = assert_exact(target, draft, strategy, prompts(3))
    assert report.accepted > 0


@pytest.mark.in_turns
@pytest.mark.parametrize("vocab", [pytest.param(112, marks=pytest.mark.slow), 160])
@pytest.mark.parametrize(
    "verifier, strategy",
    [
        ("rejection", Speculative()),
        ("block", Threshold()),
        ("tree_rejection", Speculative(tree="static")),
        ("tree_rejection", Staged(stage="prompt_lookup")),
    ],
    ids=str,
)
def test_other_verifiers_with_heads_padded_to_another_size(target, verifier, strategy, vocab):
    draft, options = llama(vocab_size=vocab), dict(max_new_tokens=12, decoders_config=EAGER, verifier=verifier)
    assert torch.equal(
        decode(target, prompts(2), strategy, assistant_model=draft, **options).sequences,
        decode(target, prompts(2), max_new_tokens=12).sequences,
    )
    drawn = [
        decode(target, prompts(2), strategy, assistant_model=draft, **options, **SAMPLING).sequences for _ in range(2)
    ]
    assert torch.equal(*drawn) and int(drawn[0].max()) < VOCAB


@pytest.mark.slow
@every_kind("staged")
def test_a_draft_in_bfloat16(target, strategy):
    report = assert_exact(target, tiny_draft("llama").to(torch.bfloat16), strategy, prompts(3))
    assert report.accepted > 0


@every_kind("threshold tree")
def test_several_sequences_of_one_prompt_are_drawn_by_themselves(target, near, strategy):
    options = dict(num_return_sequences=3, max_new_tokens=16, decoders_config=EAGER, **SAMPLING)
    expected = decode(target, prompts(2), "autoregressive", **options).sequences
    out = decode(target, prompts(2), strategy, assistant_model=near, **options).sequences
    assert torch.equal(out, expected) and len({tuple(row) for row in out.tolist()}) == 6


def test_the_draft_is_left_as_it_was_and_still_generates(target, near):
    weights = {name: tensor.clone() for name, tensor in near.state_dict().items()}
    config, attributes, plain = near.config.to_dict(), set(vars(near)), decode(near, prompts(), max_new_tokens=8)
    for strategy in KINDS.values():
        decode(target, prompts(2), strategy, assistant_model=near, max_new_tokens=6, decoders_config=EAGER)
    assert near.config.to_dict() == config and set(vars(near)) == attributes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in near.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in near.modules())
    assert torch.equal(decode(near, prompts(), max_new_tokens=8).sequences, plain.sequences)
    assisted = type(target).generate(target, **prompts(), assistant_model=near, max_new_tokens=12, do_sample=False)
    assert torch.equal(assisted, decode(target, prompts(), max_new_tokens=12).sequences)


def test_a_draft_in_training_mode_drafts_as_in_evaluation_and_stays_in_training(target):
    draft = tiny_draft("llama").train()
    assert_exact(target, draft, Speculative(), prompts(2))
    assert draft.training


def test_weights_of_the_draft_changed_between_calls_are_seen(target):
    draft = tiny_model("llama")
    first = assert_exact(target, draft, Speculative(length=3), prompts(), draws=[{}])
    assert first.acceptance_rate == 1
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    assert assert_exact(target, draft, Speculative(length=3), prompts(), draws=[{}]).accepted < first.accepted / 4
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    assert assert_exact(target, draft, Speculative(length=3), prompts()).acceptance_rate == 1


@pytest.mark.slow
def test_one_draft_for_two_targets(target, near):
    other = decoders.enable(tiny_model("qwen3"))
    for model, draw in ((target, SAMPLING), (other, {}), (target, {})):
        assert_exact(model, near, Speculative(), prompts(2), draws=[draw])


def test_an_enabled_draft(target):
    draft = decoders.enable(tiny_draft("llama"))
    own = vars(draft)["generate"]
    assert_exact(target, draft, Speculative(tree="dynamic"), prompts(2), draws=[SAMPLING])
    assert vars(draft)["generate"] is own
    assert_exact(draft, target, Speculative(), prompts(2), draws=[{}])


def test_a_draft_is_not_kept_alive():
    model, draft = decoders.enable(tiny_model("llama")), tiny_draft("llama")
    decode(model, prompts(), Speculative(), assistant_model=draft, max_new_tokens=8, decoders_config=EAGER)
    gone = weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_of_an_enabled_model_that_has_drafted(near, copied):
    model = decoders.enable(tiny_model("llama"))
    assert_exact(model, near, Speculative(), prompts(2), draws=[{}])
    assert_exact(copied(model), near, Speculative(), prompts(2), draws=[SAMPLING])


def test_a_block_that_outgrows_the_cache(target, near):
    wide = Speculative(tree="dynamic", length=8, nodes=256, beam=8, children=32)
    report = assert_exact(target, near, wide, prompts(2), new=16, draws=[{}])
    assert report.nodes > 200


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another drafter"])
def test_a_round_begins_with_the_tokens_that_its_model_has_not_read(monkeypatch, target, beside):
    """Fewer would leave holes in the draft's cache, which cost acceptance and change no token; more would be run for nothing."""
    run, passes = ForwardPass.__call__, []
    plain = decode(target, prompts(2), max_new_tokens=40).sequences
    forward = vars(target)["generate"].engine().forward_pass

    def noted(self, given):
        passes.append((self is forward, given.nodes.shape[1]))
        return run(self, given)

    monkeypatch.setattr(ForwardPass, "__call__", noted)
    start = prompts(2)["attention_mask"].argmax(1).tolist()
    known = Replay(
        texts=tuple(tuple(row[s:].tolist()) for row, s in zip(plain, start, strict=True)), length=7, wrong_every=0
    )
    strategy = Merged([Speculative(length=3), known]) if beside else Speculative(length=3)
    draft = tiny_model("llama")  # the target's own weights in a model of its own
    out = decode(target, prompts(2), strategy, assistant_model=draft, max_new_tokens=40, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain)
    assert out.report.accepted_lengths == [0] * (7 if beside else 3) + [2 * 40 // (8 if beside else 4)]
    rounds: list[list[int]] = [[]]  # widths of a round's passes, the target's last
    for of_target, width in passes:
        rounds[-1].append(width)
        if of_target:
            rounds.append([])
    # All nodes of the last block may have been accepted if another drafter was right; and one more token was.
    least = MIN_PENDING + 1
    assert rounds[1:-1] == [[12, least, least, 11] if beside else [least, least, least, 4]] * (len(rounds) - 2)
    assert len(rounds) > 4
