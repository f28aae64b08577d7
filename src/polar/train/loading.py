"""A policy from a folder or a hub name: whole or with a LoRA adapter, in the number format asked for, on the device that is there.

Knows no optimiser, no rollout and no other process. Formats:

* `float32`: weights, arithmetic and optimiser in float32.
* `bfloat16`: weights and arithmetic in bfloat16, as the engine has them, so that the two agree; what is trained has float32 masters
  (`polar.train.optimizer`), LoRA adapters are float32 themselves.
* `float64`: for proofs.

A model's own dropout is off: engines sample without, so that the step would be of another distribution than the rows. An adapter's is as
its settings say.

A LoRA policy (Hu et al. 2021, arXiv:2106.09685) is its own reference: `reference_of` is the same model with its adapter turned off, not a
second copy.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from polar.errors import ConfigError
from polar.train.place import check_place, first_line, not_given
from polar.train.policy import Policy, Way
from polar.train.rows import Row

Dtype = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """A LoRA adapter: `W + alpha / r * B A`, with A: [r, in] and B: [out, r]; B starts at 0, so the policy starts as the base."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    """Above 0 the trainer's log-probabilities are not the engine's, which has none: for SFT, not for RL."""
    target_modules: str | Sequence[str] = "all-linear"
    """Names of modules, or `all-linear`: every linear layer but the LM head."""

    def __post_init__(self) -> None:
        if self.r < 1 or self.alpha <= 0:
            raise ValueError("LoRA's r is 1 or more and its alpha over 0")
        if not 0 <= self.dropout < 1:
            raise ValueError("LoRA's dropout is in [0, 1)")


def load_policy(
    model: str,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    lora: LoraSettings | None = None,
    adapter: Path | str | None = None,
    gradient_checkpointing: bool = False,
    temperature: float = 1.0,
    device: str | torch.device | None = None,
    trainable: bool = True,
) -> Policy:
    """A policy whose trainable weights are those that are to be trained: all, or those of the adapter.

    `model`: a folder in Hugging Face's format, or a hub name. `lora` starts a new adapter; `adapter` is a folder with a saved one, which
    goes on as it was saved (`lora` is then not looked at). `device` of `None`: this process's GPU, if it has one. `trainable=False`: a
    frozen policy, for a reference. Raises `ConfigError`, which says what to write instead, for a model that is not there or is no causal
    LM, a format or attention that it cannot be had in, and a LoRA target that it has not.
    """
    loaded = load_model(
        model,
        dtype=dtype,
        attention=attention,
        lora=lora,
        adapter=adapter,
        gradient_checkpointing=gradient_checkpointing,
        device=device,
        trainable=trainable,
    )
    return Policy(loaded, temperature=temperature)


def load_model(
    model: str,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    lora: LoraSettings | None = None,
    adapter: Path | str | None = None,
    gradient_checkpointing: bool = False,
    device: str | torch.device | None = None,
    trainable: bool = True,
) -> Any:
    """The model of `load_policy`: of transformers, or peft's around one."""
    base = _base(model, _dtype(dtype), attention, resolve_device(device))
    if adapter is not None:
        base = _with_saved_adapter(base, Path(adapter), trainable)
    elif lora is not None:
        base = _with_new_adapter(base, lora)
    _check_adapter(base)
    return _finished(base, gradient_checkpointing, trainable)


def check_loads(
    model: str,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
) -> None:
    """Raises `ConfigError` for what `load_model` would refuse and its config.json tells: no weights are read, and none are made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    check_place(model)
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=_dtype(dtype), attn_implementation=attention)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(_why_not_loaded(model, attention, error)) from error
    if lora is not None:
        made = _with_new_adapter(made, lora)
    _check_adapter(made)
    _finished(made, gradient_checkpointing, trainable=True)


def _finished(model: Any, gradient_checkpointing: bool, trainable: bool) -> Any:
    if gradient_checkpointing:
        checkpoint_gradients(model)
    if not trainable:
        model.requires_grad_(False)
    model.train(trainable)
    _without_dropout(model)
    return model


def _without_dropout(model: Any) -> None:
    """Its own, whether layers or numbers that modules hand to functions; what its config says stays."""
    for name, module in model.named_modules():
        if ".lora_dropout" in name:
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)


def resolve_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def checkpoint_gradients(model: Any) -> None:
    """Layers keep only their inputs and run again in the backward pass (Chen et al. 2016, arXiv:1604.06174)."""
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(f"{type(model).__name__} has no gradient checkpointing: set gradient_checkpointing to false")
    with _without_future():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def _without_future() -> Iterator[None]:
    """transformers 5.20 and later call gradient checkpointing otherwise; it is not the user who has to know, nor is it by peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


