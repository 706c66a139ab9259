"""A process that ends with the one that started it, however that ends: even `kill -9` leaves none behind."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def ends_with_this_process() -> Callable[[], None]:
    """What a child of this process has to call first, such as subprocess' `preexec_fn`: it gets SIGTERM as we end.

    More exactly, as the thread ends that starts it.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended meanwhile
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange


def end_forks_with_their_parent() -> None:
    """The same for every process that this one, or one of those, forks from now on."""
    arrange: Callable[[], None] = ends_with_this_process()

    def prepare() -> None:
        nonlocal arrange
        arrange = ends_with_this_process()

    os.register_at_fork(before=prepare, after_in_child=lambda: arrange())
