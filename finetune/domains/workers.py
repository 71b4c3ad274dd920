"""The verifier processes: starting them, giving them jobs, and replacing the ones that hang or die.

Rule: a job that does not end in time costs its worker and itself, no other job. Only the thread of the pool starts and
ends workers: they die with the thread that started them, and a caller's may end early.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.boxes.launching import MARKER, end_group, new_marker
from finetune.domains.judging import Kind, Source
from finetune.errors import FinetuneError

START_SECONDS = 120.0
_OUTPUT_BYTES = 2000
_MAIN = "from finetune.domains.judging import main; main()"
# A verifier's own environment: no ranks, no tokens, no devices. What else it needs is named by verifier-args env=NAME.
_KEPT = """PATH HOME LANG LC_ALL TZ TMPDIR PYTHONPATH VIRTUAL_ENV LD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR
REQUESTS_CA_BUNDLE FINETUNE_HOME FINETUNE_CACHE HF_HOME HF_HUB_OFFLINE""".split()
_SET = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Job:
    """One call: which verifier, on which answers (as the worker takes them), within how many seconds."""

    verifier: int
    answers: list[dict[str, Any]]
    seconds: float
    what: str = "score"
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a job: results, one per answer; or failure, timeout or died. broken: a function broke its contract.

    printed: the end of what was printed meanwhile.
    """

    results: list[Any] | None = None
    failure: str | None = None
    broken: str | None = None
    printed: str = ""


@dataclass
class _Batch:
    """The jobs of one caller, who waits until none is open."""

    jobs: list[Job]
    num_open: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    marker: str
    deadline: float
    is_ready: bool = False
    work: tuple[_Batch, Job] | None = None
    received: bytes = b""
    printed: bytes = b""


