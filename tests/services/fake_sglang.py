"""An HTTP server that answers as SGLang does and fails when told to: faults that a real one does not show at will."""

import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

Fault = Literal["503", "429", "400", "drop", "slow", "empty", "abort", "loop", "no end token"] | None
END = 2


class FakeSglang:
    """Serves `model` on a free port while its `with` block lasts.

    `fault` is asked before each answer with the prompt's first id and how often that was asked before, from 0.
    The answer to a prompt is its ids reversed and the end token.
    """

    def __init__(
        self,
        model: str = "target",
        fault: Callable[[int, int], Fault] = lambda _first, _asked: None,
        context: int = 1024,
        seconds: float = 0.0,
    ) -> None:
        self.model = model
        self.fault = fault
        self.context = context
        self.seconds = seconds
        self.asked: Counter[int] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    fake: FakeSglang

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {})
        elif self.path == "/v1/models":
            self._reply(200, {"data": [{"id": self.server.fake.model, "max_model_len": self.server.fake.context}]})
        else:
            self._reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        payload = self.rfile.read(length)
        if len(payload) < length:
            return
        body = json.loads(payload)
        fake, first = self.server.fake, body["input_ids"][0]
        with fake.lock:
            asked = fake.asked[first]
            fake.asked[first] += 1
            fake.requests.append(body)
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
        fault = fake.fault(first, asked)
        time.sleep(5 if fault == "slow" else fake.seconds)
        with fake.lock:
            fake.in_flight -= 1
        self._answer(body["input_ids"], fault, body["sampling_params"]["max_new_tokens"])

    def _answer(self, input_ids: list[int], fault: Fault, max_new_tokens: int) -> None:
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault in {"503", "429", "400"}:
            self._reply(int(fault), {"error": {"message": f"the fake says {fault}"}})
        else:
            answers: dict[str | None, tuple[list[int], dict[str, Any]]] = {
                "empty": ([END], {"type": "stop", "matched": END}),
                "abort": ([], {"type": "abort", "message": "Aborted"}),
                "loop": ([7] * max_new_tokens, {"type": "length", "length": max_new_tokens}),
                "no end token": ([5], {"type": "stop", "matched": "NaN happened"}),
            }
            stopped = ([*reversed(input_ids), END], {"type": "stop", "matched": END})
            output_ids, finish_reason = answers.get(fault, stopped)
            self._reply(200, {"output_ids": output_ids, "meta_info": {"finish_reason": finish_reason}})

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output to the test."""
