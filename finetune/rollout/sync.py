"""Bring a version of the policy to every engine, and prove there that it is the one that answers.

Rule: nothing is sampled from a version that was not proved on every engine. A version is staged everywhere, proved
everywhere, then activated everywhere or nowhere.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from finetune.errors import FinetuneError
from finetune.rollout.canary import Canary, Expected, Margin
from finetune.rollout.engine import BASE_VERSION
from finetune.rollout.proving import Engines, Method, Proof, Prover, Served, Unproved
from finetune.rollout.versions import Files, Version, VersionStore, check_modules

_ENGINE_CODES = ("engine_failed", "engine_timeout")


@dataclass(frozen=True)
class SyncReport:
    """How a version was delivered. margin: of the engine where it was least; None where digests alone proved.

    seconds: writing and loading; proof_seconds: the trainer's and the engines' log-probs, digests, probes; noise: mean
    |trainer - engine| of the version under its own name, in nats; acknowledged: the name or digest count of each engine.
    """

    version: str
    method: Method
    seconds: float = 0.0
    proof_seconds: float = 0.0
    margin: Margin | None = None
    noise: float | None = None
    attempts: int = 0
    acknowledged: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What metrics and events say of it."""
        margin = self.margin
        return {
            "sync_method": self.method,
            "sync_version": self.version,
            "sync_s": round(self.seconds, 4),
            "sync_proof_s": round(self.proof_seconds, 4),
            "sync_attempts": self.attempts,
            "sync_noise": self.noise,
            "sync_margin": None if margin is None else {**vars(margin), "ratio": margin.ratio},
            "sync_acknowledged": list(self.acknowledged),
        }


