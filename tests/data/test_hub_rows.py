"""Rows of the Hub: what it answers has a code, and no word in a name is taken for its answer."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = """
import json, sys
from finetune.data.rows import read_rows
from finetune.errors import FinetuneError, Problems

def code_of(name):
    try:
        read_rows([name])
    except (FinetuneError, Problems) as error:
        return getattr(error, "errors", [error])[0].code

print(json.dumps({name: code_of(name) for name in sys.argv[1:]}))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """It has nothing, and lets nobody in where "licensed" is asked for."""

    def do_GET(self) -> None:
        status, code = (403, "GatedRepo") if "licensed" in self.path else (404, "RepoNotFound")
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *rest: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_what_the_hub_says_of_rows_has_a_code_whatever_they_are_called(hub: str, tmp_path: Path) -> None:
    names = ["me/licensed", "me/rows", "me/rows-403", "me/gated-offline"]
    environ = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", READ, *names],
        env=environ | {"HF_DATASETS_OFFLINE": "0", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    codes = json.loads(done.stdout)
    assert codes == dict(zip(names, ["access_denied", *["file_missing"] * 3], strict=True)), done.stderr
