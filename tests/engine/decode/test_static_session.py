"""Static sizes and kept recordings, with the switch between the paths turned on a CPU: the same tokens, few shapes, much reuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteriaList

import decoders
from decoders.common import host_reads
from decoders.engine.decode import engine
from decoders.engine.decode.drafters.shared_slots import SharedSlots
from decoders.engine.decode.session import Session
from decoders.engine.model.recordings import WARM_UP_STEPS, Recordings
from decoders.engine.model.target import Target
from decoders.strategies import EarlyExit, Lookahead, Mtp, Ngram, PromptLookup, Speculative, Staged, Threshold
from decoders.strategies.mtp import use_mtp_layers
from decoders.strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy
from decoders.testing import decode, prompts, reference, tiny_draft, tiny_model
from decoders.testing.models import ARCHITECTURES, Architecture

from ...tape_recorder import TapeRecorder


class FromLayers(Strategy):
    """Drafts what a hidden layer's first numbers spell."""

    name = "from_layers"
    summary = "Tokens made of a hidden layer."
    hidden_layers = (0, -1)
    on_device = True

    def start(self, context: Context) -> torch.Tensor:
        return torch.zeros(context.rows, 3, dtype=torch.int64)

    def prefill(self, state: torch.Tensor, chunk: PromptChunk) -> None:
        state.copy_(chunk.layers[:, 0, 1, :3].abs() * 9)

    def propose(self, state: torch.Tensor, sequences: Sequences) -> Draft:
        return Draft.chain(state.clone())

    def observe(self, state: torch.Tensor, step: Step) -> None:
        state.copy_(step.layers[:, 0, 0, :3].abs() * 9)


class OnHost(Strategy):
    """A third party's, which says nothing of where it works: drafts the row's last token again, as often as the host finds it."""

    name = "on_host"
    summary = "The last token, over and over."

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        rows = [
            tokens[:length] for tokens, length in zip(sequences.tokens.tolist(), sequences.length.tolist(), strict=True)
        ]
        most = max(min(row.count(row[-1]), 9) for row in rows)
        drafts = [[row[-1]] * min(row.count(row[-1]), 9) for row in rows]
        padded = [draft + [-1] * (most - len(draft)) for draft in drafts]
        return Draft.chain(torch.tensor(padded, device=sequences.tokens.device))


def model(seed: int = 0) -> PreTrainedModel:
    return decoders.enable(tiny_model("llama", seed))


def recordings(model: PreTrainedModel) -> list[Recordings]:
    return [s.recordings for s in model.generate.engine().sessions._free if s.recordings is not None]


END, SIZE = 1, 288