class WithoutAdapter(Policy):
    """The base of a LoRA policy: the same weights, the adapter turned off while it is asked."""

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__)
        self.policy = policy

    def pack(self, rows: Sequence[Row], budget: int, way: Way | None = None) -> list[list[int]]:
        """As the policy's, which may be in pieces."""
        return self.policy.pack(rows, budget, way)

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[Tensor]:
        with self.model.disable_adapter():
            return self.policy.logprobs(rows, way)


def is_lora(policy: Policy) -> bool:
    return hasattr(policy.model, "disable_adapter")


def reference_of(policy: Policy, model: str, **how: Any) -> Policy:
    """The policy that a KL term is against: `policy` without its adapter, or, where it is trained whole, a frozen copy of `model`, with
    the settings `how` of `load_policy`."""
    if is_lora(policy):
        return WithoutAdapter(policy)
    return load_policy(model, temperature=policy.temperature, trainable=False, **how)


GATHER = "polar_gather"
"""What a model in pieces is asked for its whole weights by; `polar.train.shares` sets it."""


def whole_weights(model: Any) -> dict[str, Tensor]:
    """As `state_dict`, in one piece wherever the weights lie."""
    gather: Callable[[], dict[str, Tensor]] | None = getattr(model, GATHER, None)
    return dict(model.state_dict()) if gather is None else gather()


def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights that the policy computes with, by their names in the base: each adapted one with its `alpha / r * B A` added in float32
    and rounded once. A new dictionary; the model and its adapter stay as they are. Without an adapter, just its weights."""
    weights = whole_weights(model)
    if not hasattr(model, "disable_adapter"):
        return weights
    adapter = str(model.active_adapter)
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or adapter not in layer.lora_A:
            continue
        down, up = (weights[f"{name}.{part}.{adapter}.weight"] for part in ("lora_A", "lora_B"))
        place = _adapted(name, layer)
        base = weights[place]
        wide = torch.promote_types(torch.float32, base.dtype)
        added = _product(layer, up.to(wide), down.to(wide)) * layer.scaling[adapter]
        weights[place] = (base.to(wide) + added).to(base.dtype).cpu()  # a GPU has no room for the model twice
    return {
        re.sub(r"(\.base_layer)+\.", ".", name.removeprefix("base_model.model.")): value
        for name, value in weights.items()
        if ".lora_" not in name
    }


def _adapted(name: str, layer: Any) -> str:
    """The name of the weight that peft's layer `name` adapts. Those of several weights of one module are around each other."""
    inner = layer
    while hasattr(inner, "base_layer"):
        inner, name = inner.base_layer, f"{name}.base_layer"
    return f"{name}.{getattr(layer, 'parameter_name', 'weight')}"


def _product(layer: Any, up: Tensor, down: Tensor) -> Tensor:
    """B A, as the weight is laid out: [out, in], or one of these for each of e experts, whose A are [e r, in] and whose B [out, r e], the
    expert the faster index."""
    experts = getattr(layer, "num_experts", 1)
    if experts > 1:
        a, b = down.reshape(experts, -1, down.shape[-1]), up.reshape(len(up), -1, experts)
        return torch.einsum("ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio", b, a)
    return (up @ down).T if getattr(layer, "fan_in_fan_out", False) else up @ down


def save_model(model: Any, folder: Path) -> None:
    """What `load_policy` takes: the whole model, or its adapter alone."""
    _save(model, folder, whole_weights(model))


def save_merged(model: Any, folder: Path) -> None:
    """A model without an adapter that computes what this one does, for an engine or a user."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    _save(inner, folder, merged_weights(model))


def _save(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """transformers writes the format that the model holds its weights in, which in pieces is float32: engines that load the folder go by
    what config.json says."""
    adapter = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}  # else peft asks the hub, each time
    model.save_pretrained(folder, state_dict=weights, **adapter)
    config = folder / "config.json"
    dtype = next((one.dtype for one in weights.values() if one.is_floating_point()), None)
    if dtype is not None and config.is_file():
        facts = json.loads(config.read_text())
        if (said := str(dtype).removeprefix("torch.")) != facts.get("dtype"):
            config.write_text(json.dumps({**facts, "dtype": said}, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True, slots=True)
class Shape:
    """A loaded model without its weights: enough to build one like it elsewhere."""

    config: Any
    dtypes: tuple[torch.dtype, ...]
    """Of its parameters: parts of some models are kept in float32."""
    adapter: Any = None
    """peft's configuration."""


