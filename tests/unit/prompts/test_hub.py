"""Files of a hub's data set: fetched at one commit, and every way in which that fails is one clear line."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.errors import UserError
from services.files import read_json
from services.prompts.hub import locate, locate_for
from services.runs import create_run
from services.settings import RowsSettings, Settings

COMMIT, LATER_COMMIT = "c" * 40, "d" * 40
FILES = {"data/a.jsonl": b'{"query": "1?"}\n', "data/b.jsonl": b'{"query": "2?"}\n', "README.md": b"read me"}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as the client asks for: what a revision holds, and its files."""

    head = COMMIT

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if "gated/" in self.path:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "missing/" in self.path:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "broken/" in self.path:
            self._send(500, b"{}", {})
        elif "/moved" in self.path:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith("/api/datasets/open/set"):
            siblings = [{"rfilename": name} for name in FILES]
            asked = self.path.rpartition("/")[2]
            commit = asked if asked in {COMMIT, LATER_COMMIT} else type(self).head
            self._send(200, json.dumps({"id": "open/set", "sha": commit, "siblings": siblings}).encode(), {})
        else:
            commit, _, name = self.path.partition("/resolve/")[2].partition("/")
            etag = f'"{abs(hash(FILES[name])):040x}"'
            self._send(200, FILES[name], {"ETag": etag, "X-Repo-Commit": commit})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    use_hub(monkeypatch, address, tmp_path / "cache")
    monkeypatch.setattr(Hub, "head", COMMIT)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def rows(dataset: str, revision: str = "main", data_files: str = "data/*.jsonl") -> RowsSettings:
    return RowsSettings.model_validate(
        {
            "name": "source",
            "dataset": dataset,
            "revision": revision,
            "data_files": [data_files],
            "adapter": "question",
            "column": "query",
        }
    )


def test_the_named_files_are_fetched_at_the_commit_of_the_revision(hub: str) -> None:
    fetched = locate(rows("open/set"))
    assert [path.read_bytes() for path in fetched.files] == [FILES["data/a.jsonl"], FILES["data/b.jsonl"]]
    assert fetched.commit == COMMIT


def test_a_run_keeps_to_the_commit_that_it_began_with(
    hub: str, tmp_path: Path, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = create_run(tmp_path / "runs", "begun", make_settings())
    assert locate_for(begun, rows("open/set")).commit == COMMIT
    monkeypatch.setattr(Hub, "head", LATER_COMMIT)
    assert locate_for(begun, rows("open/set")).commit == COMMIT
    later = create_run(tmp_path / "runs", "later", make_settings())
    assert locate_for(later, rows("open/set")).commit == LATER_COMMIT
    assert read_json(begun.record)["commits"] == {"open/set@main": COMMIT}
    # Taken up again by a command that gives a configuration, it keeps what it recorded.
    create_run(tmp_path / "runs", "begun", make_settings())
    assert locate_for(begun, rows("open/set")).commit == COMMIT


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (rows("gated/set"), r"source: data set gated/set at main is gated: .* HF_TOKEN"),
        (rows("missing/set"), r"missing/set at main: no such data set, or it is private"),
        (rows("open/set", revision="moved"), r"open/set at moved: there is no such revision"),
        (rows("open/set", data_files="*.parquet"), r"has no file '\*\.parquet'; there are: README\.md, data/a\.jsonl"),
        (rows("broken/set"), r"broken/set at main: the hub at http://127.* gave nothing"),
    ],
)
def test_what_cannot_be_fetched_is_told_in_one_line(hub: str, shape: RowsSettings, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        locate(shape)
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(UserError, match=r"the hub at http://127\.0\.0\.1:9 gave nothing .* as files") as caught:
        locate(rows("open/set"))
    assert "\n" not in str(caught.value)


def test_a_hub_that_may_not_be_asked_is_told(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        locate(rows("open/set"))


def test_local_files_need_no_hub() -> None:
    local = RowsSettings.model_validate({"name": "s", "files": ["a.jsonl"], "adapter": "question", "column": "query"})
    assert locate(local) == ([Path("a.jsonl")], None)
