"""The rows of a draft model where requests come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....strategy import Sequences
from ..call_settings import CallSettings
from ..pool import RowPool
from ..prefill_plan import PrefillPlan


def seat_rows(
    pool: RowPool, call: CallSettings, sequences: Sequences, rows: Sequence[int], ahead: int, largest_id: int | None,
    run: Callable[..., None],
) -> None:  # fmt: skip
    """Brings the rows of the pool in order and reads those that are new.

    Args:
        call: of the rows as they are now; the prompts are all that was committed.
        sequences: of the model that is drafted for.
        rows: which row of the batch before each row is, -1 for one that is new.
        ahead: most nodes that a round writes behind the committed tokens.
        largest_id: the last token that the draft model knows, where the target has more.
        run: reads a stretch of text, as of :meth:`~decoders.engine.decode.session.Session.prefill`.
    """
    texts, target = call.request.prompts, pool.target
    pool.reorder(rows, [len(text) for text in texts])
    finished = sequences.finished.tolist()
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if row >= 0 or finished[place]:
            continue
        if largest_id is not None:
            text = text.clamp(max=largest_id)
        pool.put(place, text)
        prompt, salt = text.cpu(), call.request.salt_of(place)
        kept = pool.take_over(place, prompt, pool.texts, salt) if call.request.runtime.reuse else 0
        plan = PrefillPlan.of([len(text)], [kept], call.request.runtime.prefill_chunk, target)
        for done, count in plan.chunks:
            pool.read_rows(place, plan.starts, done, count, run)
        # Behind it a draft's slots may hold other nodes than those accepted.
        pool.note(place, prompt[:-1], salt)
    lengths = [len(text) for text in texts]
    limits = [length + ahead for length in lengths]
    pool.arrange(lengths, sequences.prompt_length.tolist(), limits, finished, call.sampling)
