"""The compiled loop, on one model: it gives the same tokens, and what has been compiled once serves every later call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from transformers import LogitsProcessor, PreTrainedModel

import decoders
from decoders.engine.decode.verify import StepFunctions
from decoders.engine.model import torch_compat
from decoders.engine.model.blocks import PassInput, after_text, causal_block
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.compiled import tiers
from decoders.engine.model.compiled.regions import fixed
from decoders.engine.model.compiled.tiers import PassKind
from decoders.engine.model.target import Target
from decoders.errors import UnsupportedError
from decoders.report import Report
from decoders.strategies import PromptLookup
from decoders.testing import Replay, prompts, reference, tiny_draft, tiny_model
from decoders.testing import decode as decode_once
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import Matched, TokenAutomaton
from decoders.tree import Topology, TreeTensors

from .test_compiled_drafts import assert_later_calls_compile_nothing

COMPILED = {"compile": True}
#: Dynamo traces layer by layer; how layers share graphs is tested in tests/exactness.
one_layer = functools.partial(tiny_model, "llama", num_hidden_layers=1)


def decode(model: PreTrainedModel, inputs: dict, strategy: Any = None, **options: Any) -> Any:
    if strategy is not None:
        options = {"decoders_config": COMPILED} | options
    return decode_once(model, inputs, strategy, **options)


@pytest.fixture(scope="module", params=["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def compiled(
    request: pytest.FixtureRequest, only_trace: Callable[[pytest.MonkeyPatch], None]
) -> Iterator[PreTrainedModel]:
    """A model that has generated for one row and for several; all that a process compiles for it.

    Here it is about what is compiled, and when. What inductor writes is run in test_compiled_grammar.py, which CI runs.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "traced":
            only_trace(patch)
        model = decoders.enable(one_layer())
        for rows in (1, 2):
            first = decode(model, prompts(rows), "autoregressive", max_new_tokens=4)
            assert first.report.compiled and first.report.compilations > 0 and first.report.timings.compile > 0
            decode(model, prompts(rows), "prompt_lookup", max_new_tokens=4)
        yield model


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "rows, length, options",
    [
        (1, 24, dict()),
        (1, 7, dict(max_new_tokens=40)),
        (1, 130, dict(max_new_tokens=100)),
        (2, 24, dict()),
        (5, 40, dict(max_new_tokens=50)),
        (1, 24, dict(do_sample=True, top_k=9, temperature=0.9, seed=3)),
        (3, 24, dict(do_sample=True, top_k=50, temperature=1.4, seed=4)),
        (2, 24, dict(eos_token_id=[7, 8, 9])),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "strategy",
    [
        "autoregressive",
        "prompt_lookup",
        PromptLookup(length=5),
        Replay(texts=((3, 4, 5),), branches=3),
        "prompt_lookup+autoregressive",
        "suffix",
    ],
    ids=str,
)
def test_later_calls_compile_nothing(
    compiled: PreTrainedModel, strategy: Any, rows: int, length: int, options: dict[str, Any]
) -> None:
    inputs, options = prompts(rows, length), dict(max_new_tokens=12) | options
    with torch.compiler.set_stance("fail_on_recompile"):
        out = decode(compiled, inputs, strategy, **options)
    assert out.report.compiled and out.report.compilations == 0 and out.report.timings.compile == 0
    if options.get("do_sample"):
        expected = reference(compiled, inputs, "autoregressive", decoders_config={"compile": False}, **options)
    else:
        expected = reference(compiled, inputs, **options)
    assert torch.equal(out.sequences, expected.sequences)


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.usefixtures("default_device")
def test_a_default_device_compiles_nothing(compiled: PreTrainedModel, elsewhere: bool) -> None:
    """torch sets one part of it for the thread, and one for the process."""
    modes, graphs = torch.overrides._get_current_function_mode_stack(), torch_compat.graphs_compiled()
    expected = decode(compiled, prompts(2), max_new_tokens=6).sequences
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit if elsewhere else lambda function: SimpleNamespace(result=function)
        out = run(lambda: decode(compiled, prompts(2), "prompt_lookup", max_new_tokens=6)).result()
    assert out.report.compiled and torch_compat.graphs_compiled() == graphs
    assert torch.equal(out.sequences, expected)
    assert len(modes) == 1 and torch.overrides._get_current_function_mode_stack() == modes