def shape_of(model: Any) -> Shape:
    adapter = model.peft_config[model.active_adapter] if hasattr(model, "peft_config") else None
    return Shape(model.config, tuple(one.dtype for one in model.parameters()), adapter)


def empty_model(
    shape: Shape,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    gradient_checkpointing: bool = False,
    trainable: bool = True,
    **_: Any,
) -> Any:
    """A model as `load_model` gives, on the CPU, with anything in weights and buffers: memory that is never touched costs nothing."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=_dtype(dtype), attn_implementation=attention)
        if shape.adapter is not None:
            with _without_future():
                model = _peft().get_peft_model(model, shape.adapter)
    for one, kind in zip(model.parameters(), shape.dtypes, strict=True):
        one.data = one.data.to(kind)
    model.to_empty(device="cpu")
    inner = model.get_base_model() if shape.adapter is not None else model
    inner.tie_weights()
    return _finished(model, gradient_checkpointing, trainable)


def _dtype(name: str) -> torch.dtype:
    if name not in get_args(Dtype):
        hint = ": its range is too small for gradients without loss scaling; use bfloat16" if name in ("float16", "fp16", "half") else ""
        raise ConfigError(f"dtype {name!r} is not one to train in{hint} (one of {', '.join(get_args(Dtype))})")
    found: torch.dtype = getattr(torch, name)
    return found


def _base(name: str, dtype: torch.dtype, attention: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    check_place(name)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=attention, device_map={"": device}, output_loading_info=True
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(_why_not_loaded(name, attention, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{name} lacks weights of a {type(model).__name__} ({_some(missing)}); they would be random. "
            "Is it a base model without its LM head, or another format?"
        )
    if wrong := sorted(str(one[0]) for one in report["mismatched_keys"]):
        raise ConfigError(f"{name}: shapes of weights are not those of its config.json ({_some(wrong)})")
    return model


def _why_not_loaded(name: str, attention: str, error: Exception) -> str:
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "Unrecognized configuration class" in said or "AutoModelForCausalLM" in said:
        return f"{name} is not a causal language model that transformers knows: {said}"
    if "attn_implementation" in str(error) or "flash" in str(error).lower() or "sdpa" in said.lower():
        return f"attention {attention!r} cannot be had for {name} here: {said} (sdpa comes with PyTorch)"
    if not Path(name).is_dir():
        return not_given(name, error)
    return f"{name} cannot be loaded: {said}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _with_new_adapter(base: Any, lora: LoraSettings) -> Any:
    peft = _peft()
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, bias="none"
    )
    try:
        with _without_future():
            return peft.get_peft_model(base, config)
    except ValueError as error:
        if "not found" not in str(error):
            raise ConfigError(f"lora: {type(base).__name__} cannot be adapted so: {first_line(error)}") from error
        names = sorted({name.rpartition(".")[2] for name, one in base.named_modules() if isinstance(one, torch.nn.Linear)})
        raise ConfigError(f"lora.target_modules {targets!r} fits no layer of {type(base).__name__}; it has {', '.join(names)}") from error


def _with_saved_adapter(base: Any, folder: Path, trainable: bool) -> Any:
    peft = _peft()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} has no adapter_config.json: it holds no adapter")
    try:
        with _without_future():
            return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=trainable)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the adapter in {folder} does not fit {type(base).__name__}: {str(error).splitlines()[0]}") from error


def _check_adapter(model: Any) -> None:
    """The head's weight is used as it is (`Policy.head_weight`): what an adapter adds to it would be left out without a word."""
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type != "LORA" or config.use_dora or config.modules_to_save or config.bias != "none":
            raise ConfigError("only plain LoRA adapters can be trained: no other kind, no DoRA, no biases, no modules_to_save")
    for part in (model.get_output_embeddings(), model.get_input_embeddings()):
        if hasattr(part, "base_layer") or hasattr(part, "modules_to_save"):
            raise ConfigError("a LoRA adapter of the LM head or the embeddings is not supported: leave them out of lora.target_modules")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs peft: pip install 'polar-rl[train]'") from error
    return peft
