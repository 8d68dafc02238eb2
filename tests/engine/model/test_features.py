"""What strategies may read of the target: layers, prompts, embedding and head; and how a call's end reaches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import decoders
from decoders.drafters import cache_keyword
from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import Ngram, PromptLookup, Suffix
from decoders.strategies.merged import Merged
from decoders.strategy import Draft, PromptChunk, Sequences, Step, Strategy
from decoders.testing import prompts, tiny_model
from decoders.tree import Topology

EAGER = {"compile": False, "prefill_chunk": 7}


class Reader(Strategy):
    """Keeps all that it is shown; drafts the last token again."""

    name = "reader"
    summary = "Keeps what it is shown."
    hidden_layers = (1, 0)
    prompt_logits = True
    log: Any = None

    def start(self, context: Any) -> Any:
        type(self).log = SimpleNamespace(context=context, chunks=[], steps=[], finished=0)
        return self.log

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        state.chunks.append(chunk)

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, 3))

    def observe(self, state: Any, step: Step) -> None:
        state.steps.append(step)

    def finish(self, state: Any) -> None:
        state.finished += 1


def decode(model: Any, strategy: Any, rows: int = 3, loop: dict[str, Any] = EAGER, **options: Any) -> Any:
    options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True) | options
    return model.generate(**prompts(rows), strategy=strategy, decoders_config=loop, **options)


def texts(out: Any, rows: int = 3) -> list[Tensor]:
    """Prompt and output of each row, without padding."""
    mask = prompts(rows)["attention_mask"]
    return [out.sequences[row, int((mask[row] == 0).sum()) :] for row in range(rows)]


@torch.no_grad()
def layers_of(model: Any, text: Tensor, layer: int) -> Tensor:
    """What a decoder layer gives, ``[N, H]``, in a plain forward."""
    seen: list[Tensor] = []
    hook = model.model.layers[layer].register_forward_hook(lambda _, __, out: seen.append(out))
    model(text[None])
    hook.remove()
    return seen[0][0]


def near(ours: Tensor, plain: Tensor) -> bool:
    return bool((ours - plain).abs().max() <= 1e-4 * plain.abs().max().clamp(min=1))


@pytest.mark.slow  # in the quick run a compiled module reads what a layer gave
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the compiler's own
def test_compiled_steps_hold_what_the_layers_gave(traced_or_compiled: str) -> None:
    check_steps_and_prompts("llama", compile=True)


@pytest.mark.parametrize("design", ["llama", "gemma2"])
def test_steps_and_prompts_hold_what_the_layers_gave(design: str) -> None:
    check_steps_and_prompts(design, compile=False)


def check_steps_and_prompts(design: str, compile: bool) -> None:
    model = decoders.enable(tiny_model(design))
    out = decode(model, Reader(), loop=EAGER | {"compile": compile})
    assert (out.report.compiled_steps > 0) == compile
    log = Reader.log
    for row, text in enumerate(texts(out)):
        plain = torch.stack([layers_of(model, text, layer) for layer in (1, 0)], dim=1)
        place = int(log.steps[0].sequences.prompt_length[row]) - 1
        read = torch.cat([chunk.layers[row][chunk.valid[row]] for chunk in log.chunks])
        assert near(read, plain[:place])
        for step in log.steps:
            assert near(step.layers[row, 0], plain[place])
            place += int(step.emitted[row])


def test_prompts_are_handed_over_whole_in_order_and_without_their_last_tokens(fresh) -> None:
    for _ in range(2):  # the second time their keys and values could be taken from the first
        out = decode(fresh, Reader())
        assert out.report.reused == [0, 0, 0]
        log = Reader.log
        assert [chunk.tokens.shape[1] for chunk in log.chunks] == [7, 7, 7, 3]
        with torch.no_grad():
            for row, text in enumerate(texts(out)):
                count = int(log.steps[0].sequences.prompt_length[row]) - 1
                whole = {
                    name: torch.cat([getattr(chunk, name)[row][chunk.valid[row]] for chunk in log.chunks])
                    for name in ("tokens", "positions", "hidden", "logits")
                }
                plain = fresh(text[None, :count], output_hidden_states=True)
                assert torch.equal(whole["tokens"], text[:count])
                assert torch.equal(whole["positions"], torch.arange(count))
                assert near(whole["hidden"], plain.hidden_states[-1][0])
                assert near(whole["logits"], plain.logits[0])


def test_who_asks_for_nothing_gets_nothing_and_runs_the_pass_of_all(llama) -> None:
    class Plain(Reader):
        hidden_layers = ()
        prompt_logits = False

    decode(llama, Plain())
    assert Plain.log.steps[0].layers is None
    assert Plain.log.chunks[0].layers is None and Plain.log.chunks[0].logits is None
    engine = vars(llama)["generate"].engine()
    assert engine.forward_pass_for(PromptLookup()) is engine.forward_pass_for(Plain()) is engine.forward_pass
    assert engine.forward_pass_for(Reader()) is not engine.forward_pass
    # Nor do those that ask leave anything on the pass of all: it has the hook of the output head alone.
    decode(llama, Reader())
    hooked = [
        name for name, part in engine.target.model.named_modules() if part._forward_hooks or part._forward_pre_hooks
    ]
    assert hooked == ["lm_head"] and engine.target.layers == ()


@pytest.mark.parametrize("layers, message", [((2,), "layers 0 … 1"), ((-3,), "layer -3"), ([0], "tuple of integers")])
def test_layers_that_there_are_not_are_refused(llama, layers, message: str) -> None:
    strategy = Reader()
    strategy.hidden_layers = layers
    with pytest.raises(SettingsError, match=message):
        decode(llama, strategy)


def test_a_negative_index_counts_from_the_end(llama) -> None:
    decode(llama, Reader())
    expected, strategy = Reader.log.steps[0].layers, Reader()
    strategy.hidden_layers = (-1, -2, -1)
    decode(llama, strategy)
    assert torch.equal(Reader.log.steps[0].layers, expected[:, :, [0, 1, 0]])


def test_parts_of_a_merged_strategy_get_their_own_layers(llama) -> None:
    class Other(Reader):
        name = "other"
        hidden_layers = (0,)
        prompt_logits = False

    out = decode(llama, Merged([PromptLookup(), Reader(), Other()]))
    both, one = Reader.log, Other.log
    assert torch.equal(both.chunks[0].layers[:, :, 1:], one.chunks[0].layers)
    assert both.chunks[0].logits is not None and one.chunks[0].logits is None
    assert both.steps[0].layers.shape[2] == 2 and one.steps[0].layers.shape[2] == 1
    assert both.finished == one.finished == 1
    assert torch.equal(out.sequences, decode(llama, "autoregressive").sequences)


def test_a_call_that_fails_is_finished_and_its_error_stays_the_first(llama) -> None:
    class Breaks(Reader):
        def observe(self, state, step):
            raise RuntimeError("first")

        def finish(self, state):
            super().finish(state)
            raise ValueError("second")

    with pytest.raises(RuntimeError, match="first") as caught:
        decode(llama, Breaks())
    assert Breaks.log.finished == 1
    assert any("finish of 'reader' failed as well: ValueError('second')" in note for note in caught.value.__notes__)

    class Late(Reader):
        def finish(self, state):
            raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        decode(llama, Late())


def test_a_part_that_cannot_start_ends_those_that_did(llama) -> None:
    class Fails(Reader):
        name = "fails"

        def start(self, context):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        decode(llama, Merged([Reader(), Fails()]))
    assert Reader.log.finished == 1


def test_a_candidate_of_auto_that_cannot_start_ends_those_that_did(llama, monkeypatch) -> None:
    def fails(self, context):
        raise ValueError("no")

    finished = []
    monkeypatch.setattr(Ngram, "start", fails)
    monkeypatch.setattr(Suffix, "finish", lambda self, state: finished.append(state))
    with pytest.raises(ValueError, match="no"):
        decode(llama, "auto")
    assert len(finished) == 1


def test_memory_is_kept_by_strategy_and_key_and_can_be_forgotten(fresh) -> None:
    class Keeps(Reader):
        name = "keeps"

        def start(self, context):
            context.memory("seen", list).append(1)
            state = super().start(context)
            state.seen, state.other = len(context.memory("seen", list)), context.memory("other", dict)
            return state

    class AlsoKeeps(Keeps):
        name = "also"

    assert [decode(fresh, s) and type(s).log.seen for s in (Keeps(), Keeps(), AlsoKeeps(), Keeps())] == [1, 2, 1, 3]
    decode(fresh, Merged([PromptLookup(), Keeps()]))
    assert Keeps.log.seen == 4, "a part has the memory that it has alone"
    decode(fresh, Keeps(), loop=EAGER | {"memory": False})
    assert Keeps.log.seen == 0, "every call gets a new one, and so does every time that it asks"
    decoders.forget(fresh)
    out = decode(fresh, Keeps())
    assert Keeps.log.seen == 1 and out.report.reused == [0, 0, 0]
    decode(fresh, "autoregressive")
    decoders.forget(fresh)
    assert decode(fresh, "autoregressive").report.reused == [0, 0, 0]


@pytest.mark.parametrize("design", ["gemma2", "cohere", "gpt2", "opt"])
def test_head_and_embedding_are_the_targets_own(design: str) -> None:
    model = decoders.enable(tiny_model(design))

    class Plain(Reader):
        hidden_layers = ()

        def observe(self, state, step):
            state.steps.append((state.context.head(step.hidden), step.logits))
            ids = torch.tensor([[3, 5]])
            state.embedded = state.context.embed(ids), model.get_input_embeddings()(ids)

    decode(model, Plain(), rows=1)
    for ours, plain in Plain.log.steps:
        assert near(ours, plain)
    assert torch.equal(*Plain.log.embedded)


class Layered(torch.nn.Module):
    """A drafter of one decoder layer over an embedding and a feature."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=1
        )  # fmt: skip
        self.fc = torch.nn.Linear(2 * hidden, hidden)
        self.layer, self.rotary = LlamaDecoderLayer(self.config, 0), LlamaRotaryEmbedding(self.config)
        self.cache_keyword = cache_keyword(self.layer)

    def forward(self, embedded: Tensor, feature: Tensor, *, attention_mask, position_ids, cache) -> Tensor:
        states = self.fc(torch.cat([embedded, feature], -1))
        return self.layer(
            states, attention_mask=attention_mask, position_ids=position_ids,
            position_embeddings=self.rotary(states, position_ids), **{self.cache_keyword: cache},
        )  # fmt: skip


