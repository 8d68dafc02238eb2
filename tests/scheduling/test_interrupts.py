"""Ctrl-C while a scheduler is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from .conftest import scheduler_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

SCRIPT = """
import decoders, threading, signal, os
from decoders.testing.models import ARCHITECTURES
model = decoders.enable(ARCHITECTURES["llama"](0))
model.config.max_position_embeddings = 8192
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
with decoders.Scheduler(model, slots=8000, pad_token_id=0, decoders_config={"compile": False}) as scheduler:
    generation = scheduler.submit([3, 4, 5], max_new_tokens=7000)
    next(iter(generation))
    threading.Timer(0.2, interrupt).start()
"""


def test_a_scheduler_whose_end_was_not_waited_for_is_still_alive(llama: Any) -> None:
    scheduler = scheduler_of(llama, slots=8000)
    generation = scheduler.submit([3, 4, 5], max_new_tokens=7000, eos_token_id=None)
    next(iter(generation))
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    # Servers and kernels of other tests have handlers of their own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            scheduler.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert scheduler.alive and not generation.done()
    scheduler.close(cancel=True)
    assert not scheduler.alive and generation.done()


@pytest.mark.slow
def test_a_process_that_is_interrupted_there_ends_in_peace() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode in (1, -signal.SIGINT, 130), ended.stderr
    assert "KeyboardInterrupt" in ended.stderr and "Fatal" not in ended.stderr
