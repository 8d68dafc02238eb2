"""Whole steps that are recorded once and replayed: where a device records, and nothing in a step needs the host."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable

from ..model.recordings import WARM_UP_STEPS, RecordedCapacity, Recording, as_parts
from ..model.static_inputs import StaticInputs
from .batch import Batch
from .criteria import Outcome
from .step import step
from .watch import StepWatch, book


def recordable(batch: Batch) -> bool:
    """Whether nothing in a step of `batch` needs the host or varies in shape, so that a device that records can replay it."""
    request = batch.request
    return (
        batch.session.recordings is not None and request.strategy.on_device
        and (batch.guide is None or batch.guide.on_device)
        and all(drafter.on_device for drafter in batch.drafters)
        and all(module.on_device for module in batch.resources.modules)
        and request.processors is None and request.criteria is None and request.top_logprobs is None
        and not (request.keep_logits or request.keep_scores or request.runtime.trace)
    )  # fmt: skip


class StepRecording:
    """Makes the steps of a batch: the first ones as they are, the others as replays of one that it records, or finds recorded.

    What has been compiled in the meantime is recorded anew, in the middle of a call where tokens do not depend on it.

    Args:
        batch: recordable, and about to begin.
    """

    def __init__(self, batch: Batch) -> None:
        assert batch.session.recordings is not None
        self.batch, self.recordings = batch, batch.session.recordings
        self.inputs = StaticInputs(
            dict(
                state=batch.state,
                guide=batch.guide,
                drafters=batch.drafters,
                keys=batch.noise_keys,
                sampling=batch.rows.sampling,
            )
        )
        self._depends_on = self._constants()
        self._seen: set[Hashable] = set()
        self._plain: Counter[Hashable] = Counter()
        self._failed = False

    def advance(self) -> None:
        """The next step, or as many as one recording serves."""
        key = self._key
        recorded = self._earlier(key) or self._new(key)
        if recorded is not None:
            self._replay(recorded, key)
        elif self._failed:
            step(self.batch, StepWatch(self.batch))
        else:
            self._plain[key] += 1
            with as_parts():
                step(self.batch, StepWatch(self.batch))

    def _earlier(self, key: tuple) -> Recording | None:
        """What an earlier call has recorded, if it fits; from then on its tensors are the state of this call."""
        if key in self._seen:
            return None
        self._seen.add(key)
        return self.recordings.reuse(key, RecordedCapacity(self.batch.width, 0, self.batch.longest), self.inputs.root)

    def _new(self, key: tuple) -> Recording | None:
        """A recording of a step like those so far, for this call and later ones, once there have been enough of them."""
        if self._plain[key] < WARM_UP_STEPS or self._failed:
            return None
        batch, nodes = self.batch, self.batch.report.nodes
        room = min([batch.rows.slots - nodes, *(drafter.room for drafter in batch.drafters)])
        for drafter in batch.drafters:
            drafter.recording()
        recorded = self.recordings.record(
            key, RecordedCapacity(batch.width, nodes, room), self.inputs, lambda: step(batch)
        )
        self._failed = recorded is None
        if self._key != key:  # it has become ready in the middle of it
            self.recordings.drop(key)
            recorded = None
        for drafter in batch.drafters:
            drafter.recorded(recorded is not None)
        return recorded

    def _constants(self) -> tuple:
        batch, request = self.batch, self.batch.request
        verifier = (
            None if batch.verifier is None else (type(batch.verifier), str(getattr(batch.verifier, "settings", "")))
        )
        return (
            type(request.strategy), request.strategy.name, repr(request.strategy), request.plan, verifier,
            batch.target.layers, len(batch.rows.sampling.values), len(batch.rows.sampling.stop_tokens), type(batch.guide),
            tuple(id(drafter.session) for drafter in batch.drafters),
        )  # fmt: skip

    @property
    def _key(self) -> tuple:
        """What a recorded step depends on, besides the tensors that it reads: also on what of it is compiled."""
        return *self._depends_on, self.batch.tiers

    def _replay(self, recorded: Recording, key: tuple) -> None:
        """Steps as replays, until all rows have ended or more is compiled. Its parts cannot be told apart, all time is the core's."""
        assert recorded.capacity is not None
        batch, report = self.batch, self.batch.report
        begun, first = time.perf_counter(), report.steps
        compiled, last = key[-1][0].compiled, begun
        for summary, new in recorded.steps(lambda: self._key == key):
            book(batch, Outcome.of(summary, new, batch.row_count), None)
            now = time.perf_counter()
            if not first and report.steps == 1:
                report.time_to_first_token = report.timings.call + now - begun
            batch.book_replay(now - last)
            last = now
            if all(batch.finished):
                break
        steps = report.steps - first
        report.replayed_steps += steps
        report.compiled_steps += steps * compiled
        batch.forward_pass.compiled_passes += steps * compiled
        report.nodes = max(report.nodes, recorded.capacity.nodes)
        if recorded.inputs is not self.inputs:
            with self.recordings.recorder.active():
                recorded.inputs.give_back(self.inputs.root, self.recordings.recorder.copy)
        for drafter, like in zip(batch.drafters, recorded.inputs.root["drafters"], strict=True):
            drafter.replayed(like, steps)
        report.timings.core += time.perf_counter() - begun
