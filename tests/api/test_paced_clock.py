"""Virtual time that follows the wall: in order, at its own times, and an error ends what it concerns."""

from __future__ import annotations

import asyncio
import time

from fake_workers.api.paced_clock import PacedClock

MS = 1_000_000


def test_events_run_in_order_and_see_their_own_times() -> None:
    seen: list[tuple[str, int]] = []

    async def main() -> PacedClock:
        clock = PacedClock(speed=10.0)
        clock.start()
        clock.call_at(200 * MS, lambda: seen.append(("late", clock.now_ns)))
        clock.call_at(100 * MS, lambda: seen.append(("second", clock.now_ns)), rank=2)

        def first() -> None:
            seen.append(("first", clock.now_ns))
            clock.pump()  # inside an event time does not move
            clock.call_at(clock.now_ns, lambda: seen.append(("then", clock.now_ns)))

        clock.call_at(100 * MS, first, rank=1)
        time.sleep(0.03)  # the process is held up: 300 ms of engine time pass at once
        clock.pump()
        assert 300 * MS <= clock.now_ns <= clock.wall_ns
        clock.close()
        return clock

    asyncio.run(main())
    assert seen == [("first", 100 * MS), ("then", 100 * MS), ("second", 100 * MS), ("late", 200 * MS)]


def test_it_wakes_by_itself_and_tells_of_errors() -> None:
    seen: list[object] = []

    async def main() -> None:
        clock = PacedClock()
        clock.on_failure = seen.append
        clock.start()
        clock.call_at(5 * MS, lambda: seen.append(1 // 0))
        clock.call_at(10 * MS, lambda: seen.append("after"))
        clock.pump()
        async with asyncio.timeout(5):
            while "after" not in seen:
                await asyncio.sleep(0.005)
        clock.close()

    asyncio.run(main())
    assert isinstance(seen[0], ZeroDivisionError) and seen[1:] == ["after"]
