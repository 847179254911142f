"""The order: a function of (seed, step) alone, every sample once an epoch, divided among processes without overlap."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskip.data._order import GEOMETRY, MIXING, Order, check_world, share, stream
from unskip.errors import BadInput


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_takes_every_sample_once(total: int, batch: int, seed: int, epoch: int) -> None:
    order = Order(total, batch, seed, drop_last=False)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    rows = numpy.concatenate([order.rows(step) for step in steps])
    assert sorted(rows.tolist()) == list(range(total))
    assert [len(order.rows(step)) for step in steps][:-1] == [batch] * (len(steps) - 1)


@given(st.integers(1, 300), st.integers(1, 17))
def test_shares_are_a_partition(count: int, world: int) -> None:
    parts = [share(count, rank, world) for rank in range(world)]
    assert [position for part in parts for position in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = Order(1000, 100, seed=3)
    first, second = ([order.rows(10 * epoch + step).tolist() for step in range(10)] for epoch in range(2))
    assert first != second
    assert Order(1000, 100, seed=4).rows(0).tolist() != first[0]
    assert Order(1000, 100, seed=3).rows(7).tolist() == first[7]


def test_drop_last() -> None:
    assert Order(10, 4).steps_per_epoch == 2
    assert Order(10, 4, drop_last=False).steps_per_epoch == 3
    assert len(Order(10, 4, drop_last=False).rows(2)) == 2


def test_streams_do_not_meet() -> None:
    places = [(GEOMETRY, 0, 1), (GEOMETRY, 1, 0), (MIXING, 0, 1), (GEOMETRY, 0, 1, 0), (GEOMETRY, 0, 2)]
    places += [(GEOMETRY, 0), (GEOMETRY, 0, 0), (GEOMETRY, 2**32), (GEOMETRY, 0, 2**32), (GEOMETRY, 0, 0, 1)]
    drawn = {stream(*place).integers(2**62) for place in places}
    assert len(drawn) == len(places)


def test_wrong_arguments() -> None:
    with pytest.raises(BadInput, match="5 images do not fill one batch of 8"):
        _ = Order(5, 8).steps_per_epoch
    with pytest.raises(BadInput, match="batch is 0"):
        Order(5, 0)
    with pytest.raises(BadInput, match="seed is -1"):
        Order(5, 1, seed=-1)
    with pytest.raises(BadInput, match="cannot be divided evenly among 3"):
        check_world(8, 0, 3)
    with pytest.raises(BadInput, match="ranks go from 0"):
        check_world(8, 2, 2)
