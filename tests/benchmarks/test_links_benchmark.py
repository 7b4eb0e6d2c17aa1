"""The benchmark of slow links runs, its switch delays, and its formula is that of the docs."""

import socket
import time

import pytest
from test_torch_benchmarks import BENCHMARKS, check_written, run, tables

from hosts import missing

DOCS = BENCHMARKS.parent / "docs"
DELAY = 0.02


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_every_case_has_a_row_and_the_link_is_what_it_says(tmp_path):
    printed = run("links.py", "--quick", out=tmp_path)
    link, rows = tables(check_written(tmp_path, "links"))
    (_, asked, trip), (_, _, stream) = link
    assert asked == "40.0 ms"
    assert float(trip.removesuffix(" ms")) >= 40
    assert 0 < float(stream.split()[0]) < 100
    ways = [(who, period, overlap) for who, period, overlap, *_ in rows]
    both = [(period, overlap) for period in ("1", "10") for overlap in ("no", "yes")]
    assert ways == [
        ("no exchange", "", ""),
        ("DistributedDataParallel", "", ""),
        ("elastic, Ray, one worker", "1", "no"),
        ("elastic, Ray, apart", "10", "no"),
        *[("elastic, Ray", *case) for case in both],
        *[("averaging, gloo", *case) for case in both],
    ]
    for who, period, overlap, rate, computing, *_, between, _, sent, center in rows:
        assert float(rate) > 0
        assert 0 < float(computing.removesuffix(" %")) <= 100
        if who == "no exchange":
            continue
        assert float(sent) > 0
        assert bool(center) == ("Ray" in who)
        if overlap == "no":
            assert between == period
        elif overlap:
            assert int(between) >= int(period)
    one, two = (row for row in rows if row[0].startswith("elastic") and row[1:3] == ["1", "no"])
    for row, workers in ((one, 1), (two, 2)):  # both ways are counted by different hosts
        assert float(row[-1]) == pytest.approx(workers * float(row[-2]), rel=0.2)
    assert printed.count("formula: ") == len(rows)


class Wire:
    """A device of the switch: what is sent into one end comes out of the other, whole."""

    def __init__(self):
        self.host, self.device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.host, self.device):
            end.setblocking(False)

    def close(self):
        self.host.close()
        self.device.close()

    def received(self):
        try:
            return self.host.recv(1000)
        except BlockingIOError:
            return None


def frame(to, sender, text):
    """A frame as a TAP device gives it, with the header before it."""
    return bytes(10) + bytes([2, 0, 0, 0, 0, to]) + bytes([2, 0, 0, 0, 0, sender]) + text


@pytest.fixture
def wires():
    three = [Wire() for _ in range(3)]
    yield three
    for wire in three:
        wire.close()


@pytest.fixture
def switch(wires):
    from links_switch import Switch

    return Switch([wire.device.fileno() for wire in wires], DELAY)


def sent(switch, wire, to, sender, text=b"hello"):
    """Send a frame through the switch; return it, and how long it took to be delivered."""
    start = time.monotonic()
    wire.host.send(frame(to, sender, text))
    switch.turn(1.0)  # takes it
    switch.turn(1.0)  # waits until it is due
    switch.turn(0.0)  # delivers it
    return frame(to, sender, text), time.monotonic() - start


def test_a_frame_for_nobody_known_goes_to_all_others_and_not_before_the_delay(switch, wires):
    whole, seconds = sent(switch, wires[0], to=1, sender=0)
    assert [wire.received() for wire in wires] == [None, whole, whole]
    assert seconds >= DELAY


def test_a_frame_goes_to_who_has_been_heard_of(switch, wires):
    sent(switch, wires[1], to=0, sender=1)
    for wire in wires:
        wire.received()
    whole, _ = sent(switch, wires[0], to=1, sender=0)
    assert [wire.received() for wire in wires] == [None, whole, None]


def test_a_cable_that_is_out_does_not_end_the_switch(switch, wires):
    wires[1].host.shutdown(socket.SHUT_RD)
    whole, _ = sent(switch, wires[0], to=255, sender=0)
    assert wires[2].received() == whole


