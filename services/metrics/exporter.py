"""The exporter: one process that serves the metrics of all runs and queues."""

import threading

from services.metrics.collector import StackCollector
from services.metrics.worker import container_registry, serve
from services.settings import Addresses


def serve_metrics(addresses: Addresses, port: int, host: str = "0.0.0.0") -> None:
    """Answer /metrics until the process is ended.

    Raises:
        UserError: the port is taken.
    """
    registry = container_registry("exporter", addresses.version)
    registry.register(StackCollector(addresses))
    serve(registry, port, host)
    threading.Event().wait()
