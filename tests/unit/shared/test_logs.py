"""What a worker logs can be read by machines: one JSON object a line, whoever logs it."""

import json
import subprocess
import sys

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
