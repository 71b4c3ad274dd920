"""The versions of the policy as files that a server on this node can load, in memory where there is room.

Rule: a version has a path of its own and appears under it whole; no path ever holds two versions. Weights are merged in
fp32 and rounded once, and the base is only read.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.model.adapter import CONFIG_FILE, KEY, TENSOR_FILE, Adapter, read_adapter_config
from finetune.model.builtin import model_folder, write_model
from finetune.model.source import INDEX_FILE, WEIGHTS_FILE, Source, weight_files, weight_shapes
from finetune.records import folder_written_whole, to_json
from finetune.rollout.engine import BASE_VERSION
from finetune.rollout.weights import PACKED, digest, digests, sampled

SHARD_BYTES = 4_000_000_000  # of one weight file
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them
_ENTRY_BYTES = 160  # of a tensor in the head of a weight file, at most, without its name
ROOM = 3  # copies of the weights that memory must hold: what is served, what comes next, and one to spare
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class Version:
    """A state of the policy. number: optimizer steps so far.

    tensors: fp32 on the CPU; an adapter's by PEFT key, or a whole model's by their names in its files (then read once,
    so that they may be gathered layer by layer). files: name -> text of the small files of an adapter. Both are empty
    for the base.
    """

    number: int
    tensors: Iterable[tuple[str, Tensor]] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    is_base: bool = False

    @property
    def name(self) -> str:
        return BASE_VERSION if self.is_base else f"step-{self.number:06d}"

    @property
    def is_adapter(self) -> bool:
        return bool(self.files)


def base_version(number: int = 0) -> Version:
    """Return the untouched model as a version."""
    return Version(number, is_base=True)


def adapter_version(number: int, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> Version:
    """Return an adapter as a version; one whose every B is zero is the base.

    files: as model.policy.adapter_files gives them, adapter_config.json among them.
    """
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        return base_version(number)
    return Version(number, tuple((name, tensor.detach()) for name, tensor in tensors.items()), dict(files))


def whole_version(number: int, tensors: Iterable[tuple[str, Tensor]]) -> Version:
    """Return a whole model's weights as a version, by their names in its files; they are read once."""
    return Version(number, tensors)


@dataclass(frozen=True)
class Files:
    """A version on the disk.

    digests: of what an engine must hold, in the served type: weights by name, or an adapter's matrices as the kernels
    have them (`MODULE.A`, `MODULE.B`, the latter scaled). draw: where they are of samples of the weights, what chose
    those; it is told to an engine after it has loaded. rank: of an adapter.
    """

    version: Version
    folder: Path
    digests: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    draw: str | None = None


