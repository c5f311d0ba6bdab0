"""The flight recorder: what it holds is what is in the engine, after any order of events, at any moment."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.inference_worker.flight import FlightRecorder, Passenger, read_passengers

NUMBERS = st.integers(min_value=1, max_value=2**63)


def recorder(folder: Path, seats: int) -> FlightRecorder:
    made = FlightRecorder.create(folder, "w-1", seats=seats)
    assert made is not None
    return made


@settings(max_examples=60, deadline=None)
@given(
    seats=st.integers(min_value=1, max_value=6),
    events=st.lists(st.one_of(st.tuples(NUMBERS, NUMBERS, NUMBERS), st.integers(0, 9)), max_size=40),
)
def test_it_holds_who_entered_and_did_not_leave(tmp_path_factory, seats, events) -> None:
    made = recorder(tmp_path_factory.mktemp("flight"), seats)
    inside: list[tuple[int, Passenger]] = []
    try:
        for event in events:
            if isinstance(event, tuple):
                seat = made.enter(*event)
                if len(inside) == seats:
                    assert seat == -1, "no seat is free"
                    made.leave(seat)
                else:
                    inside.append((seat, Passenger(*event)))
            elif inside:
                seat, _ = inside.pop(event % len(inside))
                made.leave(seat)
            found = read_passengers(made.path.read_bytes())
            assert sorted(found) == sorted(passenger for _, passenger in inside)
            assert [p.started_us for p in found] == sorted(p.started_us for p in found), "newest last"
    finally:
        made.close()


def test_an_orderly_end_leaves_nothing_and_gives_the_fault_handler_back(tmp_path: Path) -> None:
    before = faulthandler.is_enabled()
    made = recorder(tmp_path, 4)
    assert faulthandler.is_enabled()
    assert sorted(p.suffix for p in (tmp_path / "run").iterdir()) == [".fault", ".flight"]
    made.close()
    made.close()
    assert list((tmp_path / "run").iterdir()) == []
    assert faulthandler.is_enabled() == before


def test_without_a_folder_there_is_no_recorder(tmp_path: Path) -> None:
    assert FlightRecorder.create(tmp_path / "none", "w", seats=4) is None
    assert not (tmp_path / "none").exists()
    (tmp_path / "run").write_text("not a folder")
    assert FlightRecorder.create(tmp_path, "w", seats=4) is None


@pytest.mark.parametrize("data", [b"", b"HRFLIGHT", b"x" * 100, b"HRFLIGHT\x02\0\0\0\x01\0\0\0" + bytes(24)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="flight recorder"):
        read_passengers(data)


def test_an_item_costs_a_microsecond_or_two(tmp_path: Path) -> None:
    made = recorder(tmp_path, 8_192)
    for i in range(4_000):
        made.enter(i + 1, 1, 1)
    rounds = 20_000
    began = time.perf_counter()
    for i in range(rounds):
        made.leave(made.enter(i + 1, 1, 1))
    each_us = (time.perf_counter() - began) / rounds * 1e6
    made.close()
    print(f"{each_us:.2f} µs for each item")
    assert each_us < 50, "constant, and no system call"
