"""What callers bring along or run out of: modes, streams, recordings of their own, memory, adapters, number formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.errors import CacheMemoryError, UnsupportedError
from decoders.testing import prompts, tiny_model

from .subjects import NEW, Subject, fresh_target, subject_of

FLOAT32 = torch.float32


def assert_usable(subject: Subject) -> None:
    for rows in (1, 3):
        assert torch.equal(subject.decode(rows, "prompt_lookup").sequences, subject.decode(rows).sequences)


def test_first_calls_in_inference_mode_leave_a_model_that_works_outside(device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    with torch.inference_mode():
        assert_usable(subject)
    assert_usable(subject)


@pytest.mark.parametrize("strategy", ["prompt_lookup", "suffix", "auto"])
def test_the_callers_default_device_may_be_the_models(device: torch.device, strategy: str) -> None:
    subject = fresh_target(FLOAT32, device)
    expected = subject.decode(3).sequences
    with torch.device(device):
        assert all(torch.equal(subject.decode(3, strategy).sequences, expected) for _ in range(2))


def test_no_memory_for_a_cache_is_said_and_the_model_goes_on(device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    expected = subject.decode(1, "prompt_lookup").sequences
    with pytest.raises((CacheMemoryError, torch.OutOfMemoryError)) as caught:
        subject.decode(1, "prompt_lookup", decoders_config={"slots": 2**40})
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "the key-value cache of 1 row with" in message
    assert torch.equal(subject.decode(1, "prompt_lookup").sequences, expected)


def test_no_memory_in_the_middle_of_a_call_leaves_the_model_usable(cuda: torch.device) -> None:
    """The caller's own tensors take all that is left; when they are gone, so is the trouble."""
    subject = fresh_target(FLOAT32, cuda)
    free, total = torch.cuda.mem_get_info(cuda)
    torch.cuda.set_per_process_memory_fraction(min((total - free) / total + 0.02, 1.0), cuda)
    try:
        with pytest.raises((CacheMemoryError, torch.OutOfMemoryError)):
            subject.decode(3, "prompt_lookup", decoders_config={"slots": 2**22})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert_usable(subject)


def test_a_stream_of_the_callers_is_waited_for(cuda: torch.device) -> None:
    """Prompts that are still being computed when the call begins, and a result that is used at once."""
    subject = fresh_target(FLOAT32, cuda)
    expected = {rows: subject.decode(rows).sequences for rows in (1, 3)}
    stream = torch.cuda.Stream(cuda)
    for strategy in ("autoregressive", "prompt_lookup", "suffix"):
        for rows, inputs in subject.inputs.items():
            stream.wait_stream(torch.cuda.current_stream(cuda))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late = {name: tensor + 0 for name, tensor in inputs.items()}
                out = Subject(subject.model, {rows: late}).decode(rows, strategy).sequences
                assert torch.equal(out, expected[rows]), (strategy, rows)


def test_calls_within_changing_streams_do_not_overtake_each_other(cuda: torch.device) -> None:
    """When a call returns, its last step may still be running, on the tensors of the next call."""
    subject = fresh_target(FLOAT32, cuda)
    expected = subject.decode(1).sequences
    streams = [torch.cuda.Stream(cuda) for _ in range(2)]
    torch.cuda.synchronize(cuda)
    for turn in range(8):
        with torch.cuda.stream(streams[turn % 2]):
            out = subject.decode(1, "prompt_lookup", decoders_config={"reuse": False})
            assert torch.equal(out.sequences, expected), turn


def test_products_that_are_rounded_are_no_fault_of_a_kernel(cuda: torch.device) -> None:
    """TensorFloat-32, where the caller allows it: logits differ by more than float32's rounding, in transformers' passes as well."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        subject = fresh_target(FLOAT32, cuda)
        out = subject.decode(1, "prompt_lookup")
    finally:
        torch.set_float32_matmul_precision(usual)
    assert out.report.new_tokens == [NEW] and vars(subject.model)["generate"].engine().target.attends == "triton"


def test_a_recording_of_the_callers_is_refused_and_ends_cleanly(cuda: torch.device) -> None:
    subject = fresh_target(FLOAT32, cuda)
    subject.decode(1, "autoregressive")
    graph = torch.cuda.CUDAGraph()

    def recorded() -> None:
        with torch.cuda.graph(graph):
            torch.ones(4, device=cuda)
            subject.decode(1, "autoregressive")

    with pytest.raises(UnsupportedError, match=r"torch\.cuda\.graph"):
        recorded()
    assert_usable(subject)


# transformers and peft disagree about a deprecated name.
@pytest.mark.filterwarnings("ignore")
def test_adapters_are_part_of_the_model(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = decoders.enable(peft.get_peft_model(tiny_model("llama"), config).eval().to(device))
    inputs = {name: tensor.to(device) for name, tensor in prompts(3).items()}
    call: dict[str, Any] = {**inputs, "max_new_tokens": 24, "do_sample": False}

    def texts() -> Any:
        ours = [model.generate(**call, strategy=name) for name in ("autoregressive", "prompt_lookup", "lookahead")]
        assert all(torch.equal(text, model.generate(**call)) for text in ours)
        return ours[0]

    with_adapter = texts()
    with model.disable_adapter():
        without = texts()
    assert not torch.equal(with_adapter, without) and torch.equal(texts(), with_adapter)


def test_a_quantized_cache_is_exact_or_refused(device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    config = {"kv_cache": "int8"}
    if device.type == "cuda":
        with pytest.raises(UnsupportedError, match="works on the CPU so far"):
            subject.decode(3, "prompt_lookup", decoders_config=config)
    else:
        texts = [subject.decode(3, name, decoders_config=config).sequences for name in ("autoregressive", "lookahead")]
        assert torch.equal(*texts)
    assert_usable(subject)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_are_exact_or_refused(weights: str, device: torch.device) -> None:
    subject = fresh_target(FLOAT32, device)
    if device.type == "cuda":
        with pytest.raises(UnsupportedError, match="works on the CPU so far"):
            subject.decode(1, "prompt_lookup", decoders_config={"weights": weights})
    assert_usable(subject)


def test_a_model_that_moves_to_another_device_is_decoded_there(cuda: torch.device) -> None:
    subject, _ = subject_of("autoregressive", FLOAT32, torch.device("cpu"))
    own = fresh_target(FLOAT32, torch.device("cpu"))
    own.decode(1, "prompt_lookup")
    moved = Subject(own.model.to(cuda), {1: {name: t.to(cuda) for name, t in own.inputs[1].items()}})
    assert torch.equal(moved.decode(1, "prompt_lookup").sequences.cpu(), subject.decode(1).sequences)