class VersionStore:
    """The folder of a run's versions on this node. dtype: the type in which servers hold the weights."""

    def __init__(self, source: Source, dtype: torch.dtype, run_id: str, root: Path | None = None) -> None:
        parent = root or memory_folder(_model_bytes(source, dtype) * ROOM)
        _sweep(parent, run_id)
        self.source = source
        self.dtype = dtype
        self.token = secrets.token_hex(
            3
        )  # a server from elsewhere may know our names from an earlier attempt
        self.folder = parent / f"finetune-{run_id}-{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._count = itertools.count()

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def served_name(self, version: Version) -> str:
        """Return a name that no server had before."""
        return f"{version.name}-{self.token}{next(self._count)}"

    def write_adapter(self, version: Version) -> Files:
        """Write an adapter's folder; raises FinetuneError(bad_adapter) where it fits the model only in part."""
        check_modules((name for name, _ in version.tensors), self.modules)
        target = self._new_folder(version)
        with _room(target), folder_written_whole(target) as folder:
            save_file(
                {name: tensor.contiguous() for name, tensor in version.tensors},
                folder / TENSOR_FILE,
                metadata={"format": "pt"},
            )
            for name, text in version.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        adapter = _adapter(version)
        found = dict(digests(_placed(adapter, self.dtype)))
        return Files(version, target, found, adapter.config.r)

    def write_probe(self, files: Files, factor: float) -> Files:
        """Write an adapter whose weights are the very file of `files`, and whose lora_alpha is `factor` times its own."""
        probe = self.linked(files, skip=(CONFIG_FILE,))
        config = json.loads((files.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        config["lora_alpha"] = config["lora_alpha"] * factor
        (probe.folder / CONFIG_FILE).write_text(to_json(config, indent=2), encoding="utf-8")
        return probe

    def write_merged(self, version: Version) -> Files:
        """Write a model folder with base and adapter summed, or with the whole weights, in the served type."""
        if version.is_base:
            return Files(version, self.base_folder, self._base_digests)
        if version.is_adapter:
            tensors = self._summed(version)
        else:
            tensors = ((name, tensor.to(self.dtype)) for name, tensor in version.tensors)
        target, draw = self._new_folder(version), secrets.token_hex(16)
        with _room(target), folder_written_whole(target) as folder:
            written = _write_weights(folder, tensors, weight_shapes(self.source))
            found = {name: digest(sampled(name, tensor, draw)) for name, tensor in written}
            config = json.loads((self.base_folder / "config.json").read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = str(self.dtype).removeprefix("torch.")
            (folder / "config.json").write_text(to_json(config, indent=2), encoding="utf-8")
        return Files(version, target, found, draw=draw)

    def whole_digests(self, files: Files) -> dict[str, str]:
        """Return the digests of all of the weights of merged files, which those of a sample stand for in `files`."""
        return files.digests if files.draw is None else dict(digests(_read_weights(files.folder)))

    def linked(self, files: Files, skip: tuple[str, ...] = ()) -> Files:
        """Return the same files under a new path, as hard links: nothing is copied."""
        folder = self._new_folder(files.version)
        folder.mkdir()
        for path in sorted(files.folder.iterdir()):
            if path.name not in skip and path.is_file():
                try:
                    os.link(path, folder / path.name)
                except OSError:  # the base may lie on another disk
                    (folder / path.name).symlink_to(path.resolve())
        return replace(files, folder=folder)

    def remove(self, files: Files) -> None:
        """Remove a version's folder; the base's own files stay."""
        if files.folder.parent == self.folder and files.folder != self._made_base:
            shutil.rmtree(files.folder, ignore_errors=True)

    @property
    def modules(self) -> set[str]:
        """The names of the model's matrices, without `.weight`."""
        return {
            name.removesuffix(".weight")
            for name, shape in weight_shapes(self.source).items()
            if len(shape) == 2
        }

    @property
    def base_folder(self) -> Path:
        """The folder with the base's files; those of a builtin model are made on first use."""
        if self.source.kind != "tiny":
            return model_folder(self.source)
        if not self._made_base.is_dir():
            with _room(self._made_base), folder_written_whole(self._made_base) as folder:
                write_model(self.source, folder)
        return self._made_base

    @property
    def _made_base(self) -> Path:
        return self.folder / BASE_VERSION

    @functools.cached_property
    def _base_tensors(self) -> list[tuple[str, Tensor]]:
        return list(_read_weights(self.base_folder))  # mapped files: they take no memory of their own

    @functools.cached_property
    def _base_digests(self) -> dict[str, str]:
        return dict(digests((name, tensor.to(self.dtype)) for name, tensor in self._base_tensors))

    def _summed(self, version: Version) -> Iterator[tuple[str, Tensor]]:
        check_modules((name for name, _ in version.tensors), self.modules)
        adapter = _adapter(version)
        for name, weight in self._base_tensors:
            module = name.removesuffix(".weight")
            if module in adapter.pairs:
                yield name, adapter.summed(weight, module, self.dtype)
            else:
                yield name, weight.to(self.dtype)

    def _new_folder(self, version: Version) -> Path:
        return self.folder / f"v{version.number:06d}.{next(self._count)}"


def _adapter(version: Version) -> Adapter:
    """Return a version's adapter, its config read as PEFT reads it."""
    tensors = dict(version.tensors)
    names = sorted({match["module"] for match in map(KEY.fullmatch, tensors) if match})
    pairs = {name: (tensors[_key(name, "A")], tensors[_key(name, "B")]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_text(version.files[CONFIG_FILE], encoding="utf-8")
        return Adapter(read_adapter_config(folder), pairs)


def _key(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def _placed(adapter: Adapter, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices as vLLM places them: in the served type, then B times the scale, rounded again; zero pairs not."""
    for module, (a, b) in adapter.pairs.items():
        if a.any() or b.any():
            yield f"{module}.A", a.to(dtype)
            yield f"{module}.B", b.to(dtype) * adapter.scale


def check_modules(keys: Iterable[str], modules: set[str]) -> None:
    """Raise FinetuneError(bad_adapter) unless each key is a LoRA weight of one of these modules, each with A and B."""
    sides: dict[str, set[str]] = {}
    strange = []
    for key in keys:
        match = KEY.fullmatch(key)
        if match and match["module"] in modules:
            sides.setdefault(match["module"], set()).add(match["side"])
        else:
            strange.append(key)
    strange += [module for module, found in sides.items() if found != {"A", "B"}]
    if strange or not sides:
        shown = ", ".join(sorted(strange)[:3]) or "no key at all"
        text = f"adapter for the engine: {len(strange)} keys fit no module of the served model, as {shown}"
        raise FinetuneError("bad_adapter", text, keys=sorted(strange)[:20])


def differing(served: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return the names of weights whose digests differ, or that one side alone has.

    A head that shares its weight with the embedding has no name of its own on our side; a packed copy is known by its
    original. What the model computes itself (rotary frequencies) is stored by some and served by none.
    """
    embedding = next((name for name in ours if name.endswith(EMBEDDING)), "")
    wrong = []
    for name, found in served.items():
        own = name.removesuffix(PACKED)
        if own not in ours and own.endswith(HEAD):
            own = embedding
        if ours.get(own) != found:
            wrong.append(name)
    untold = set(ours) - set(served)
    return wrong + sorted(name for name in untold if not name.endswith((HEAD, "rotary_emb.inv_freq")))


def memory_folder(needed: int) -> Path:
    """Return a folder in memory with that many bytes free, or the one for temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > needed:
        return memory
    return Path(tempfile.gettempdir())


def _model_bytes(source: Source, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(shape) for shape in weight_shapes(source).values())


def _read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Write weights as one file, or as several with an index; yield each once it is written. names: at least theirs.

    The safetensors format: the length of the head, a head in JSON that says where each tensor lies, the tensors. A tensor
    is written while it is still in the processor's caches, so room is left for the head, which is known last.
    """
    room = 64 * math.ceil((64 + sum(len(name.encode()) + _ENTRY_BYTES for name in names)) / 64)
    places: dict[str, str] = {}
    for number, shard in itertools.groupby(_sharded(tensors), key=lambda one: one[0]):
        file_name = f"model-{number:05d}.safetensors" if number else WEIGHTS_FILE
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        with (folder / file_name).open("wb") as file:
            file.seek(8 + room)
            for _, name, tensor in shard:
                plain = tensor.detach().contiguous()
                file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
                offsets = [end, end := end + plain.nbytes]
                head[name] = {
                    "dtype": _TYPES[plain.dtype],
                    "shape": [*plain.shape],
                    "data_offsets": offsets,
                }
                places[name] = file_name
                yield name, plain
            text = to_json(head).encode()
            assert len(text) <= room, "room was left for all names"
            file.seek(0)
            file.write(room.to_bytes(8, "little") + text.ljust(room))
    if len(set(places.values())) > 1:
        (folder / INDEX_FILE).write_text(to_json({"metadata": {}, "weight_map": places}), encoding="utf-8")


def _sharded(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield each tensor with the number of the file that it goes to."""
    number = size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > SHARD_BYTES:
            number, size = number + 1, 0
        size += tensor.nbytes
        yield number, name, tensor


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has a type of its own for a full disk
        raise FinetuneError(
            "disk_full", f"{folder}: a version cannot be written: {error}", path=str(folder)
        ) from error


def _sweep(parent: Path, run_id: str) -> None:
    """Remove what an attempt of this run that was killed left behind."""
    for folder in parent.glob(f"finetune-{glob.escape(run_id)}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
