"""The order of samples depends only on (seed, step); each is used once per epoch, in one process."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskip.data import _order
from unskip.data._order import GEOMETRY, MIXING, ORDER, Groups, Order, check_world, share, stream
from unskip.errors import BadInput


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_has_every_sample_once(total: int, batch: int, seed: int, epoch: int) -> None:
    order = Order(total, batch, seed, drop_last=False)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    rows = numpy.concatenate([order.rows(step) for step in steps])
    assert sorted(rows.tolist()) == list(range(total))
    assert [len(order.rows(step)) for step in steps][:-1] == [batch] * (len(steps) - 1)


@given(st.integers(1, 300), st.integers(1, 17))
def test_shares_of_processes_are_a_partition(count: int, world: int) -> None:
    parts = [share(count, rank, world) for rank in range(world)]
    assert [position for part in parts for position in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_and_seeds_have_different_reproducible_orders() -> None:
    order = Order(1000, 100, seed=3)
    first, second = ([order.rows(10 * epoch + step).tolist() for step in range(10)] for epoch in range(2))
    assert first != second
    assert Order(1000, 100, seed=4).rows(0).tolist() != first[0]
    assert Order(1000, 100, seed=3).rows(7).tolist() == first[7]


def grouped(window: int, seed: int, epoch: int, of: list[int], sizes: list[int], batch: int) -> list[list[int]]:
    """The batches of an epoch by the documented rule, in plain Python with the same random streams."""
    random = stream(ORDER, seed, epoch)
    turns, rows = random.permutation(len(sizes)).tolist(), random.permutation(len(of)).tolist()
    place, before = {}, 0
    for group in turns:
        place[group] = divmod(before, window)  # its window, and its offset in the window
        before += sizes[group]
    seen, times = dict.fromkeys(range(len(sizes)), 0), {}
    for row, shift in zip(rows, random.random(len(of)).tolist(), strict=True):
        times[row] = (seen[of[row]] + shift) / of.count(of[row])
        seen[of[row]] += 1
    whole = sorted(rows, key=lambda row: (place[of[row]][0], times[row]))
    batches = [whole[start : start + batch] for start in range(0, len(whole) - batch + 1, batch)]
    return [sorted(rows, key=lambda row: place[of[row]][1]) for rows in batches]


@pytest.mark.parametrize("epoch", [0, 3])
def test_rows_in_groups_are_permuted_within_windows(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "WINDOW", 10)
    sizes = [3, 5, 2, 4, 4, 6, 1]
    of = [group for group, count in enumerate([4, 7, 3, 5, 6, 8, 2]) for _ in range(count)]
    order = Order(len(of), 4, 11, groups=Groups(numpy.array(of, numpy.int32), numpy.array(sizes)))
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    assert [order.rows(step).tolist() for step in steps] == grouped(10, 11, epoch, of, sizes, 4)


@pytest.mark.parametrize(("world", "most"), [(1, 1.02), (2, 1.1), (4, 1.3)])
def test_a_row_group_is_read_about_once(world: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache of 1.25 windows, divided among the processes."""
    window = 64 * 100
    monkeypatch.setattr(_order, "WINDOW", window)
    of = numpy.repeat(numpy.arange(400), 50).astype(numpy.int32)
    order = Order(len(of), 256, groups=Groups(of, numpy.full(400, 100)))
    read = 0
    for rank in range(world):
        held: dict[int, int] = {}
        for step in range(order.steps_per_epoch):
            part = share(256, rank, world)
            for group in of[order.rows(step)[part.start : part.stop]].tolist():
                if group not in held:
                    read += 1
                    held[group] = 100
                    while sum(held.values()) > window * 1.25 / world:
                        held.pop(next(iter(held)))
    assert read <= most * 400


def test_drop_last() -> None:
    assert Order(10, 4).steps_per_epoch == 2
    assert Order(10, 4, drop_last=False).steps_per_epoch == 3
    assert len(Order(10, 4, drop_last=False).rows(2)) == 2


def test_random_streams_are_different() -> None:
    places = [(GEOMETRY, 0, 1), (GEOMETRY, 1, 0), (MIXING, 0, 1), (GEOMETRY, 0, 1, 0), (GEOMETRY, 0, 2)]
    places += [(GEOMETRY, 0), (GEOMETRY, 0, 0), (GEOMETRY, 2**32), (GEOMETRY, 0, 2**32), (GEOMETRY, 0, 0, 1)]
    drawn = {stream(*place).integers(2**62) for place in places}
    assert len(drawn) == len(places)


def test_wrong_arguments() -> None:
    with pytest.raises(BadInput, match=r"5 images .* batch of 8"):
        _ = Order(5, 8).steps_per_epoch
    with pytest.raises(BadInput, match="batch is 0"):
        Order(5, 0)
    with pytest.raises(BadInput, match="seed is -1"):
        Order(5, 1, seed=-1)
    with pytest.raises(BadInput, match="among 3"):
        check_world(8, 0, 3)
    with pytest.raises(BadInput, match="ranks go from 0"):
        check_world(8, 2, 2)