def byte_tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def random_calls(count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Strategies and arguments: prompts of 2 to 200 tokens in batches of 1 to 5, drawn and not, a grammar now and then.

    Some strategies and grammars need the host between steps.
    """
    choice = random.Random(0)
    strategies = [
        "autoregressive", PromptLookup(branches=2), PromptLookup(length=5), Lookahead(), Speculative(length=3),
        Speculative(length=2, schedule="heuristic"), "suffix", Threshold(), "auto", "prompt_lookup+suffix", OnHost(),
        Speculative(tree="dynamic", length=2, nodes=5, children=2, beam=2),
    ]  # fmt: skip
    for _ in range(count):
        rows, width = choice.randint(1, 5), round(2 ** choice.uniform(1, 7.6))
        ids = torch.tensor([[choice.randint(2, SIZE - 1) for _ in range(width)] for _ in range(rows)])
        given: dict[str, Any] = dict(max_new_tokens=choice.randint(1, 9))
        if choice.random() < 0.4:
            given |= dict(do_sample=True, temperature=choice.uniform(0.5, 1.5), top_k=0, seed=choice.randint(0, 99))
        if choice.random() < 0.2:
            backend = choice.choice(["table", "llguidance"])
            given |= dict(grammar=decoders.regex("[0-9]{4}-[0-9]{2}", backend=backend), eos_token_id=END)
        yield choice.choice(strategies), dict(input_ids=ids, attention_mask=torch.ones_like(ids)) | given


@pytest.mark.parametrize(("number", "least"), [(40, 0), pytest.param(120, 5, marks=pytest.mark.slow)])
def test_a_day_of_random_calls(device: TapeRecorder, monkeypatch: pytest.MonkeyPatch, number: int, least: int) -> None:
    options = MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": SIZE, "num_hidden_layers": 1})
    target, draft = Architecture("llama", options)(0), Architecture("llama", options)(1)
    decoders.enable(target, tokenizer=byte_tokenizer())
    calls = list(random_calls(number))
    with monkeypatch.context() as dynamic:
        dynamic.setattr(host_reads, "static_shapes", lambda device: False)
        dynamic.setattr(engine, "recorder_of", lambda device: None)
        twin = decoders.enable(Architecture("llama", options)(0), tokenizer=byte_tokenizer())
        expected = [twin.generate(strategy="autoregressive", **given) for _, given in calls]
    read: set[tuple] = set()
    prefill = Target.prefill

    def noted(self: Target, tokens: torch.Tensor, *args: Any) -> None:
        read.add((id(self), tuple(tokens.shape), args[1].slots))
        prefill(self, tokens, *args)

    monkeypatch.setattr(Target, "prefill", noted)
    reused = 0
    for (strategy, given), wanted in zip(calls, expected, strict=True):
        helped = dict(assistant_model=draft) if isinstance(strategy, Speculative | Threshold) else {}
        before = sum(r.reused for r in recordings(target))
        found = target.generate(strategy=strategy, **given, **helped)
        reused += sum(r.reused for r in recordings(target)) > before
        assert torch.equal(found, wanted), (strategy, given)
    rows, chunks, slots = 4, 5, 2  # sizes that up to 5, 512 and 512 of them are rounded up to
    assert len(read) <= 2 * rows * chunks * slots
    assert reused > least and device.replayed > 2 * device.recorded


@pytest.mark.parametrize(
    "strategy",
    [
        "autoregressive",
        PromptLookup(branches=2),
        Ngram(),
        Lookahead(),
        Speculative(length=3),
        pytest.param(Speculative(tree="static"), marks=pytest.mark.slow),
        pytest.param(Staged(), marks=pytest.mark.slow),
        FromLayers(),
        EarlyExit(length=3),
        pytest.param(EarlyExit(tree="dynamic"), marks=pytest.mark.slow),
    ],
    ids=lambda strategy: strategy if isinstance(strategy, str) else type(strategy).__name__,
)
def test_a_later_call_replays_what_an_earlier_one_has_recorded(device: TapeRecorder, strategy: Any) -> None:
    target, reports = model(), []
    helped = dict(assistant_model=tiny_model("llama", 1)) if getattr(strategy, "needs_assistant", False) else {}
    for _ in range(2):
        out = decode(target, prompts(3), strategy, max_new_tokens=10, do_sample=True, seed=4, top_k=0, **helped)
        reports.append(out.report)
        if len(reports) == 1:
            tokens = out.sequences
    (kept,) = recordings(target)
    assert (kept.recorded, kept.reused) == (1, 1) and torch.equal(out.sequences, tokens)
    first, second = reports
    assert first.rows == second.rows == 3 and len(second.new_tokens) == 3
    assert second.replayed_steps == second.steps == first.steps and second.accepted == first.accepted
    assert first.replayed_steps == first.steps - WARM_UP_STEPS and second.compiled_steps == 0
    assert [vars(s) | {"forward_seconds": 0, "drafter_seconds": 0} for s in first.stages] == [
        vars(s) | {"forward_seconds": 0, "drafter_seconds": 0} for s in second.stages
    ]


def test_a_drafter_with_a_cache_of_its_own_is_replayed(device: TapeRecorder) -> None:
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers builds no MTP layers")
    target = model()
    plain = decode(target, prompts(3), "autoregressive", max_new_tokens=10)
    decoders.release(target)
    target.config.num_mtp_layers = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        use_mtp_layers(target, modeling.MtpModel(target, 2).eval())
    reports = []
    for _ in range(2):
        out = decode(target, prompts(3), Mtp(tree="static", children=32, nodes=40), max_new_tokens=10)
        assert torch.equal(out.sequences, plain.sequences)
        reports.append((out.report.accepted, out.report.steps))
    (kept,) = recordings(target)
    assert (kept.recorded, kept.reused) == (1, 1) and reports[0] == reports[1]


def test_rows_that_fill_a_batch_up_are_nobodys_business(device: TapeRecorder) -> None:
    """Processors, criteria and streamers see the rows of the call; so do the report and the result."""
    seen: set[int] = set()

    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.add(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool)

    out = decode(
        model(), prompts(3), "prompt_lookup", max_new_tokens=6, repetition_penalty=1.2,
        stopping_criteria=StoppingCriteriaList([stop]), output_logits=True,
    )  # fmt: skip
    assert seen == {3} and out.sequences.shape[0] == 3
    assert out.report.rows == len(out.report.new_tokens) == len(out.report.reused) == 3
    assert out.logits[0].shape[0] == 3


def test_rows_that_grow_and_weights_that_move_drop_what_was_recorded(device: TapeRecorder) -> None:
    target = model()
    run = lambda new: decode(target, prompts(2), "autoregressive", max_new_tokens=new)  # noqa: E731
    run(8)
    (kept,) = recordings(target)
    assert len(kept) == 1
    with torch.no_grad():
        target.model.norm.weight.mul_(1.5)  # in place: the recording reads the new values
    plain = target.generate(**prompts(2), max_new_tokens=8, do_sample=False)
    assert torch.equal(run(8).sequences, plain) and kept.reused == 1
    run(300)
    assert recordings(target) == [kept] and kept.recorded == 2  # more slots: recorded anew
    target.model.norm.weight.data = target.model.norm.weight.data.clone()
    run(8)
    assert kept.recorded == 3


def test_a_draft_model_whose_weights_have_moved_is_recorded_anew(device: TapeRecorder) -> None:
    target, draft = model(), tiny_draft("llama")
    run = lambda: decode(target, prompts(2), "speculative", max_new_tokens=10, assistant_model=draft)  # noqa: E731
    run()
    run()
    (kept,) = recordings(target)
    assert (kept.recorded, kept.reused) == (1, 1)
    for parameter in draft.parameters():  # as after draft.cpu() and draft.cuda()
        parameter.data = parameter.data.clone()
    run()
    assert (kept.recorded, kept.reused) == (2, 1)


def test_rows_in_the_targets_slots_have_the_same_table_of_addresses_in_every_call(device: TapeRecorder) -> None:
    engine = model().generate.engine()
    owner = Session(engine.target, 2, 256)
    rows = SharedSlots.of(engine.target, owner).rows
    owner.arrange([1, 1], [1, 1], [9, 9], [False] * 2, owner.rows.sampling)
    assert SharedSlots.of(engine.target, owner).rows.buffers is rows.buffers
    owner.grow(512)
    assert SharedSlots.of(engine.target, owner).rows.buffers.slots == 512


def test_a_draft_in_slots_that_grow_is_recorded_anew(device: TapeRecorder) -> None:
    target, strategy = model(), EarlyExit(length=3)
    expected = reference(target, prompts(2), max_new_tokens=170).sequences
    for new in (8, 170, 170, 170):
        out = decode(target, prompts(2), strategy, max_new_tokens=new)
        assert torch.equal(out.sequences, expected[:, : out.sequences.shape[1]])
        assert out.report.new_tokens == [new] * 2
    assert device.recorded == 3 and sum(kept.reused for kept in recordings(target)) == 1


def test_vectors_of_fewer_prompts_than_a_bucket_has_rows(device: TapeRecorder) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    given = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    out = decode(model, given, "prompt_lookup", max_new_tokens=6)
    assert torch.equal(out.sequences, decode(model, inputs, max_new_tokens=6).sequences[:, 24:])
