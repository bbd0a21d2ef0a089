"""The deadlines of running requests."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Collection, Iterator

from topw_deploy.engine.request import Request


class Deadlines:
    """Deadlines by time.perf_counter(). Those of ended requests are forgotten.

    running: the requests that have not ended; changes with time.
    """

    def __init__(self, running: Collection[Request]) -> None:
        self._running = running
        self._heap: list[tuple[float, int, weakref.ref[Request]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request: Request) -> None:
        heapq.heappush(self._heap, (deadline, next(self._numbers), weakref.ref(request)))
        if len(self._heap) > 2 * len(self._running):
            self._heap = [entry for entry in self._heap if entry[-1]() in self._running]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[Request]:
        """Take the requests whose deadlines are `now` or earlier, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[-1]()
            if request is not None:
                yield request
