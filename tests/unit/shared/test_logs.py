"""What a service logs can be read by machines: one JSON object a line, whoever logs it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging
import structlog
from rq.logutils import setup_loghandlers
from services.logs import configure_logs

configure_logs()
setup_loghandlers("INFO")  # as a worker of RQ does when it begins
structlog.get_logger().info("chunk_done", samples=5)
logging.getLogger("rq.worker").info("Job %s begins", "j1")
logging.getLogger("elsewhere").info("not a warning")
try:
    raise RuntimeError("broken")
except RuntimeError:
    logging.getLogger("rq.worker").exception("Job failed")
"""


def test_every_line_is_an_event_with_its_level_and_time() -> None:
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert finished.stdout == ""
    own, started, failed = (json.loads(line) for line in finished.stderr.splitlines())
    assert (own["event"], own["samples"], own["level"]) == ("chunk_done", 5, "info")
    assert (started["event"], started["logger"], started["level"]) == ("Job j1 begins", "rq.worker", "info")
    assert (failed["event"], failed["level"]) == ("Job failed", "error")
    assert "RuntimeError: broken" in failed["exception"]
    assert all(event["timestamp"].endswith("Z") for event in (own, started, failed))


def test_the_exporter_logs_as_the_workers_do(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "services.stack", "metrics", "--port", str(port)]
    environment = {**os.environ, "DFLASH_RUNS": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as exporter:
        assert exporter.stdout is not None
        first = exporter.stdout.readline()
        exporter.kill()
    event = json.loads(first)
    assert (event["event"], event["port"], event["level"]) == ("metrics_ready", port, "info")
