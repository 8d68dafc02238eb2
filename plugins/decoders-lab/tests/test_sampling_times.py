"""Timing of sampling plans."""

from __future__ import annotations

from decoders_lab.sampling import PLANS, flat, text_like, time_sampling


def test_every_plan_is_timed_over_every_number_of_nodes():
    rows = time_sampling(PLANS, nodes=(2, 3), vocabulary=500, repeats=2, definitions=1)
    assert [(row.plan, row.nodes) for row in rows] == [(plan, n) for n in (2, 3) for plan in PLANS]
    assert all(0 < row.least <= row.median and row.definition > 0 and row.vocabulary == 500 for row in rows)
    (row,) = time_sampling({"greedy": {}}, nodes=(2,), vocabulary=50, repeats=1, logits=flat, definitions=0)
    assert row.definition is None


def test_logits_are_the_same_every_time():
    for logits in (text_like, flat):
        assert logits(2, 100).shape == (1, 2, 100)
        assert logits(2, 100).equal(logits(2, 100))
