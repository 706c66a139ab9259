"""How a job's thread waits for what the event loop does."""

import concurrent.futures
import threading

import pytest

from services.chunks import Chunk
from services.producer.host import GenerateHost
from services.threaded_worker import HandedBackError

CHUNK = Chunk("s-0", "s", 0, 1)


class EndsAsTheWaitDoes(concurrent.futures.Future[bool]):
    """Is done at the very moment at which a wait for it runs out of time."""

    def result(self, timeout: float | None = None) -> bool:
        if timeout is not None and not self.done():
            self.set_result(True)
            raise TimeoutError
        return super().result(timeout)


def test_a_chunk_that_ends_as_a_wait_does_has_not_failed() -> None:
    generating = EndsAsTheWaitDoes()
    ended = threading.Timer(0.05, lambda: generating.done() or generating.set_result(True))
    ended.start()
    assert GenerateHost(grace=0)._wait(generating, CHUNK)
    ended.join()


def test_a_time_out_of_the_chunks_own_is_its_failure() -> None:
    generating = concurrent.futures.Future[bool]()
    generating.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        GenerateHost(grace=0)._wait(generating, CHUNK)


def test_a_chunk_that_was_given_up_is_handed_back() -> None:
    generating = concurrent.futures.Future[bool]()
    generating.cancel()
    with pytest.raises(HandedBackError, match="chunk s-0"):
        GenerateHost(grace=0)._wait(generating, CHUNK)
