"""The policy: the one module that ranks wrap, from token ids to log-probs; nothing reads a weight around it.

Tensors: B sequence, T token, N supervised position, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.config import RunConfig
from finetune.data.batches import Batch
from finetune.errors import FinetuneError
from finetune.model.adapter import (
    BASE_FILE,
    CONFIG_FILE,
    base_file,
    load_adapter_tensors,
    read_adapter_config,
    refuse_other_base,
)
from finetune.model.builtin import load_model
from finetune.model.footprint import SHORT_ROWS
from finetune.model.logprobs import token_logps
from finetune.model.lora import LoraLinear
from finetune.model.source import Source, model_digest

# Attention kernels that take a bool mask as who sees whom; eager would add it to the scores.
MASKED_KERNELS = ("sdpa", SHORT_ROWS)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Policy(nn.Module):
    """A causal language model in training; `model` is the transformers model, adapted or whole."""

    def __init__(self, model: Any, compute_dtype: torch.dtype, is_adapted: bool) -> None:
        super().__init__()
        self.model: Any = model  # transformers' or PEFT's class, whose own types say little
        self.compute_dtype = compute_dtype
        self.is_adapted = is_adapted

    @property
    def generator(self) -> nn.Module:
        """Return what generation may run on: the adapted model, never a sharded one."""
        return self.model

    @property
    def causal_model(self) -> PreTrainedModel:
        return self.model.get_base_model() if self.is_adapted else self.model

    def forward(self, batch: Batch, temperature: float = 1.0, entropy_N: Tensor | None = None) -> Tensor:
        """Return the log-prob of each target, shape (N,), float32; the head sees supervised positions alone.

        entropy_N, where it is given, is filled with the entropy at each of them, outside the graph.
        """
        causal = self.causal_model
        with self._compute():
            # No cache, and no mask but one that says all: with either, transformers would drop the walls between packed
            # rows in silence.
            output = causal.base_model(
                input_ids=batch.input_ids_BT,
                position_ids=batch.position_ids_BT,
                attention_mask=None if batch.attend_BTT is None else batch.attend_BTT[:, None],
                use_cache=False,
            )
            hidden_ND = output.last_hidden_state.flatten(0, 1)[batch.selected_N]
            weight_VD = causal.get_output_embeddings().weight
            return token_logps(
                hidden_ND.to(self.compute_dtype),
                weight_VD.to(self.compute_dtype),
                batch.targets_N,
                temperature,
                entropy_N=entropy_N,
            )

    def _compute(self) -> contextlib.AbstractContextManager[object]:
        """Full tuning keeps fp32 weights and computes in bf16; an adapted model already has the compute type."""
        if self.is_adapted or self.compute_dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(next(self.parameters()).device.type, dtype=self.compute_dtype)

    @contextlib.contextmanager
    def adapter_scaled(self, factor: float) -> Iterator[None]:
        """Multiply the adapters' scale for the time of the block; 0 gives the bare model."""
        layers = [module for module in self.modules() if isinstance(module, LoraLayer)]
        before = [dict(layer.scaling) for layer in layers]
        for layer in layers:
            layer.scaling = {name: scale * factor for name, scale in layer.scaling.items()}
        try:
            yield
        finally:
            for layer, scaling in zip(layers, before, strict=True):
                layer.scaling = scaling

    @property
    def takes_masks(self) -> bool:
        """Whether attention may be told position by position who sees whom: plain causal layers, and a kernel that reads it."""
        config = self.causal_model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        is_plain = kinds <= {"full_attention"} and not (has_window and not kinds)
        return is_plain and self.causal_model.config._attn_implementation in MASKED_KERNELS

    def decoder_layers(self) -> list[nn.Module]:
        """Return the repeated blocks, which sharding gathers one at a time."""
        names = set(self.causal_model._no_split_modules or [])
        layers = [module for module in self.causal_model.modules() if type(module).__name__ in names]
        return layers or list(
            max(_module_lists(self.causal_model), key=lambda blocks: sum(1 for _ in blocks))
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in the model's files (adapter keys in PEFT form)."""
        return {
            _file_name(name): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def build_policy(config: RunConfig, source: Source) -> Policy:
    """Load the model and make it trainable as the settings say.

    The adapter's start depends on config.seed alone, so that all ranks begin with the same weights. Raises
    FinetuneError(bad_adapter) for an init_adapter that does not fit, bad_value for targets that name nothing.
    """
    dtype = DTYPES[config.dtype]
    adapted = config.tuning == "lora"
    model = load_model(source, dtype if adapted else torch.float32, config.attention)
    model.config.use_cache = False
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not adapted:
        return Policy(model.train(), dtype, is_adapted=False)
    torch.manual_seed(config.seed)
    lora = read_adapter_config(config.init_adapter) if config.init_adapter else lora_config(config)
    lora.inference_mode = False
    lora._register_custom_module({nn.Linear: LoraLinear})
    try:
        adapted_model = get_peft_model(model.requires_grad_(False), lora, autocast_adapter_dtype=True)
    except ValueError as error:
        raise FinetuneError(
            "bad_value", f"lora_targets: {str(error)[:300]}", setting="lora_targets"
        ) from error
    policy = Policy(adapted_model.train(), dtype, is_adapted=True)
    for parameter in policy.trainable().values():
        parameter.data = parameter.data.float()
    if config.init_adapter:
        refuse_other_base(config.init_adapter, source.id, model_digest(source))
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.trainable().items()}
        copy_tensors(policy, load_adapter_tensors(config.init_adapter, shapes))
    return policy


def copy_tensors(policy: Policy, tensors: dict[str, Tensor]) -> None:
    """Copy whole tensors, by file name, into an unsharded policy."""
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.copy_(tensors[name])


def adapter_files(policy: Policy, source: Source) -> dict[str, str]:
    """Return the small files that make a folder of adapter weights a PEFT adapter: {} for a whole model."""
    if not policy.is_adapted:
        return {}
    values = policy.model.peft_config["default"].to_dict()
    values |= {
        "base_model_name_or_path": source.id,
        "inference_mode": True,
        "target_modules": sorted(values["target_modules"]),
    }
    plain = {key: value for key, value in values.items() if not isinstance(value, set) and value != {}}
    return {
        CONFIG_FILE: json.dumps(plain, indent=2, sort_keys=True, default=str),
        BASE_FILE: base_file(source.id, model_digest(source)),
    }


def check_head(policy: Policy) -> None:
    """Compare our log-probs with the model's own logits on a few tokens.

    A model that scales, caps or biases its logits would train on wrong probabilities without a word. Raises
    FinetuneError(unsupported_model).
    """
    length = 8
    vocabulary = policy.causal_model.get_input_embeddings().weight.shape[0]
    ids_BT = (torch.arange(length, device=next(policy.parameters()).device) % vocabulary)[None]
    targets_N = ids_BT[0, 1:]
    batch = Batch(
        ids_BT,
        None,
        torch.arange(length - 1),
        targets_N,
        torch.ones(length - 1),
        torch.zeros(length - 1),
        length,
    )
    was_training = policy.training
    policy.eval()
    with torch.no_grad():
        ours_N = policy(batch)
        logits_TV = policy.causal_model(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
    policy.train(was_training)
    theirs_N = logits_TV.log_softmax(dim=-1).gather(1, targets_N[:, None])[:, 0]
    if (difference := float((ours_N - theirs_N).abs().max())) > 0.05:
        raise FinetuneError(
            "unsupported_model",
            f"log-probs differ from the model's own by {difference:.3f}: its head does more than a product",
        )


def check_packing(policy: Policy, module: nn.Module) -> None:
    """Prove on this model and this attention that packed rows do not see each other: another first row, same second row.

    Every rank calls it (under FSDP2 the forward is a collective). Raises FinetuneError(packing_unsafe).
    """
    device = next(policy.parameters()).device
    length = 12
    was_training = module.training
    module.eval()
    seen = []
    for shift in (0, 7):
        first = [(3 * index + shift) % 50 for index in range(length)]
        second = [(5 * index + 1) % 50 for index in range(length)]
        ids_BT = torch.tensor([first + second], device=device)
        places_BT = torch.tensor([[*range(length), *range(length)]], device=device)
        selected_N = torch.arange(length, 2 * length - 1, device=device)
        ones_N = torch.ones(length - 1, device=device)
        with torch.no_grad():
            seen.append(
                module(
                    Batch(ids_BT, places_BT, selected_N, ids_BT[0, length + 1 :], ones_N, ones_N, 2 * length)
                )
            )
    module.train(was_training)
    if (leak := float((seen[0] - seen[1]).abs().max())) > 0:
        attention = policy.causal_model.config._attn_implementation
        raise FinetuneError(
            "packing_unsafe",
            f"packed rows see each other under attention {attention} (by {leak:.3g}): leave --packing out",
        )


def lora_config(config: RunConfig) -> LoraConfig:
    """Return the adapter that the settings describe."""
    names = config.lora_targets
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=names if names == "all-linear" else [name.strip() for name in names.split(",")],
        task_type="CAUSAL_LM",
    )


def _file_name(name: str) -> str:
    """Drop the adapter's name, which PEFT's files do not have."""
    return name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")


def _module_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    yield from (module for module in model.modules() if isinstance(module, nn.ModuleList))