def setup(**changes):
    from links_formula import Setup

    values = {"model": 4e6, "link": 12.5e6, "round_trip": 0.04, "step": 0.05, "period": 10}
    return Setup(**values | {"workers": 1} | changes)


def test_one_worker_needs_the_time_of_its_bytes_and_some_round_trips():
    one = setup()
    assert one.exchange() == pytest.approx(0.64 + 0.24)
    assert one.share() == pytest.approx(0.5 / (0.5 + 0.88))
    assert one.share(overlap=True) == 1
    assert one.hidden_from == 18
    assert one.steps_between() == 10
    assert one.steps_between(overlap=True) == 20
    assert setup(period=18).steps_between(overlap=True) == 18
    assert one.center_rate() == pytest.approx(4e6 / 1.38)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 5, 100])
@pytest.mark.parametrize("period", [1, 10, 1000])
def test_what_others_leave_is_what_an_exchange_has(overlap, workers, period):
    some = setup(workers=workers, period=period)
    exchange = some.exchange(overlap)
    between = max(period * 0.05, exchange) if overlap else period * 0.05 + exchange
    left = 12.5e6 - (workers - 1) * 4e6 / between
    assert exchange == pytest.approx(8e6 / left + 0.24, rel=1e-6)
    assert some.center_rate(overlap) == pytest.approx(workers * 4e6 / between, rel=1e-6)
    assert some.center_rate(overlap) < 12.5e6
    assert some.share(overlap) <= setup(workers=1, period=period).share(overlap)


def test_a_center_with_more_links_is_no_longer_in_the_way():
    crowded, spread = setup(workers=100), setup(workers=100, machines=100)
    assert crowded.together == pytest.approx(100 * 0.64 + 0.24)
    assert spread.together == spread.least == setup().together
    assert spread.exchange() == pytest.approx(setup().exchange())
    assert crowded.exchange() > 30 * spread.exchange()
    assert setup(workers=100, center_link=12.5e8).exchange() == pytest.approx(spread.exchange())


def test_a_ring_sends_as_much_for_many_as_for_few_but_hops_more():
    from links_formula import all_reduce, colocated, machines

    assert all_reduce(4e6, 12.5e6, 0.0, 2) == pytest.approx(0.32)
    assert all_reduce(4e6, 12.5e6, 0.0, 1000) == pytest.approx(0.64, rel=0.01)
    assert all_reduce(4e6, 12.5e6, 0.04, 100) > 198 * 0.04
    assert colocated(4e9, 12.5e6, 640, 1000) == pytest.approx(1.0, rel=0.01)
    assert colocated(4e9, 12.5e6, 640, 10) == pytest.approx(0.9)
    assert machines(1e6, 1e6, between=7.0, workers=49) == 10


def test_the_table_of_the_docs_is_the_formula():
    from links_formula import EXAMPLES, TRIPS, example

    text = (DOCS / "choosing-the-period.md").read_text("utf-8")
    assert [example(*given) for given in EXAMPLES] in tables(text)
    assert f"T = 2B/W + {TRIPS:g}r" in text


def test_where_the_docs_point_to_is_there():
    for page in ("links.md", "choosing-the-period.md"):
        text = (DOCS / page).read_text("utf-8")
        for target in (part.split(")")[0] for part in text.split("](")[1:]):
            assert (DOCS / target.partition("#")[0]).exists(), target


def test_the_measure_of_a_row_is_over_the_workers_that_took_part():
    from links_report import Row
    from links_worker import RAY, Case, Result

    case = Case(RAY, 10, False, 40, 2)
    results = [Result(8.0, 4, 2.0), Result(12.0, 4, 4.0)]
    row = Row.of(case, results, [(100, 100), (10, 50), (10, 70)])
    assert row == Row(case, rate=4.0, exchange=0.75, between=10, sent=6.0, center=10.0)


def test_a_step_takes_its_time_in_both_passes():
    import torch
    from links_worker import Model, Pace

    pace = Pace(0.06)
    model = Model(4, pace)
    pace.begin()
    start = time.perf_counter()
    loss = model(torch.ones(1, 4)).sum()
    there = time.perf_counter() - start
    loss.backward()
    assert there >= 0.02
    assert time.perf_counter() - start >= 0.06
    assert all(p.grad is not None for p in model.parameters())