class Attending(torch.nn.Module):
    """A drafter with an attention of its own, and without a config."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc, self.qkv = torch.nn.Linear(2 * hidden, hidden), torch.nn.Linear(hidden, 3 * hidden)

    def forward(self, embedded: Tensor, feature: Tensor, *, attention_mask, position_ids, cache) -> Tensor:
        states = self.fc(torch.cat([embedded, feature], -1))
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(states).chunk(3, -1))
        if cache is not None:
            key, value = cache.update(key, value, 0)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return states + attended.transpose(1, 2).flatten(2)


class WithModule(Reader):
    """Reads prompts through a module, and in every step two branches of two nodes behind the root."""

    hidden_layers = (0,)
    module: Any = None
    nodes: Any = None

    def start(self, context: Any) -> Any:
        state, one = super().start(context), torch.zeros(1, 1, self.module.fc.out_features)
        state.passes = context.module(self.module, ahead=8, example=(one, one))
        state.read, state.branches = [], []
        return state

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        given = state.context.embed(chunk.tokens), chunk.layers[:, :, 0]
        state.read.append((chunk, state.passes(chunk.positions[:, 0], *given)))

    def observe(self, state: Any, step: Step) -> None:
        tree = Topology.branches(2, 2).tensors(len(step.nodes), step.nodes.device)
        base, given = step.sequences.prompt_length - 1, self.nodes.expand(len(step.nodes), -1, -1)
        state.branches.append(state.passes(base, given, given, tree=tree))
        # The last two nodes again: those before are in the cache.
        state.branches.append(state.passes(base, given[:, 3:], given[:, 3:], tree=tree))


@pytest.mark.slow  # .ci/run runs it traced
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the compiler's own
def test_a_compiled_module_gets_a_slot_cache_and_tree_masks(traced_or_compiled: str) -> None:
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1))
    check_slot_cache_and_tree_masks(model, compile=True, rows=1)


@pytest.mark.parametrize("kind", [Layered, Attending])
def test_a_module_gets_a_slot_cache_and_tree_masks(llama, kind: type[torch.nn.Module]) -> None:
    check_slot_cache_and_tree_masks(llama, compile=False, rows=3, kind=kind)


def check_slot_cache_and_tree_masks(llama, compile: bool, rows: int, kind: Any = Layered) -> None:
    torch.manual_seed(0)
    plain = WithModule.module = kind(llama.config.hidden_size).eval()
    nodes = WithModule.nodes = torch.randn(1, 5, llama.config.hidden_size)
    out = decode(llama, WithModule(), rows, loop=EAGER | {"compile": compile})
    log = WithModule.log
    for row, text in enumerate(texts(out, rows)):
        read = torch.cat([states[row][chunk.valid[row]] for chunk, states in log.read])
        count = len(read)
        embedded = llama.get_input_embeddings()(text[None, :count])
        features = layers_of(llama, text[:count], 0)[None]
        for path in ([0, 1, 2], [0, 3, 4]):
            mask = torch.full((count + 3, count + 3), -1e30).triu(1)[None, None]
            with torch.no_grad():
                expected = plain(
                    torch.cat([embedded, nodes[:, path]], 1), torch.cat([features, nodes[:, path]], 1), attention_mask=mask,
                    position_ids=torch.arange(count + 3)[None], cache=None,
                )[0]  # fmt: skip
            assert near(read, expected[:count])
            assert near(log.branches[0][row, path], expected[count:])
        assert near(log.branches[1][row], log.branches[0][row, 3:])


def test_a_module_elsewhere_is_refused(llama) -> None:
    WithModule.module = Layered(llama.config.hidden_size).to("meta")
    with pytest.raises(UnsupportedError, match="Layered is on meta"):
        decode(llama, WithModule())


def test_layers_that_nobody_reads_are_not_kept(fresh) -> None:
    """A strategy that asks for layers in its steps alone is shown no prompt."""

    class Steps(PromptLookup):
        name = "steps"
        hidden_layers = (0,)

    for _ in range(2):
        decode(fresh, Steps())
    target = vars(fresh)["generate"].engine().forward_pass_for(Steps()).target
    assert target.taps.states is not None and target.taps.states._seen == []
