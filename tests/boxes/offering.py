"""An endpoint to reach from boxes: a server on a unix socket that sends back what it is sent, and keeps the request lines."""

import http.server
import socketserver
import threading
from pathlib import Path


class Endpoint:
    """Serves while it is entered. lines: the first line of each request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    def __enter__(self) -> "Endpoint":
        lines = self.lines

        class Echo(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                lines.append(self.requestline)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                lines.append(self.requestline)
                self.send_error(404)

            def log_message(self, *told: object) -> None:
                pass

            def address_string(self) -> str:
                return "box"

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 2  # a short one, which several connections at once overflow

            def get_request(self):  # type: ignore[no-untyped-def]
                connection, _ = super().get_request()
                return connection, ("box", 0)

        self._server = Server(str(self.path), Echo)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *told: object) -> None:
        self._server.shutdown()
        self._server.server_close()
