"""A child made by ``os.fork`` while another thread decodes can decode, too."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import os, threading, warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    import decoders
    from decoders.testing import prompts, tiny_model
    from transformers.generation.streamers import BaseStreamer

    model = decoders.enable(tiny_model("llama"))
    call = dict(strategy="prompt_lookup", max_new_tokens=8, do_sample=False, decoders_config={"compile": False})
    expected = model.generate(**prompts(), **call)
    inside, done = threading.Event(), threading.Event()

    class Waits(BaseStreamer):
        def put(self, value):
            inside.set()
            done.wait(60)
        def end(self):
            pass

    thread = threading.Thread(target=lambda: model.generate(**prompts(), **call, streamer=Waits()))
    thread.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(model.generate(**prompts(), **call), expected) else 3)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert torch.equal(model.generate(**prompts(), **call), expected), "the parent goes on"
    raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