class WorkerPool:
    """Verifier processes behind one thread. kinds, after the constructor, tells how each source wants to be called."""

    def __init__(
        self, sources: Sequence[Source], seconds: float, workers: int, passed: Sequence[str] = ()
    ) -> None:
        """Start the workers; raises what kept the first one from loading (bad_verifier, no_sandbox, ...)."""
        self._told = pickle.dumps({"sources": list(sources), "seconds": seconds})
        self._size = workers
        self._environment = worker_environment(os.environ, passed)
        self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._pending: deque[tuple[_Batch, Job]] = deque()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._hears = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._hears, selectors.EVENT_READ, None)
        self._is_closing = False
        self._loaded = threading.Event()
        self._fault: FinetuneError | None = None
        self.kinds: list[Kind] = []
        self._thread = threading.Thread(target=self._work, name="verifiers", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._fault is not None or not self.kinds:
            self.close()
            raise self._fault or FinetuneError("bad_verifier", "no verifier process could be started")

    def run(self, jobs: list[Job]) -> list[Outcome]:
        """Do the jobs, each on whichever worker is free, and return what came of them, in order. From any thread."""
        if not jobs:
            return []
        batch = _Batch(jobs, len(jobs))
        self._batches.put(batch)
        self._ring()
        while not batch.done.wait(0.5):
            if not self._thread.is_alive():
                raise FinetuneError("bad_verifier", "the verifiers are closed")
        if self._fault is not None:
            raise self._fault
        return [job.outcome or Outcome(failure="died") for job in jobs]

    def close(self) -> None:
        """End all workers, with everything that they started."""
        self._is_closing = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b".")

    def _work(self) -> None:
        try:
            while not self._is_closing and self._fault is None:
                self._take()
                self._staff()
                self._hand_out()
                self._listen()
        finally:
            for worker in list(self._workers):
                if worker.work is not None:
                    self._finish(*worker.work, Outcome(failure="died"))
                self._end(worker)
            self._take()
            for batch, job in self._pending:
                self._finish(batch, job, Outcome(failure="died"))
            self._selector.close()
            self._bell.close()
            self._hears.close()
            self._loaded.set()

    def _take(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                batch = self._batches.get_nowait()
                self._pending += [(batch, job) for job in batch.jobs]

    def _staff(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(self._started())

    def _started(self) -> _Worker:
        ours, theirs = socket.socketpair()
        marker = new_marker()
        with theirs:
            process = subprocess.Popen(
                # -P: the working directory is no place to import from
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(os.getpid())],
                env=self._environment | {MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        assert process.stdout is not None
        worker = _Worker(process, ours, marker, time.monotonic() + START_SECONDS)
        with contextlib.suppress(OSError):  # one that died at once is found by its closed channel
            ours.sendall(self._told)
        ours.setblocking(False)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._pending:
                return
            if worker.is_ready and worker.work is None:
                batch, job = self._pending.popleft()
                worker.work, worker.printed = (batch, job), b""
                told = {"verifier": job.verifier, "what": job.what, "answers": job.answers}
                worker.channel.setblocking(True)
                with contextlib.suppress(OSError):
                    worker.channel.sendall(pickle.dumps(told))
                worker.channel.setblocking(False)
                worker.deadline = time.monotonic() + job.seconds

    def _listen(self) -> None:
        """Wait for a reply, output, a new batch or the next deadline; then end the workers whose time is up."""
        busy = [worker for worker in self._workers if not worker.is_ready or worker.work]
        end = min((worker.deadline for worker in busy), default=time.monotonic() + 3600.0)
        for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
            if key.data is None:
                self._hears.recv(1 << 16)
            elif key.data in self._workers:
                self._heard(key.data, key.fileobj is key.data.channel, key.fd)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in self._workers]:
            if now >= worker.deadline and (not worker.is_ready or worker.work):
                self._lose(worker, "timeout")

    def _heard(self, worker: _Worker, is_reply: bool, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not is_reply:
            worker.printed = (worker.printed + data)[-_OUTPUT_BYTES:]
            if not data:
                self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        elif not data:
            self._lose(worker, "died")
        else:
            worker.received += data
            if worker.received.endswith(b"\n"):
                reply, worker.received = json.loads(worker.received), b""
                self._replied(worker, reply)

    def _replied(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if not worker.is_ready:
            if "code" in reply:
                self._fault = FinetuneError(reply["code"], reply["message"])
                return
            self.kinds = [Kind(**kind) for kind in reply["kinds"]]
            worker.is_ready = True
            self._loaded.set()
        elif worker.work is not None:
            (batch, job), worker.work = worker.work, None
            assert worker.process.stdout is not None
            with contextlib.suppress(OSError):  # what it printed before it replied: no more than a pipe holds
                worker.printed += os.read(worker.process.stdout.fileno(), 1 << 16)
            printed = worker.printed[-_OUTPUT_BYTES:].decode(errors="replace")
            self._finish(batch, job, Outcome(reply.get("results"), None, reply.get("broken"), printed))

    def _lose(self, worker: _Worker, why: str) -> None:
        """End a worker that hangs or has died, with its job. One that never got ready is the fault of all."""
        printed = self._end(worker).decode(errors="replace")
        if not worker.is_ready:
            what = "did not load within 120 seconds" if why == "timeout" else "died while it loaded"
            self._fault = FinetuneError("bad_verifier", f"a verifier process {what}: {printed}")
        elif worker.work is not None:
            self._finish(*worker.work, Outcome(failure=why, printed=printed))

    def _end(self, worker: _Worker) -> bytes:
        """Kill a worker with all that it started, and return the end of what it had printed."""
        self._workers.remove(worker)
        for source in (worker.channel, worker.process.stdout):
            assert source is not None
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        end_group(worker.process, worker.marker)
        with contextlib.suppress(OSError):
            assert worker.process.stdout is not None
            worker.printed += os.read(worker.process.stdout.fileno(), 1 << 16)
        worker.process.stdout.close()  # type: ignore[union-attr]
        worker.channel.close()
        return worker.printed[-_OUTPUT_BYTES:]

    def _finish(self, batch: _Batch, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        batch.num_open -= 1
        if batch.num_open == 0:
            batch.done.set()


def worker_environment(environ: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """Return what a verifier process finds in its environment: an allow-list, what we set, and the names asked for."""
    root = str(Path(__file__).parents[2])
    kept = {name: environ[name] for name in (*_KEPT, *passed) if name in environ}
    path = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    return kept | {name: value for name, value in _SET.items() if name not in passed} | {"PYTHONPATH": path}
