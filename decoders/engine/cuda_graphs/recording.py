"""A call whose steps are recorded once and replayed: where a device records, and nothing in a step needs the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core import StepOutput
from ..criteria import Outcome
from .capture import RecordedCapacity, RecordedStep
from .static_inputs import StaticInputs

if TYPE_CHECKING:
    from ..loop import Call


def recordable(call: Call) -> bool:
    """Whether nothing in a step of `call` needs the host or varies in shape, so that a device that records can replay it."""
    request = call.request
    return (
        call.session.recordings is not None and call.target.static and bool(request.runtime.compile) and request.strategy.on_device
        and (call.guide is None or call.guide.on_device)
        and all(drafter.on_device for drafter in call.drafters)
        and all(module.on_device for module in call.resources.modules)
        and request.processors is None and request.criteria is None and not (request.keep_logits or request.keep_scores)
    )  # fmt: skip


class CallRecording:
    """Records a step of a call, or finds it recorded, and runs the rest of the call as replays of it.

    Args:
        call: recordable.
        state: of its strategy; after a replay, that which the recording works on.
        step: forward, verification and commit.
    """

    def __init__(self, call: Call, state: Any, step: Callable[..., StepOutput]) -> None:
        assert call.session.recordings is not None
        self.call, self.state, self.step, self.recordings = call, state, step, call.session.recordings
        self.inputs = StaticInputs(
            dict(
                state=state, guide=call.guide, drafters=call.drafters, keys=call.noise_keys, sampling=call.rows.sampling
            )
        )

    def replay_earlier(self) -> None:
        """Runs the call with what an earlier one has recorded, if it fits; its tensors then hold what this call begins with."""
        call = self.call
        needed = RecordedCapacity(call.width, 0, call.longest)
        self._replay(self.recordings.reuse(self._key, needed, self.inputs.root))

    def record_and_replay(self) -> None:
        """Records a step like those so far, for this call and later ones, and runs the rest of the call with it."""
        call, nodes = self.call, self.call.report.nodes
        room = min([call.rows.slots - nodes, *(drafter.room for drafter in call.drafters)])
        for drafter in call.drafters:
            drafter.recording()
        recorded = self.recordings.record(self._key, RecordedCapacity(call.width, nodes, room), self.inputs, self._body)
        for drafter in call.drafters:
            drafter.recorded(recorded is not None)
        self._replay(recorded)

    @property
    def _key(self) -> tuple:
        """What a recorded step depends on, besides the tensors that it reads."""
        call, request = self.call, self.call.request
        verifier = None if call.verifier is None else (type(call.verifier), str(getattr(call.verifier, "settings", "")))
        return (
            type(request.strategy), request.strategy.name, repr(request.strategy), request.plan, verifier,
            call.target.layers, len(call.rows.sampling.values), len(call.rows.sampling.stop_tokens), type(call.guide),
            tuple(id(drafter.session) for drafter in call.drafters),
        )  # fmt: skip

    def _body(self) -> StepOutput:
        call = self.call
        call.renew_keys()
        draft = call.propose(self.state, 0)
        out = self.step(draft, call.masked(draft, call.block_of(draft)), call.rows)
        if call.guide is not None:
            call.guide.commit(out, call.rows.finished)
        call.observe(self.state, out)
        return out

    def _replay(self, recorded: RecordedStep | None) -> None:
        """The rest of the call as replays of one step; its parts cannot be told apart, all time is the core's."""
        if recorded is None:
            return
        call, report = self.call, self.call.report
        begun, first = time.perf_counter(), report.steps
        for summary, new in recorded.steps():
            call.book(Outcome.of(summary, new, call.batch), None)
            if not first and report.steps == 1:
                report.time_to_first_token = report.timings.prefill + time.perf_counter() - begun
            if all(call.finished):
                break
        steps = report.steps - first
        report.compiled_steps += steps
        report.nodes = max(report.nodes, recorded.capacity.nodes)
        for drafter, like in zip(call.drafters, recorded.inputs.root["drafters"], strict=True):
            drafter.replayed(like, steps)
        call.guide = recorded.inputs.root["guide"]  # the one that has been led
        self.state = recorded.inputs.root["state"]
        report.timings.core += time.perf_counter() - begun
