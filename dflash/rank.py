"""`python -m dflash.rank`: one process of a training run. `dflash.launch` starts it and tells it its place on stdin."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from typing import Any, TextIO

import torch

from dflash.errors import DflashError
from dflash.founding import check_cards, own_devices
from dflash.launch import INTERRUPTED, LOST_PEER, Place
from dflash.parts import Beats, Clock
from dflash.placement import check_device
from dflash.signals import stop_requests
from dflash.target_rank import serve_states
from dflash.train import train
from dflash.world import join, leave

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Take the place that the launcher gives; return the exit status."""
    place = Place.from_json(sys.stdin.readline())
    _end_with(place.launcher)
    with os.fdopen(place.reports, "w", encoding="utf-8", buffering=1) as reports:
        try:
            return _work(place, reports)
        except DflashError as error:
            _report(reports, {"error": str(error)})
        except OSError as error:
            hint = ": make room and give the same command again" if error.errno == errno.ENOSPC else ""
            _report(reports, {"error": f"{error.filename or place.config.output}: {error.strerror or error}{hint}"})
        except torch.cuda.OutOfMemoryError as error:
            text = f"out of memory on {place.config.device} ({' '.join(str(error).split())}): lower token_budget"
            _report(reports, {"error": text})
        except RuntimeError as error:
            # The launcher knows which rank went first; the others have nothing to say.
            if "gloo" in str(error) or isinstance(error, torch.distributed.DistError):
                return LOST_PEER
            raise
    return 1


def _work(place: Place, reports: TextIO) -> int:
    config = place.config
    clock = Clock(Beats(place.beats, config.topology.processes), place.rank)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_cards(config, torch.cuda.device_count())
    devices = own_devices(config, place.rank)
    for device in devices:
        check_device(device)
    if devices[0].startswith("cuda"):
        # What names no card, such as pinned memory and random states, is this one's.
        torch.cuda.set_device(devices[0])
    with clock.part("data_wait"):
        world = join(place.rank, config.topology, place.meeting_point, config.device)
    if world.role == "target":
        # It ends when the drafters take no more packs.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve_states(config, world, clock)
        leave()
        return 0
    with stop_requests() as should_stop:
        result = train(config, lambda line: _report(reports, line), should_stop, world, clock)
        leave()
    if world.leads:
        _report(reports, {"result": {"steps": result.steps, "checkpoint": str(result.checkpoint)}})
    return INTERRUPTED if result.interrupted else 0


def _report(reports: TextIO, line: dict[str, Any]) -> None:
    reports.write(json.dumps(line, ensure_ascii=False) + "\n")


def _end_with(launcher: int) -> None:
    """Have the kernel end this process with its launcher, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
