"""A call whose steps are recorded once and replayed: where a device records, and nothing in a step needs the host."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

from ..model.recordings import WARM_UP_STEPS, RecordedCapacity, Recording, as_parts
from ..model.static_inputs import StaticInputs
from .core import StepOutput
from .criteria import Outcome

if TYPE_CHECKING:
    from .loop import Call


def recordable(call: Call) -> bool:
    """Whether nothing in a step of `call` needs the host or varies in shape, so that a device that records can replay it."""
    request = call.request
    return (
        call.session.recordings is not None and request.strategy.on_device
        and (call.guide is None or call.guide.on_device)
        and all(drafter.on_device for drafter in call.drafters)
        and all(module.on_device for module in call.resources.modules)
        and request.processors is None and request.criteria is None and request.top_logprobs is None
        and not (request.keep_logits or request.keep_scores)
    )  # fmt: skip


class CallRecording:
    """Makes the steps of a call: the first ones as they are, the others as replays of one that it records, or finds recorded.

    What has been compiled in the meantime is recorded anew, in the middle of a call where tokens do not depend on it.

    Args:
        call: recordable, and about to begin.
    """

    def __init__(self, call: Call) -> None:
        assert call.session.recordings is not None
        self.call, self.recordings = call, call.session.recordings
        self.inputs = StaticInputs(
            dict(
                state=call.state,
                guide=call.guide,
                drafters=call.drafters,
                keys=call.noise_keys,
                sampling=call.rows.sampling,
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
            self.call.advance()
        else:
            self._plain[key] += 1
            with as_parts():
                self.call.advance()

    def _earlier(self, key: tuple) -> Recording | None:
        """What an earlier call has recorded, if it fits; its tensors then hold what this call has come to."""
        if key in self._seen:
            return None
        self._seen.add(key)
        return self.recordings.reuse(key, RecordedCapacity(self.call.width, 0, self.call.longest), self.inputs.root)

    def _new(self, key: tuple) -> Recording | None:
        """A recording of a step like those so far, for this call and later ones, once there have been enough of them."""
        if self._plain[key] < WARM_UP_STEPS or self._failed:
            return None
        call, nodes = self.call, self.call.report.nodes
        room = min([call.rows.slots - nodes, *(drafter.room for drafter in call.drafters)])
        for drafter in call.drafters:
            drafter.recording()
        recorded = self.recordings.record(key, RecordedCapacity(call.width, nodes, room), self.inputs, self._body)
        self._failed = recorded is None
        if self._key != key:  # it has become ready in the middle of it
            self.recordings.drop(key)
            recorded = None
        for drafter in call.drafters:
            drafter.recorded(recorded is not None)
        return recorded

    def _constants(self) -> tuple:
        call, request = self.call, self.call.request
        verifier = None if call.verifier is None else (type(call.verifier), str(getattr(call.verifier, "settings", "")))
        return (
            type(request.strategy), request.strategy.name, repr(request.strategy), request.plan, verifier,
            call.target.layers, len(call.rows.sampling.values), len(call.rows.sampling.stop_tokens), type(call.guide),
            tuple(id(drafter.session) for drafter in call.drafters),
        )  # fmt: skip

    @property
    def _key(self) -> tuple:
        """What a recorded step depends on, besides the tensors that it reads: also on what of it is compiled."""
        return *self._depends_on, self.call.tiers

    def _body(self) -> StepOutput:
        call = self.call
        call.renew_keys()
        draft = call.propose(call.state, 0)
        out = call.step(draft, call.masked(draft, call.block_of(draft)), call.rows)
        if call.guide is not None:
            call.guide.commit(out, call.rows.finished)
        call.observe(call.state, out)
        return out

    def _replay(self, recorded: Recording, key: tuple) -> None:
        """Steps as replays, until all rows have ended or more is compiled. Its parts cannot be told apart, all time is the core's."""
        assert recorded.capacity is not None
        call, report = self.call, self.call.report
        begun, first = time.perf_counter(), report.steps
        compiled, last = key[-1][0].compiled, begun
        for summary, new in recorded.steps(lambda: self._key == key):
            call.book(Outcome.of(summary, new, call.batch), None)
            now = time.perf_counter()
            if not first and report.steps == 1:
                report.time_to_first_token = report.timings.prefill + now - begun
            call.book_replay(now - last)
            last = now
            if all(call.finished):
                break
        steps = report.steps - first
        report.replayed_steps += steps
        report.compiled_steps += steps * compiled
        call.forward_pass.compiled_passes += steps * compiled
        report.nodes = max(report.nodes, recorded.capacity.nodes)
        if recorded.inputs is not self.inputs:
            with self.recordings.recorder.active():
                recorded.inputs.give_back(self.inputs.root, self.recordings.recorder.copy)
        for drafter, like in zip(call.drafters, recorded.inputs.root["drafters"], strict=True):
            drafter.replayed(like, steps)
        report.timings.core += time.perf_counter() - begun
