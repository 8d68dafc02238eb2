"""A child made by ``os.fork`` while another thread decodes can decode, too."""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoders.testing import prompts

CALL: dict[str, Any] = dict(
    strategy="prompt_lookup", max_new_tokens=8, do_sample=False, decoders_config={"compile": False}
)
SECONDS = 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent(fresh: PreTrainedModel) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not live on in a child
    model, inside, done = fresh, threading.Event(), threading.Event()
    expected = model.generate(**prompts(), **CALL)

    class Waits(BaseStreamer):
        def put(self, value: Any) -> None:
            inside.set()
            done.wait(SECONDS)

        def end(self) -> None:
            pass

    thread = threading.Thread(target=lambda: model.generate(**prompts(), **CALL, streamer=Waits()))
    thread.start()
    assert inside.wait(SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads, which is what is tried here
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if torch.equal(model.generate(**prompts(), **CALL), expected) else 3
        finally:
            os._exit(code)
    try:
        assert ended(child) == 0
    finally:
        done.set()
        thread.join()
    assert torch.equal(model.generate(**prompts(), **CALL), expected), "the parent goes on"


def ended(child: int) -> int:
    """The exit code of a child; one that waits for ever is killed."""
    last = time.monotonic() + SECONDS
    while time.monotonic() < last:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child waits")
