"""A tiny target, and texts that it can learn in seconds."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoders.testing import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer(word_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return word_tokenizer


@pytest.fixture(scope="module")
def texts(counting_texts: list[str]) -> list[str]:
    return counting_texts


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which files that ``Path.open`` opens cannot be written."""

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def full() -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", lambda *_: Full())
            yield

    return full