def test_a_model_of_another_class_compiles_nothing(compiled: PreTrainedModel) -> None:
    registry = getattr(pytest.importorskip("transformers.utils.output_capturing"), torch_compat._RECORDED)
    expected, graphs = decode(compiled, prompts(2), max_new_tokens=6).sequences, torch_compat.graphs_compiled()
    dict.__setitem__(registry, "a class of which the first model is created now", {})
    assert torch.equal(decode(compiled, prompts(2), "prompt_lookup", max_new_tokens=6).sequences, expected)
    assert torch_compat.graphs_compiled() == graphs


class Dispatched(torch_compat.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Dispatched, BaseTorchFunctionMode])
def test_a_call_within_a_mode_of_torch_runs_uncompiled(compiled: PreTrainedModel, mode: Any) -> None:
    """Dynamo would raise an error, in this call and in all later ones."""
    expected = decode(compiled, prompts(2), max_new_tokens=6).sequences
    with mode():
        out = decode(compiled, prompts(2), "prompt_lookup", max_new_tokens=6, decoders_config={"compile": "auto"})
        with pytest.raises(UnsupportedError, match="compile=True.*FlopCounterMode"):
            decode(compiled, prompts(2), "prompt_lookup", max_new_tokens=6)
    assert not out.report.compiled and torch.equal(out.sequences, expected)
    later = decode(compiled, prompts(2), "prompt_lookup", max_new_tokens=6)
    assert later.report.compiled and later.report.compilations == 0 and torch.equal(later.sequences, expected)


