"""Which buckets wait for users' hooks, and which may be looked at: threads, backwards and gradients are numbers here."""

from __future__ import annotations

from syncline.reducer.pending_gradients import PendingBucket, PendingGradients

HERE, INNER, OTHER_THREAD = (1, 0), (1, 7), (2, 0)


def machine(*needed: int | None) -> tuple[PendingGradients, list[PendingBucket]]:
    """Buckets of three parameters each: 0 to 2, 3 to 5, and so on; the numbers say how many gradients each needs."""
    pending = PendingGradients([range(3 * number, 3 * number + 3) for number in range(len(needed))])
    for bucket, count in zip(pending, needed, strict=True):
        bucket.expect(count)
    return pending, list(pending)


def come(pending: PendingGradients, bucket: PendingBucket, index: int, where: tuple[int, int] = HERE) -> list[list[int]]:
    """A gradient comes, and its hook calls if the bucket wants to hear of it; what may be looked at."""
    bucket.indices.append(index)
    return [taken for _, taken in pending.came(bucket, where)] if len(bucket.indices) in bucket.wake_at else []


def test_a_bucket_wakes_at_its_first_gradient_and_when_it_has_as_many_as_it_needs() -> None:
    _, (bucket,) = machine(3)
    assert [count in bucket.wake_at for count in range(1, 5)] == [True, False, True, False]
    bucket.expect(3, watch_all=True)
    assert all(count in bucket.wake_at for count in range(1, 9))
    bucket.expect(None)
    assert all(count in bucket.wake_at for count in range(1, 9))


def test_a_later_gradient_of_the_same_backward_ends_the_wait() -> None:
    pending, (one, other) = machine(2, 1)
    assert come(pending, one, 2) == []
    assert come(pending, one, 1) == []
    assert come(pending, other, 5) == [[2, 1]]
    assert one.indices == []
    assert come(pending, other, 4) == [], "the bucket had what it needed, and does not wake for more"
    assert [taken for _, taken in pending.take_all()] == [[5, 4]]


def test_the_gradient_whose_hooks_still_run_is_left() -> None:
    pending, (bucket,) = machine(None)
    assert come(pending, bucket, 2) == []
    assert come(pending, bucket, 0) == [[2]]
    assert bucket.indices == [0]


def test_after_a_look_the_next_gradient_is_worth_one_at_once() -> None:
    pending, (bucket, other) = machine(2, 1)
    for index in (0, 1):
        come(pending, bucket, index)
    assert come(pending, other, 3) == [[0, 1]]
    assert come(pending, bucket, 2) == [[3]]
    assert pending.node_done(bucket, 2) == [2]


def test_a_gradient_of_an_inner_backward_does_not_end_the_wait() -> None:
    pending, (outer, inner, last) = machine(1, 1, 1)
    assert come(pending, outer, 0) == []
    assert come(pending, inner, 3, INNER) == []
    assert come(pending, last, 6, INNER) == [[3]]
    assert come(pending, inner, 4, HERE) == [[0]], "back in the outer backward"


def test_a_gradient_on_another_thread_does_not_end_the_wait() -> None:
    pending, (one, other) = machine(1, 1)
    assert come(pending, one, 0) == []
    assert come(pending, other, 3, OTHER_THREAD) == []
    assert pending.node_done(one, 0) == [0]


def test_a_node_ends_the_wait_for_its_own_gradient_only() -> None:
    pending, (bucket, other) = machine(2, 1)
    bucket.indices.append(1)
    assert pending.node_done(bucket, 1) == [], "nothing waits"
    come(pending, bucket, 2)
    assert pending.node_done(bucket, 1) == [], "hooks on 2 may still run"
    assert pending.node_done(other, 2) == [], "another bucket"
    assert pending.node_done(bucket, 2) == [1, 2]
    assert pending.node_done(bucket, 2) == [], "once"


def test_at_the_end_everything_is_handed_over_once_and_nothing_waits() -> None:
    pending, (one, other) = machine(1, 3)
    come(pending, one, 0)
    other.indices.extend((3, 4))
    assert [taken for _, taken in pending.take_all()] == [[0], [3, 4]]
    assert pending.take_all() == []
    other.indices.append(5)
    assert pending.came(other, HERE) == [], "one does not wait any more"
