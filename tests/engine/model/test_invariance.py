"""A node's bits do not depend on what else is in its block, so in bfloat16, too, strategies write the same tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

import decoders
from decoders.common import host_reads
from decoders.engine.decode.core import Core
from decoders.engine.model import invariance
from decoders.engine.model.blocks import Blocks, NodeBlock
from decoders.engine.model.buckets import row_multiple, slots_for, view_bucket
from decoders.engine.model.kernels import cpu
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.engine.model.weights.same_bits import align_activations
from decoders.strategy import Draft
from decoders.testing import Replay
from decoders.testing.exactness import decode, prompts
from decoders.testing.models import tiny_draft, tiny_model
from decoders.tree import Topology

DESIGNS = ["llama", "gemma3", "gpt2", "qwen2", "gemma2"]
STRATEGIES = ["prompt_lookup", "lookahead", "ngram", "speculative"]
AS_IT_IS = {"compile": False, "reuse": False}
BY_TORCH = AS_IT_IS | {"attention": "sdpa"}


needs_kernels = pytest.mark.skipif(cpu.chosen().kernels is None, reason="there are no kernels for this CPU")


@pytest.mark.parametrize("design", DESIGNS)
def test_a_chain_has_the_same_bits_in_every_block(design: str) -> None:
    found = invariance.check(target_of(tiny_model(design).bfloat16(), "sdpa"))
    assert found.holds, str(found)


@needs_kernels
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_our_attention_a_branch_has_the_same_bits_too(design: str, dtype: torch.dtype) -> None:
    target = target_of(tiny_model(design).to(dtype))
    found = invariance.check(target)
    assert target.attends == "cpu" and target.multiple == 1
    # In float32 products of many rows are torch's.
    allowed = {"the number of rows"} if dtype == torch.float32 else set()
    assert not set(found.differs) - allowed and found.single is (dtype != torch.float32), str(found)


def test_bits_that_depend_on_the_view_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = target_of(tiny_model("llama").bfloat16())
    forward = odd.forward

    def rounded_by_view(*args: Any) -> Any:
        result = forward(*args)
        result.logits.mul_(1 + len(args[0].view) % 7 * 1e-6)
        return result

    monkeypatch.setattr(odd, "forward", rounded_by_view)
    found = invariance.check(odd)
    assert not found.holds
    assert "how many slots attention reads" in str(found)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, True), (torch.float32, None)])
def test_bits_are_compared_where_sizes_are_buckets(
    dtype: torch.dtype, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)
    found = target_of(tiny_model("llama").to(dtype)).checks.invariance
    assert (found and found.holds) is expected


def test_a_view_covers_its_length_with_little_excess_and_fits_into_the_cache() -> None:
    for length in range(1, 1200):
        view = view_bucket(length)
        assert length <= view < length + 192
        assert not 192 < (view - 1) % 512 + 1 < 384
        assert slots_for(length, False) > view


def test_low_precision_pads_blocks_on_the_cpu_alone() -> None:
    cpu = torch.device("cpu")
    assert [row_multiple(dtype, cpu) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [
        4,
        4,
        1,
    ]
    assert row_multiple(torch.bfloat16, torch.device("cuda")) == 1
    for multiple, sizes in ((4, {0: 4, 3: 4, 4: 8, 10: 12}), (1, {0: 3, 2: 3, 3: 4, 10: 11})):
        blocks = Blocks(2, cpu, multiple=multiple)
        for length, size in sizes.items():
            draft = Draft(torch.ones(2, length, dtype=torch.int64), Topology.chain(length))
            draft_tokens, tree = blocks.of(draft)
            assert (draft_tokens.shape[1] + 1, len(tree)) == (size, size)
            assert bool((draft_tokens[:, length:] == -1).all())


@pytest.mark.parametrize(("length", "chunk"), [(1, 512), (2, 1), (5, 512), (30, 6), (30, 512)])
def test_for_torchs_attention_text_is_read_in_multiples_of_four_tokens(
    length: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    inputs = Target.inputs

    def spy(self: Target, nodes: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(nodes.shape[1])
        return inputs(self, nodes, *args, **options)

    model = decoders.enable(tiny_model("llama").bfloat16())
    ids = prompts(1, length=max(length, 3))["input_ids"][:, :length]
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=6, strategy="prompt_lookup")
    expected = model.generate(ids, **options, decoders_config=BY_TORCH)
    monkeypatch.setattr(Target, "inputs", spy)
    actual = model.generate(ids, **options, decoders_config=BY_TORCH | {"prefill_chunk": chunk})
    assert sizes and all(size % 4 == 0 or size == 1 for size in sizes)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_attention_in_code_of_a_model_gets_multiples_of_four_nodes_for_any_number_of_rows(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    inputs = Target.inputs

    def spy(self: Target, nodes: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(nodes.shape[1])
        return inputs(self, nodes, *args, **options)

    model = decoders.enable(tiny_model("falcon", hidden_size=384, num_kv_heads=4).bfloat16())
    given = prompts(rows, length=130)
    options: dict[str, Any] = dict(max_new_tokens=24, output_logits=True, decoders_config=AS_IT_IS)
    decode(model, given, "autoregressive", max_new_tokens=1)  # checks the model, with blocks of other sizes
    monkeypatch.setattr(Target, "inputs", spy)
    plain = decode(model, given, "autoregressive", **options)
    texts = [row[row != 0].tolist() for row in plain.sequences]
    drafted = decode(model, given, Replay(texts=tuple(map(tuple, texts)), length=1), **options)
    assert sizes and all(size % 4 == 0 for size in sizes)
    assert drafted.report.steps < plain.report.steps
    assert torch.equal(torch.stack(drafted.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "sigmoid"])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_an_activation_gives_an_element_the_same_bits_wherever_it_lies(activation: str, strided: bool) -> None:
    model = torch.nn.Sequential(ACT2FN[activation])
    plain = type(model[0])
    align_activations(model)
    x = torch.randn(300, 48, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    x = x[:, ::2] if strided else x[:, :24].contiguous()
    whole = model(x)
    for rows in (1, 3, 5, 14, 19, 257):
        torch.testing.assert_close(model(x[:rows]), whole[:rows], rtol=0, atol=0)
    assert isinstance(model[0], plain)
    torch.testing.assert_close(whole, ACT2FN[activation](x))


def test_activations_that_are_no_function_of_single_elements_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Softmax(-1), torch.nn.PReLU())
    kinds = [type(module) for module in model]
    align_activations(model)
    assert [type(module) for module in model] == kinds


def write(model: PreTrainedModel, inputs: dict[str, Any], strategy: str, **options: Any) -> list[list[int]]:
    options = dict(do_sample=False, max_new_tokens=20, decoders_config=AS_IT_IS) | options
    return model.generate(**inputs, **options, strategy=strategy).tolist()


@pytest.mark.parametrize(
    ("design", "rows"),
    [
        *(pytest.param(design, 1, marks=pytest.mark.slow) for design in DESIGNS if design not in ("gemma3", "gpt2")),
        pytest.param("gpt2", 1, marks=pytest.mark.slow),
        ("gemma3", 3),
    ],
)
def test_strategies_write_the_tokens_of_plain_decoding_in_bfloat16(design: str, rows: int) -> None:
    model, draft = decoders.enable(tiny_model(design).bfloat16()), tiny_draft(design).bfloat16()
    inputs = prompts(rows, length=30)
    expected = write(model, inputs, "autoregressive")
    for strategy in STRATEGIES:
        extra = {"assistant_model": draft} if strategy == "speculative" else {}
        assert write(model, inputs, strategy, **extra) == expected, strategy


@pytest.mark.parametrize("attends", ["sdpa", pytest.param("cpu", marks=needs_kernels)])
def test_what_was_accepted_on_another_branch_is_run_again_in_its_own_slots_for_torchs_attention_alone(
    attends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = torch.tensor([[0, 1, 2, 3], [0, 5, 6, 3], [0, 1, 7, 8]])
    assert [invariance.branch_length(path, emitted) for emitted in ([4, 1, 2], [4, 3, 2], [1, 1, 4])] == [0, 2, 2]
    model = decoders.enable(tiny_model("llama").bfloat16())
    blocks: list[NodeBlock] = []
    plain = Core.forward_verify_commit

    def spy(self: Core, draft: Any, block: NodeBlock, rows: Any) -> Any:
        blocks.append(block)
        return plain(self, draft, block, rows)

    monkeypatch.setattr(Core, "forward_verify_commit", spy)
    inputs, config = prompts(2, length=30), BY_TORCH if attends == "sdpa" else AS_IT_IS
    actual = write(model, inputs, "lookahead", decoders_config=config)
    again = [block.text.length for block in blocks[1:] if block.text.length]
    assert bool(again) == (attends == "sdpa") and all(count % 4 == 0 for count in again)
    assert actual == write(model, inputs, "autoregressive", decoders_config=config)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_real_model_writes_the_same_tokens_in_bfloat16(name: str) -> None:
    """Lookahead and ngram draft trees: what is chosen on another branch than the first may be a near-tie's other token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(os.environ["DECODERS_REAL_MODELS"]) / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = invariance.check(target_of(model))
    assert found.holds, str(found)
    model = decoders.enable(model, tokenizer=tokenizer)
    texts = ["def add(a, b):\n    return a + b\n\ndef", "The capital of France is"]
    if file := os.environ.get("DECODERS_REAL_PROMPTS"):
        texts = [json.loads(line)["messages"][0]["content"] for line in Path(file).read_text().splitlines()]
    for text in texts:
        inputs = dict(tokenizer(text, return_tensors="pt"))
        expected = write(model, inputs, "autoregressive", max_new_tokens=64)
        for strategy in ("prompt_lookup", "ngram", "lookahead"):
            assert write(model, inputs, strategy, max_new_tokens=64) == expected, f"{strategy}: {text}"


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_compiled_requests_of_a_scheduler_write_what_each_writes_by_itself_in_bfloat16(name: str) -> None:
    """Two graphs, of one row and of several: on tiny models they round alike whatever the compiler is told."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(os.environ["DECODERS_REAL_MODELS"]) / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = decoders.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokenizer=tokenizer)
    texts = [f"def add_{n}(a, b):\n    return a + {n}\n\ndef" for n in range(8)]
    options: dict[str, Any] = dict(do_sample=False, decoders_config={"compile": True, "reuse": False})
    with decoders.Scheduler(model, tokenizer=tokenizer, rows=4, **options) as scheduler:
        requests = [scheduler.submit(text, max_new_tokens=24 + n) for n, text in enumerate(texts)]
        together = [request.result() for request in requests]
    for n, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone = model.generate(ids, strategy="autoregressive", max_new_tokens=24 + n, **options)
        assert tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True) == together[n], text


def test_the_report_says_whether_bits_are_the_same() -> None:
    options = dict(strategy="prompt_lookup", max_new_tokens=4, decoders_config={"compile": False})
    model = decoders.enable(tiny_model("llama").bfloat16())
    assert decode(model, prompts(), **options).report.same_bits is True
    assert decode(decoders.enable(tiny_model("llama")), prompts(), **options).report.same_bits is None
    recurrent = decode(decoders.enable(tiny_model("jamba").bfloat16()), prompts(), **options).report  # not checked
    assert recurrent.same_bits is False and recurrent.same_tokens == "near-ties may differ"
