"""How deep chains are verified where many rows pay for one."""

from __future__ import annotations

from decoders.engine.worth import TRIAL, DraftWorth


def learnt(right: int, node_cost: float) -> DraftWorth:
    """After 20 steps of 8 rows, of which two draft four tokens and `right` of these are right."""
    worth = DraftWorth()
    for step in range(20):
        nodes = 5 if step % 2 else 1
        worth.depth(8, [2] * 4, int)
        drafted = [4, 4, 0, 0, 0, 0, 0, 0] if nodes > 1 else [0] * 8
        worth.observe(
            8, nodes, 1.0 + node_cost * 8 * nodes, drafted, [right, right, 0, 0, 0, 0, 0, 0] if nodes > 1 else [0] * 8
        )
    return worth


def test_drafts_that_are_never_right_are_not_verified() -> None:
    assert learnt(0, 0.05).depth(8, [2] * 4, int) == 0


def test_drafts_that_are_right_are_verified_as_deep_as_they_are() -> None:
    assert learnt(4, 0.01).depth(8, [2] * 4, int) == 4
    assert learnt(2, 0.01).depth(8, [2] * 4, int) == 2


def test_where_nodes_are_dear_one_rows_draft_is_left_alone() -> None:
    assert learnt(4, 1.0).depth(8, [2] * 4, int) == 0
    assert learnt(4, 1.0).depth(8, [8] * 4, int) >= 0


def test_everything_is_tried_now_and_then() -> None:
    worth = learnt(0, 0.05)
    assert max(worth.depth(8, [2] * 4, int) for _ in range(TRIAL)) == 4


def test_before_anything_is_known_everything_is_verified() -> None:
    assert DraftWorth().depth(8, [1, 1], int) == 2


def test_what_a_block_is_filled_up_to_counts() -> None:
    """A draft of one token is not worth a block of eight nodes; of as many as are in the block anyway it is."""

    def size(nodes: int) -> int:
        return 1 if nodes == 1 else max(nodes, 8)

    assert learnt(2, 0.05).depth(8, [8], int) == 1
    assert learnt(2, 0.05).depth(8, [8], size) == 0


def test_drafts_of_one_size_are_left_out_now_and_then_until_it_is_known_what_they_cost() -> None:
    worth, depths = DraftWorth(), []
    for _ in range(20):
        depths.append(worth.depth(8, [8] * 4, int))
        nodes = depths[-1] + 1
        worth.observe(8, nodes, 1.0 + 0.2 * 8 * nodes, [depths[-1]] * 8, [0] * 8)
    assert depths[:4] == [4, 4, 4, 0] and set(depths[8:]) == {0}
