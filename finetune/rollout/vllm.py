"""Sample from vLLM servers: exact token ids and log-probs, checked token by token, whatever servers do wrong.

Rule: what cannot be proved to be what was asked for is asked for again or lost as a Fault; it never shifts the others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from finetune.errors import FinetuneError
from finetune.rollout.answers import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    Expected,
    generation_request,
    read_completions,
    read_scores,
    scoring_request,
)
from finetune.rollout.control import GENERATE, Control, is_loopback
from finetune.rollout.engine import BASE_VERSION, Call, Completion, Fault, Sampling
from finetune.rollout.server import ManagedServer
from finetune.rollout.slots import ServerState, Slots

RETRIES = 2  # of a completion that is missing or cannot be trained on
RESTARTS = 2  # of one server without an answer in between
_SCORES_AT_ONCE = 32  # of one server that bears it
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Unanswered:
    """A request that got no answer of the engine. is_late: it took too long."""

    text: str
    is_late: bool = False


class VllmEngine:
    """Samples from one or several servers under one version of the weights (an Engine).

    servers: started ManagedServers that are ready, or the URLs of running ones, which are checked when the engine is made
    (version, scale-out endpoint, processed logprobs; what `sync` needs) and raise FinetuneError(engine_unfit).
    vocab_size: rows of the embedding. concurrency: completions that one server makes at once.
    on_restart(index): called in a worker thread after a server was restarted, to deliver the current weights to it again
    (it may call every method below but sample); its FinetuneErrors come out of sample(). beat: called about once a second
    while sample() waits.
    All methods may be called from any thread. `server` is an index into `servers`; `model` is a served name or "base".
    """

    def __init__(
        self,
        servers: Sequence[ManagedServer | str],
        *,
        vocab_size: int,
        timeout_s: float = 600.0,
        concurrency: int = 64,
        sync: Literal["adapter", "merged"] | None = None,
        lora_rank: int | None = None,
        on_restart: Callable[[int], None] = lambda index: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_restart, self.beat = on_restart, beat
        self._vocab_size, self._timeout_s = vocab_size, timeout_s
        self._active = (BASE_VERSION, BASE_VERSION)  # version, name to ask for
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm requests", daemon=True)
        self._thread.start()
        self._servers: list[ServerState] = []
        try:
            for index, server in enumerate(servers):
                managed = None if isinstance(server, str) else server
                url = server if isinstance(server, str) else server.url or ""
                control = Control(url, timeout_s)
                self._servers.append(ServerState(index, managed, control, Slots(concurrency)))
                self._servers[-1].is_open.set()
                control.connect()
                if managed is None:
                    control.check_fitness(sync, lora_rank)
            self._client = self._run(self._open_client())
        except BaseException:
            self._leave()
            raise

    async def _open_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=httpx.Timeout(self._timeout_s, connect=10.0, pool=None),
            trust_env=not all(is_loopback(server.control.url) for server in self._servers),
            # A server ends connections that idle for some seconds; a request must not meet such an end.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=1.0),
        )

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    @property
    def version(self) -> str:
        """The version that sample() draws from."""
        return self._active[0]

    # Completions

    def sample(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Completion | Fault]]:
        """As in Engine; the version is that which was active when the call came.

        Call i goes to server i modulo their number. Raises FinetuneError: too_long, bad_value (a temperature that vLLM
        would bend or refuse), and what a restart or on_restart raises.
        """
        return self.answers(calls, sampling, *self._active)

    def answers(
        self, calls: Sequence[Call], sampling: Sampling, version: str, model: str
    ) -> list[list[Completion | Fault]]:
        """As sample(), of a version and by the name that servers know it by."""
        self._check(calls, sampling)
        return self._run(self._sample(calls, sampling, version, model))

    def _check(self, calls: Sequence[Call], sampling: Sampling) -> None:
        if sampling.temperature and not LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE:
            text = f"temperature {sampling.temperature:g}: vLLM samples at 0, or from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}"
            raise FinetuneError("bad_value", text, setting="temperature")
        context = min(server.control.context or 1 << 60 for server in self._servers)
        for index, call in enumerate(calls):
            # A server shortens max_tokens without a word where prompt and completion do not fit.
            if not 0 < len(call.prompt_ids) <= context - sampling.max_new_tokens:
                text = (
                    f"prompt {index}: {len(call.prompt_ids)} tokens and {sampling.max_new_tokens} new ones, in a context"
                    f" of {context}"
                )
                raise FinetuneError("too_long", text, index=index)

    async def _sample(
        self, calls: Sequence[Call], sampling: Sampling, version: str, model: str
    ) -> list[list[Completion | Fault]]:
        expected = Expected(sampling, self._vocab_size, model, version, frozenset())
        tasks = [
            asyncio.ensure_future(self._outcomes(self._servers[index % len(self._servers)], call, expected))
            for index, call in enumerate(calls)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _outcomes(
        self, server: ServerState, call: Call, expected: Expected
    ) -> list[Completion | Fault]:
        """Return `count` outcomes of one call: in as many requests as the server's room makes necessary."""
        if expected.sampling.temperature == 0:  # all alike, and more than one at once is refused
            (outcome,) = await self._part(server, replace(call, count=1), expected)
            return [copy.deepcopy(outcome) for _ in range(call.count)]
        parts = [self._part(server, part, expected) for part in _parts(call, server.slots.size)]
        return [outcome for part in await asyncio.gather(*parts) for outcome in part]

    async def _part(self, server: ServerState, call: Call, expected: Expected) -> list[Completion | Fault]:
        """Ask for the completions of a call; those that are missing or unfit are asked for again, each alone."""
        found = await self._ask(server, call, expected)
        for tried in range(RETRIES + 1):
            lost = [index for index, outcome in enumerate(found) if isinstance(outcome, str)]
            if not lost or tried == RETRIES:
                break
            again = [replace(call, seed=call.seed + index, count=1) for index in lost]
            answers = await asyncio.gather(*(self._ask(server, one, expected) for one in again))
            for index, (outcome,) in zip(lost, answers, strict=True):
                found[index] = outcome
        return [Fault("protocol", outcome) if isinstance(outcome, str) else outcome for outcome in found]

    async def _ask(
        self, server: ServerState, call: Call, expected: Expected
    ) -> list[Completion | Fault | str]:
        for is_last in (False, True):
            # Room is held for the request alone, not while a server is restarted: it scores before it samples again.
            await server.enter(call.count)
            try:
                starts, control = server.starts, server.control
                name = control.base if expected.model == BASE_VERSION else expected.model
                is_reloaded = expected.model == BASE_VERSION != expected.version
                stamps = {expected.version} if is_reloaded else {BASE_VERSION, control.origin}
                asked = replace(expected, model=name, stamps=frozenset(stamps))
                answer = await self._post(control.url, generation_request(call, asked))
            finally:
                server.slots.give(call.count)
            if isinstance(answer, str):
                return [answer] * call.count
            if not isinstance(answer, _Unanswered):
                server.restarts_in_a_row = 0
                return list(read_completions(answer, call, asked))
            if is_last or not await self._recover(server, starts, answer):
                break
        return [Fault("server", answer.text)] * call.count

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Return the answer as JSON, the text of a refusal, or that the engine gave none."""
        try:
            response = await self._client.post(url + GENERATE, json=body)
        except httpx.HTTPError as error:
            is_late = isinstance(error, httpx.ReadTimeout)
            return _Unanswered(f"{url}: {type(error).__name__} {error}".strip(), is_late)
        if response.status_code >= 500:
            return _Unanswered(f"{url} answered {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            return f"refused with {response.status_code}: {response.text[:300]}"
        try:
            return response.json()
        except ValueError:
            return f"an answer that is no JSON: {response.text[:100]!r}"

    async def _recover(self, server: ServerState, starts: int, problem: _Unanswered) -> bool:
        """Whether the request may be sent again: the server is well, or was restarted and has its weights again."""
        async with server.lock:
            if server.starts != starts:
                return True
            if not problem.is_late and await asyncio.to_thread(server.control.health):
                return True
            if server.managed is None or server.restarts_in_a_row >= RESTARTS:
                return False
            server.restarts_in_a_row += 1
            server.is_open.clear()
            try:
                await asyncio.to_thread(self._restart, server)
            finally:
                server.starts += 1
                server.is_open.set()
            return True

    def revive(self) -> bool:
        """Restart each server of ours that does not answer, with the weights that were active; return whether there was one.

        Completions do so by themselves; whoever delivers weights asks for it. Raises what a restart or on_restart raises.
        """
        before = [server.starts for server in self._servers]
        for server in self._servers:
            self._run(self._recover(server, server.starts, _Unanswered("before a delivery")))
        return before != [server.starts for server in self._servers]

    def _restart(self, server: ServerState) -> None:
        assert server.managed is not None
        server.managed.restart()
        server.control.url = server.managed.url or ""
        server.control.connect()
        self.on_restart(server.index)

    # Versions and weights

    def activate(self, version: str, model: str | None = None) -> None:
        """Sample from `version` on all servers from now on, or raise FinetuneError(engine_failed) and change nothing.

        model: the name to ask for: an adapter's (default: `version`), which every server must list; or "base" after
        weights were reloaded: then every server must bear the stamp `version`.
        """
        name = model or version
        for server in self._servers:
            control = server.control
            if name != BASE_VERSION:
                is_there = name in control.list_models()
            else:
                own = {version, control.origin} if version == BASE_VERSION else {version}
                is_there = (
                    control.read_stamp() in own if control.stamp is not None else version == BASE_VERSION
                )
            if not is_there:
                text = f"engine {server.index} does not hold version {version} under the name {name}"
                raise FinetuneError("engine_failed", text, server=server.index, stamp=control.stamp)
        self._active = (version, name)

    def score(self, server: int, sequences: Sequence[Sequence[int]], model: str) -> list[list[float]]:
        """Return log p(ids[t] | ids[:t]) at temperature 1 for t >= 1 of each sequence (so one less than ids).

        Raises FinetuneError(engine_failed): no answer, another model answered, values missing, not finite or above 0.
        """
        return self._run(self._score(self._servers[server], sequences, model))

    async def _score(
        self, server: ServerState, sequences: Sequence[Sequence[int]], model: str
    ) -> list[list[float]]:
        # Without the recovery of completions: this is also how a restarted server proves its weights.
        name = server.control.base if model == BASE_VERSION else model
        at_once = asyncio.Semaphore(1 if server.scores_alone else _SCORES_AT_ONCE)
        room = server.slots.size if server.scores_alone else 0

        async def one(ids: Sequence[int]) -> list[float]:
            async with at_once:
                await server.slots.take(room)
                try:
                    answer = await self._post(server.control.url, scoring_request(ids, name))
                finally:
                    server.slots.give(room)
            found = read_scores(answer, ids, name) if isinstance(answer, dict) else answer
            if isinstance(found, list):
                return found
            reason = found.text if isinstance(found, _Unanswered) else str(found)
            raise FinetuneError(
                "engine_failed", f"engine {server.index} gives no log-probs of {model}: {reason}"
            )

        return list(await asyncio.gather(*(one(ids) for ids in sequences)))

    def load_adapter(self, server: int, name: str, folder: Path) -> None:
        """Load an adapter under a name that the server never had; raises FinetuneError(engine_failed) with its answer."""
        self._servers[server].control.load_adapter(name, folder)

    def unload_adapter(self, server: int, name: str) -> None:
        self._servers[server].control.unload_adapter(name)

    def reload_weights(self, server: int, folder: Path) -> None:
        """Replace the weights in place by those of a model folder. Does not reset the prefix cache nor stamp."""
        self._servers[server].control.reload_weights(folder)

    def reset_prefix_cache(self, server: int, limit_s: float = 30.0) -> None:
        """Forget cached prefixes; refused while blocks are held, so it is asked until `limit_s`, then engine_failed."""
        self._servers[server].control.reset_prefix_cache(limit_s)

    def stamp_version(self, server: int, version: str) -> None:
        """Name the weights that the server now holds; every completion's span must bear the name."""
        self._servers[server].control.stamp_version(version)

    def stamp(self, server: int) -> str:
        """Return the name of the weights as the server says it ("default" after its start)."""
        return self._servers[server].control.read_stamp()

    def weight_digests(self, server: int) -> dict[str, str] | None:
        """Return what the worker extension's method finetune_weight_digests() returns; None where the server lacks it.

        Raises FinetuneError(engine_failed) for several workers (tensor parallel), whose parts cannot be compared.
        """
        return self._servers[server].control.weight_digests()

    def call_workers(
        self, server: int, method: str, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Return the results of a worker method, one for each worker (/collective_rpc; JSON in, JSON or str out)."""
        return self._servers[server].control.call_workers(method, timeout_s, **kwargs)

    def list_models(self, server: int) -> list[str]:
        """Return the names that a server answers to, adapters included; ours includes "base"."""
        return self._servers[server].control.list_models()

    def health(self, server: int) -> bool:
        return self._servers[server].control.health()

    # Leaving

    def close(self) -> None:
        """Stop own servers; running ones are left alone."""
        if self._thread.is_alive():
            self._run(self._client.aclose())
            self._leave()
        for server in self._servers:
            if server.managed is not None:
                server.managed.stop()

    def _leave(self) -> None:
        for server in self._servers:
            server.control.close()
        self._run(self._give_up())  # whoever waits for a completion in another thread is told so
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _give_up(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Do asynchronous work in the thread of the requests and wait for it, with heartbeats."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                self.beat()
            return future.result()
        finally:
            future.cancel()


def _parts(call: Call, most: int) -> Iterator[Call]:
    """Yield calls of at most so many completions that together are the call: completion i keeps the seed `seed` + i."""
    for start in range(0, call.count, most):
        yield replace(call, seed=call.seed + start, count=min(most, call.count - start))
