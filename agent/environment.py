"""What must never be stored or passed on: masking of secrets in everything we write, and the environment of children.

A child gets an allow-list of the environment, never all of it: an inherited WORLD_SIZE or API key reaches no process of ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?)$", re.IGNORECASE)
_SECRET_SHAPE = re.compile(
    r"\b(hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})\b"
)
# One slash is what is left of a URL that was taken for a path.
_URL_PASSWORD = re.compile(r"(?:(?<=://)|(?<=:/))[^/@\s'\"]+(?=@)")
_SHORTEST_SECRET = 6  # shorter values ("1", "yes") would blank out ordinary words

# Names that launched processes keep. What a trailing * stands for is any ending.
_ALLOWED = (
    "PATH HOME USER LOGNAME LANG LANGUAGE LC_* TZ TMPDIR XDG_CACHE_HOME XDG_CONFIG_HOME "
    "PYTHONPATH PYTHONHASHSEED VIRTUAL_ENV LD_LIBRARY_PATH "
    "CUDA_* CUBLAS_* CUDNN_* NVIDIA_* HIP_* ROCR_* ROCM_* HSA_* NCCL_* RCCL_* GLOO_* TORCH_* PYTORCH_* TORCHINDUCTOR_* TRITON_* "
    "OMP_* MKL_* KMP_* ONEDNN_* DNNL_* GOMP_* OPENBLAS_* ATEN_* MALLOC_* "
    "VLLM_* HF_* HUGGING_FACE_HUB_TOKEN HUGGINGFACE_HUB_CACHE TRANSFORMERS_* TOKENIZERS_PARALLELISM "
    "http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE FINETUNE_*"
).split()
# What a replayed command needs set again; the rest of the allowed names belongs to the machine or the user.
_REPLAYED = (
    "PYTHONPATH PYTHONHASHSEED CUDA_* CUBLAS_* HIP_* ROCR_* HSA_* NCCL_* RCCL_* GLOO_* TORCH_* PYTORCH_* "
    "OMP_* MKL_* GOMP_* KMP_* VLLM_* HF_HOME HF_HUB_* HF_ENDPOINT FINETUNE_*"
).split()


def _matches(name: str, patterns: list[str]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )


def is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name))


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets, longest first, so that none masks a part of another."""
    found = {
        value for name, value in environ.items() if is_secret_name(name) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(found, key=len, reverse=True)


def scrub_text(text: str, secrets: list[str]) -> str:
    """Return the text without the given secrets, passwords in URLs and anything shaped like a well-known token."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _SECRET_SHAPE.sub(MASK, _URL_PASSWORD.sub(MASK, text))


def scrub(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Return a JSON value with every string in it scrubbed."""
    return _scrubbed(value, secret_values(environ))


def _scrubbed(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return scrub_text(value, secrets)
    if isinstance(value, dict):
        return {name: _scrubbed(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(item, secrets) for item in value]
    return value


def child_environment(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: the allowed names of `environ`, then what we set ourselves."""
    kept = {name: value for name, value in environ.items() if _matches(name, _ALLOWED)}
    fixed = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return kept | fixed | dict(extra)


def replayed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a child's environment that a pasted command must set again to give the same run; no secrets."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if _matches(name, _REPLAYED) and not is_secret_name(name)
    }