@pytest.mark.parametrize("switch", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_nothing_is_compiled_where_the_environment_forbids_it(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(UnsupportedError, match=f"compile=True: the environment has {switch}=1"):
        decode(model, prompts(1), "prompt_lookup", max_new_tokens=4, decoders_config={"compile": True})
    out = decode(model, prompts(1), "prompt_lookup", max_new_tokens=4, decoders_config={"compile": "auto"})
    assert not out.report.compiled


def test_a_block_of_any_size_takes_the_same_graph(compiled: PreTrainedModel) -> None:
    for length in (1, 2, 17, 63):
        out = decode(compiled, prompts(2), Replay(texts=((9,) * 60,) * 2, length=length), max_new_tokens=6)
        assert out.report.compilations == 0
    assert torch.equal(out.sequences, decode(compiled, prompts(2), max_new_tokens=6).sequences)


def test_whole_trees_and_their_ends_take_the_same_graph(compiled: PreTrainedModel) -> None:
    """A dynamic tree is drafted level by level, each level the end of its tree; rows may share one tree's memory."""
    forward = vars(compiled)["generate"].engine().forward_pass
    target, tree = forward.target, Topology.branches(2, 3).tensors(4, torch.device("cpu"))
    buffers, base, view = CacheBuffers.allocate(target.layout, 4, 64), torch.full((4,), 9), torch.arange(64)[:32]
    shared = causal_block(4, 6, torch.device("cpu"))
    assert shared.offsets.stride(0) == 0
    with forward.tiers.during(True, Report("")), torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        for block, count in ((tree, 7), (tree, 3), (shared, 6), (shared, 2)):
            nodes = torch.randint(VOCAB, (4, count), generator=torch.Generator().manual_seed(count))
            given = PassInput(nodes, base, block, buffers, view)
            ours = forward(given)
            plain = target.forward(given)
            torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_trees_take_the_same_graph_whatever_their_tensors_are_views_of(compiled: PreTrainedModel, rows: int) -> None:
    """Dynamo guards what the tensors that it compiles for are views of, and would compile anew in the middle of a call."""
    forward = vars(compiled)["generate"].engine().forward_pass
    target, topology, device = forward.target, Topology.branches(2, 3), torch.device("cpu")
    buffers, base = CacheBuffers.allocate(target.layout, rows, 64), torch.full((rows,), 9)
    fixed(*((buffer, (1, 3)) for buffer in buffers.tensors))
    view = torch.arange(64)[:32]
    made = topology.tensors(rows, device)
    drawn = TreeTensors.from_parents(torch.tensor([topology.parents] * rows))
    trees = [
        made,
        drawn,
        made.padded(9),
        drawn.padded(9),
        drawn.merge(drawn),
        drawn.head(4),
        after_text(3, made),
        after_text(3, drawn),
    ]
    assert made.visible._is_view() == (rows == 1) and not drawn.visible._is_view()
    with forward.tiers.during(True, Report("")), torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        for tree in trees:
            nodes = torch.randint(VOCAB, (rows, len(tree)), generator=torch.Generator().manual_seed(len(tree)))
            given = PassInput(nodes, base, tree, buffers, view)
            ours, plain = forward(given), target.forward(given)
            torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
            tokens, flags = torch.zeros(rows, 64, dtype=torch.int64), torch.zeros(rows).bool()
            whole = TreeTensors(tree.parents, tree.offsets, tree.visible, tree.ancestors)
            stops = torch.full((rows, 8), -1)
            given = nodes.clone(), whole, tokens, base + 1, base + 40, flags, stops
            StepFunctions.of(forward).settle(forward.tiers, nodes, *given)
            behind_text = torch.cat([nodes, nodes], 1)[:, len(tree) :]  # as a draft model's, after its pending tokens
            StepFunctions.of(forward).settle(forward.tiers, behind_text, *given)


def test_processors_on_the_host_use_a_graph_of_the_forward_alone(compiled: PreTrainedModel) -> None:
    class Twist(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + (input_ids[:, -1:] % 7) * torch.linspace(0, 1, scores.shape[-1])

    options = dict(logits_processor=[Twist()], max_new_tokens=16)
    plain = decode(compiled, prompts(2), **options).sequences
    first, second = (decode(compiled, prompts(2), "prompt_lookup", **options) for _ in range(2))
    assert torch.equal(first.sequences, plain) and torch.equal(second.sequences, plain)
    assert second.report.compilations == 0


@pytest.mark.parametrize(
    "draw", [{}, dict(do_sample=True, seed=1, temperature=0.3, top_k=0)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_grammars_take_the_same_graph(compiled: PreTrainedModel, strategy: str, draw: dict[str, Any]) -> None:
    """One for each row, on the device or on the host, of one size and of another."""
    stops = [5, 9]
    for seed, states in ((10, 12), (50, 19)):
        automata = [TokenAutomaton.random(seed + row, VOCAB, stops, states) for row in range(2)]
        options = dict(grammar=[automata[0], Matched(automata[1])], eos_token_id=stops, max_new_tokens=16, **draw)
        out = decode(compiled, prompts(2), strategy, **options)
        eager = decode(compiled, prompts(2), "autoregressive", decoders_config={"compile": False}, **options)
        assert out.report.compiled and out.report.compilations == 0
        assert torch.equal(out.sequences, eager.sequences)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", pytest.param("staged", marks=pytest.mark.slow)])
def test_draft_models_are_traced_once(compiled: PreTrainedModel, kind: str) -> None:
    """The target's graphs are there: the first call traces the draft's, and later ones nothing."""
    assert_later_calls_compile_nothing((compiled, tiny_draft("llama", num_hidden_layers=1)), kind, 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_changed_in_place_are_seen_and_nothing_is_compiled_again(compiled: PreTrainedModel, rows: int) -> None:
    before = decode(compiled, prompts(rows), "autoregressive", max_new_tokens=12)
    kept = {name: tensor.clone() for name, tensor in compiled.state_dict().items()}
    for seed in (3, 4):  # as an optimizer does, step after step
        compiled.load_state_dict(one_layer(seed).state_dict())
        after = decode(compiled, prompts(rows), "autoregressive", max_new_tokens=12)
        assert after.report.compiled and after.report.compilations == 0
        assert not torch.equal(after.sequences, before.sequences)
        assert torch.equal(after.sequences, decode(compiled, prompts(rows), max_new_tokens=12).sequences)
    compiled.load_state_dict(kept)
    again = decode(compiled, prompts(rows), "autoregressive", max_new_tokens=12)
    assert torch.equal(again.sequences, before.sequences)


@pytest.mark.usefixtures("tiers_that_differ")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_call_ends_in_the_tier_in_which_it_began(dtype: torch.dtype, rows: int) -> None:
    """What it writes does not depend on when the compiler is ready."""
    model, inputs = decoders.enable(one_layer().to(dtype)), prompts(rows)
    passes = vars(model)["generate"].engine().forward_pass
    steps = 0

    class Waits(decoders.strategies.Autoregressive):
        """Waits for the compiler in the fourth step."""

        def propose(self, state: Any, sequences: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 4:
                assert passes.tiers.kinds[PassKind(rows > 1)].job.wait()
            return super().propose(state, sequences)

    auto = dict(max_new_tokens=12, decoders_config={"compile": "auto"})
    during = decode(model, inputs, Waits(), **auto)
    assert (during.report.steps, during.report.compiled_steps) == (12, 0)
    assert during.report.timings.background > 0 and during.report.timings.compile == 0
    assert torch.equal(
        during.sequences,
        decode(model, inputs, "autoregressive", max_new_tokens=12, decoders_config={"compile": False}).sequences,
    )
    later = [decode(model, inputs, Waits(), **auto) for _ in range(2)]
    assert all(out.report.compiled_steps == out.report.steps for out in later)
    assert torch.equal(later[0].sequences, later[1].sequences) and not torch.equal(later[0].sequences, during.sequences)


@pytest.mark.slow  # .ci/run runs it for two rows
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_compiled_call_reads_its_prompts_compiled(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    model, inputs = decoders.enable(one_layer().bfloat16()), prompts(rows, 24)
    options: dict[str, Any] = dict(max_new_tokens=4, decoders_config={"compile": True, "prefill_chunk": 12})
    decode(model, inputs, "suffix", **options)
    for name in ("forward", "prefill", "features"):
        monkeypatch.setattr(Target, name, lambda *_, name=name, **__: pytest.fail(f"{name} ran uncompiled"))
    # The prompt's last 12 tokens are read by the first step.
    assert decode(model, prompts(rows, 26), "suffix", **options).report.prefill_steps == 1
    recycling = dict(strategy_config={"prompt_logits": True}, **options)
    # One or two tokens are left to read behind kept ones; the graph is for no fewer than three.
    assert decode(model, prompts(rows, 26), "token_recycling", **recycling).report.prefill_steps == 0


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("length", [pytest.param(3, marks=pytest.mark.slow), 24])
def test_in_lower_precision_the_end_of_a_kept_prompt_is_read_again(length: int) -> None:
    """It may have been read in another tier; a step that runs a branch's tokens again starts with some of it."""
    model, inputs = decoders.enable(one_layer().bfloat16()), prompts(1, length)
    for compile in (False, True):
        config = {"compile": compile, "attention": "sdpa"}
        decode(model, inputs, "autoregressive", max_new_tokens=4, decoders_config=config)
        again = decode(model, inputs, "autoregressive", max_new_tokens=4, decoders_config=config)
        assert again.report.reused == [max(length - 1 - 4, 0)] and again.report.prefill_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_in_lower_precision_a_compiled_prompt_has_its_bits_however_it_is_divided(strategy: str) -> None:
    model, inputs = decoders.enable(tiny_model("llama").bfloat16()), prompts(1, 101)
    options = dict(max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
    outputs = []
    for chunk in (512, 64, 12, 4):
        settings = {"compile": True, "reuse": False, "prefill_chunk": chunk}
        outputs.append(decode(model, inputs, strategy, **options, decoders_config=settings))
        assert outputs[-1].report.compiled_steps == outputs[-1].report.steps
    for other in outputs[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.logits, outputs[0].logits, strict=True))


@pytest.mark.slow
def test_in_lower_precision_tokens_of_other_branches_have_the_bits_of_plain_steps() -> None:
    model, inputs = (
        decoders.enable(tiny_model("llama").bfloat16()),
        prompts(1, 26),
    )  # the first draft's last branch is right
    options = dict(max_new_tokens=24, return_dict_in_generate=True, output_logits=True)
    plain = decode(model, inputs, "autoregressive", **options)
    texts = tuple(map(tuple, plain.sequences.tolist()))
    drafted = decode(model, inputs, Replay(texts=texts, branches=3, length=2), **options)
    assert plain.report.compiled and drafted.report.compiled and drafted.report.steps < plain.report.steps
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drafted.logits, plain.logits, strict=True))


def test_a_compiler_that_fails_is_one_warning_and_decoding_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(tiers.RegionalForward, "compile", broken)
    model, inputs = decoders.enable(tiny_model("llama")), prompts()
    with pytest.warns(UserWarning, match="could not be compiled.*no compiler here") as caught:
        outputs = [decode(model, inputs, "autoregressive", max_new_tokens=6) for _ in range(2)]
    assert len(caught) == 1
    expected = decode(model, inputs, max_new_tokens=6).sequences
    assert all(torch.equal(out.sequences, expected) and not out.report.compilations for out in outputs)
    assert not any(out.report.compiled for out in outputs)


def test_a_strategy_that_cannot_be_compiled_is_no_reason_to_fail(compiled: PreTrainedModel) -> None:
    """Its own tensor code runs eagerly unless it asks for more."""

    class OnHost(PromptLookup):
        on_device = False

        def propose(self, state: Any, sequences: Any) -> Any:
            return decoders.Draft.chain(
                torch.tensor([[int(sequences.last[row])] for row in range(len(sequences.length))])
            )

    out = decode(compiled, prompts(2), OnHost(), max_new_tokens=8)
    assert out.report.compiled and out.report.compilations == 0
    assert torch.equal(out.sequences, decode(compiled, prompts(2), max_new_tokens=8).sequences)
