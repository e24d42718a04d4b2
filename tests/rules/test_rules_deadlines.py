"""Tests of deadlines by key: each is taken once, and changed ones leave no entries behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.groups.deadlines import Deadlines

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["set", "earlier", "remove", "take"]), st.sampled_from("abc"), st.integers(0, 20)
    )
)


@given(CALLS)
def test_each_deadline_is_taken_once_and_in_time(calls: list[tuple[str, str, int]]) -> None:
    deadlines, model = Deadlines(), dict[str, int]()
    for call, key, time_ms in calls:
        if call == "set":
            deadlines.set(key, time_ms)
            model[key] = time_ms
        elif call == "earlier":
            deadlines.set_if_earlier(key, time_ms)
            model[key] = min(model.get(key, time_ms), time_ms)
        elif call == "remove" and key in model:
            deadlines.remove(key)
            del model[key]
        elif call == "take":
            due = {each for each, due_ms in model.items() if due_ms <= time_ms}
            taken = deadlines.take(time_ms)
            assert len(taken) == len(due)
            assert set(taken) == due
            model = {each: due_ms for each, due_ms in model.items() if each not in due}
        assert len(deadlines) == len(model)
        assert all(each in deadlines for each in model)
        assert deadlines.next_ms == min(model.values(), default=None)


def test_a_deadline_that_is_changed_often_takes_no_more_room() -> None:
    deadlines = Deadlines()
    deadlines.set("stays", 10**9)
    for due_ms in range(10_000, 0, -1):
        deadlines.set_if_earlier("moves", due_ms)
        deadlines.set(f"goes-{due_ms}", due_ms)
        deadlines.remove(f"goes-{due_ms}")
    assert deadlines.heap_size < 200
    assert deadlines.take(10_000) == ["moves"]


def test_a_clean_up_keeps_the_order_of_what_is_left() -> None:
    deadlines = Deadlines()
    for index in range(10):
        deadlines.set(f"stays-{index}", 10_000 - index)  # the first key gets the last deadline
    assert deadlines.heap_size == 10
    for due_ms in range(84 - 10 - 1):
        deadlines.set("stays-9", due_ms)
    assert deadlines.heap_size == 83
    deadlines.set("stays-9", 84)
    assert deadlines.heap_size == 84  # the maximum: twice the number of keys, plus 64
    deadlines.set("stays-9", 85)
    assert deadlines.heap_size == 10
    assert deadlines.take(10_000) == ["stays-9", *(f"stays-{index}" for index in range(8, -1, -1))]


def test_an_equal_deadline_takes_no_room() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        deadlines.set_if_earlier("key", 5)
    assert deadlines.heap_size == 1