class Syncer:
    """Delivers versions. keep: older adapters that stay loaded, for requests that began under them."""

    def __init__(
        self,
        engines: Engines,
        store: VersionStore,
        mode: Literal["adapter", "merged"],
        retries: int = 2,
        keep: int = 0,
    ) -> None:
        self.engines = engines
        self.store = store
        self.mode = mode
        self.retries = retries
        self.keep = keep
        self._prover = Prover(engines, store, mode)
        self._served: list[Served] = []  # the newest last

    def deliver(self, version: Version, canary: Canary) -> SyncReport:
        """Bring `version` to all engines, prove it and have them sample from it.

        The first version is the base: it measures the noise. Raises FinetuneError: sync_unproved after `retries` more
        attempts, each under a new name and path; bad_adapter, disk_full. Then the version before stays active.
        """
        if self._served and version.name == self._served[-1].files.version.name:
            return SyncReport(version.name, "unchanged")
        if not self._served and not version.is_base:
            raise ValueError("the base is delivered first: it measures the noise")
        clock = _Clock()
        expected = Expected(canary)
        reasons: list[str] = []
        with clock.delivery():
            files = self._write(version)
        for attempt in range(1 + self.retries):
            with clock.delivery():
                served = self._new(files if attempt == 0 else self._again(files), expected, attempt)
            proofs = self._try(served, clock, reasons)
            if proofs:
                if served.files is not files:
                    self.store.remove(files)
                return _report(served, proofs, clock, attempt + 1)
            self._withdraw(served)
            if served.files is not files:
                self.store.remove(served.files)
        self.store.remove(files)
        self._restore(reasons)
        shown = "; ".join(dict.fromkeys(reasons))
        text = f"version {version.name} was not proved on the engines in {1 + self.retries} attempts: {shown[:1500]}"
        raise FinetuneError("sync_unproved", text, version=version.name, reasons=reasons[:20])

    def redeliver(self, server: int) -> SyncReport | None:
        """Bring what is active to an engine that was started anew, and prove it there by what the trainer said before.

        Return the report on the version that is sampled from, or None where nothing was delivered yet.
        Raises FinetuneError(sync_unproved).
        """
        report = None
        for served in self._served:  # the newest last
            report = self._redelivered(served, server)
        return report

    def _redelivered(self, served: Served, server: int) -> SyncReport:
        clock, reasons = _Clock(), list[str]()
        for attempt in range(1 + self.retries):
            try:
                with clock.delivery():
                    self._stage(served, server)
                served.answers.pop(server, None)
                with clock.proof():
                    proof = self._prover.prove(served, server, None)
                self._stamp(served, server)
                return _report(served, [proof], clock, attempt + 1)
            except (Unproved, FinetuneError) as error:
                if isinstance(error, FinetuneError) and error.code not in _ENGINE_CODES:
                    raise
                reasons.append(_reason(server, error))
                self._withdraw_from(served, server)
        name = served.files.version.name
        text = (
            f"version {name} was not proved on engine {server} after its restart: {'; '.join(reasons)[:1500]}"
        )
        raise FinetuneError("sync_unproved", text, version=name, reasons=reasons[:20])

    def close(self) -> None:
        """Remove the files of all versions."""
        self.store.close()

    # Staging.

    def _write(self, version: Version) -> Files:
        if self.mode == "merged":
            return self.store.write_merged(version)
        if version.is_base:
            return Files(version, self.store.base_folder)
        return self.store.write_adapter(version)

    def _again(self, files: Files) -> Files:
        return files if files.version.is_base else self.store.linked(files)

    def _new(self, files: Files, expected: Expected, attempt: int) -> Served:
        is_adapter = self.mode == "adapter" and not files.version.is_base
        name = self.store.served_name(files.version) if is_adapter else BASE_VERSION
        return Served(files, name, expected, attempt)

    def _try(self, served: Served, clock: _Clock, reasons: list[str]) -> list[Proof]:
        """Stage and prove on every engine, then activate; [] where one of them failed, and why in `reasons`."""
        proofs: list[Proof] = []
        previous = self._served[-1] if self._served else None
        for server in range(self.engines.num_servers):
            try:
                with clock.delivery():
                    self._stage(served, server)
                with clock.proof():
                    proofs.append(self._prover.prove(served, server, previous))
            except (Unproved, FinetuneError) as error:
                if isinstance(error, FinetuneError) and error.code not in _ENGINE_CODES:
                    raise
                reasons.append(_reason(server, error))
                return []
        try:
            with clock.delivery():
                self._activate(served, proofs)
        except FinetuneError as error:
            reasons.append(error.message)
            return []
        return proofs

    def _stage(self, served: Served, server: int) -> None:
        if served.name != BASE_VERSION:
            self._check_modules(served, server)
            self.engines.load_adapter(server, served.name, served.files.folder)
        elif self.mode == "merged" and (self._served or served.attempt or not served.files.version.is_base):
            self.engines.reload_weights(server, served.files.folder)
            if self._prover.can_digest(server):
                self.engines.call_workers(server, "finetune_repack_head")
            self.engines.reset_prefix_cache(server)

    def _check_modules(self, served: Served, server: int) -> None:
        """Compare the adapter's keys with the engine's own list of modules; where it gives none, the model's was compared."""
        modules = self._prover.modules_of(server)
        if modules is not None:
            check_modules((key for key, _ in served.files.version.tensors), modules)

    # Switching over.

    def _activate(self, served: Served, proofs: list[Proof]) -> None:
        for server in range(self.engines.num_servers):
            self._stamp(served, server)
        self.engines.activate(served.files.version.name, served.name)
        served.answers = {server: proof.answer for server, proof in enumerate(proofs)}
        served.expected.close()  # an engine may have to be proved again while the trainer is at work
        self._prover.noise = max(proof.noise for proof in proofs)
        self._served.append(served)
        kept = self.keep if self.mode == "adapter" else 0
        while len(self._served) > 1 + kept:
            old = self._served.pop(0)
            self._withdraw(old)
            self.store.remove(old.files)

    def _stamp(self, served: Served, server: int) -> None:
        if self.mode == "merged":
            self.engines.stamp_version(server, served.files.version.name)

    def _withdraw(self, served: Served) -> None:
        for server in range(self.engines.num_servers):
            self._withdraw_from(served, server)

    def _withdraw_from(self, served: Served, server: int) -> None:
        """Unload an adapter; one that is not there, or cannot be unloaded, costs the engine a place and nothing else."""
        if served.name != BASE_VERSION:
            try:
                self.engines.unload_adapter(server, served.name)
            except FinetuneError:
                return

    def _restore(self, reasons: list[str]) -> None:
        """Put the weights back that were active, on engines that a failed delivery reloaded in part."""
        if self.mode != "merged" or not self._served:
            return
        active = self._served[-1]
        for server in range(self.engines.num_servers):
            try:
                self._stage(active, server)
                self._prover.acknowledged(active, server)
                self._stamp(active, server)
            except (Unproved, FinetuneError) as error:
                reasons.append(f"the version before could not be restored: {_reason(server, error)}")


class _Clock:
    """Seconds spent on delivering and on proving."""

    def __init__(self) -> None:
        self.delivery_s = 0.0
        self.proof_s = 0.0

    @contextlib.contextmanager
    def delivery(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.delivery_s += time.perf_counter() - start

    @contextlib.contextmanager
    def proof(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.proof_s += time.perf_counter() - start


def _report(served: Served, proofs: list[Proof], clock: _Clock, attempts: int) -> SyncReport:
    weakest = min(proofs, key=lambda proof: proof.margin.ratio if proof.margin else math.inf)
    return SyncReport(
        version=served.files.version.name,
        method=weakest.method,
        seconds=clock.delivery_s,
        proof_seconds=clock.proof_s,
        margin=weakest.margin,
        noise=max(proof.noise for proof in proofs),
        attempts=attempts,
        acknowledged=tuple(proof.acknowledged for proof in proofs),
    )


def _reason(server: int, error: Exception) -> str:
    return f"engine {server}: {error}"
