"""Numbers that go through the tally end as if each had been told by itself."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tersely.service.common.tally import DELAY, Tally

VALUES = (0.0, 0.1, 0.5, 0.5, 0.7, 5.0, 99.0)


def render(*, through_tally: bool) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("calls", "Calls.", registry=registry)
    gauge = Gauge("size", "Size.", registry=registry)
    histogram = Histogram("seconds", "Seconds.", buckets=(0.1, 0.5, 1.0), registry=registry)
    tally = Tally()

    async def count() -> None:
        for value in VALUES:
            if through_tally:
                tally.add(counter, value)
                tally.show(gauge, value)
                tally.observe(histogram, value)
            else:
                counter.inc(value)
                gauge.set(value)
                histogram.observe(value)
        tally.flush()

    asyncio.run(count())
    text = generate_latest(registry)
    return b"\n".join(line for line in text.splitlines() if b"_created" not in line)


def test_the_tally_adds_up_as_the_metrics_do() -> None:
    assert render(through_tally=True) == render(through_tally=False)


async def test_the_tally_tells_its_numbers_by_itself() -> None:
    counter = Counter("calls", "Calls.", registry=CollectorRegistry())
    tally = Tally()
    tally.add(counter)
    assert [sample.value for sample in next(iter(counter.collect())).samples][:1] == [0.0]
    await asyncio.sleep(DELAY * 2)
    assert [sample.value for sample in next(iter(counter.collect())).samples][:1] == [1.0]
