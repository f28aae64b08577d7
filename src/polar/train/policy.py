"""A causal language model of transformers, as the trainer sees it: rows in, log-probabilities of their trained ids out.

Knows no rewards and no loss. Three ways through the model, all to the same numbers:

* `plain`: one row at a time;
* `packed`: rows end to end in one sequence, positions starting over at each row, so that attention stays inside rows. Whether this
  model really keeps rows apart is tried out once when it is loaded, since nothing in a configuration says so reliably: recurrent layers
  without a kernel for packed rows leak one row into the next;
* `shared`: the prefix that all rows have in common (system prompt and tools) once, with its keys and values kept and its gradient, then the
  rest of each row on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polar.errors import ConfigError
from polar.train.logprobs import token_logprobs
from polar.train.rows import Row, shared_prefix

Way = Literal["plain", "packed", "shared"]

ROUNDING = 0.05
"""The largest difference, in log-probability, that another order of summation may make to a row (bfloat16 included)."""
SHARING_PAYS = 0.3
"""The share of a micro-batch's tokens that a common prefix must save."""


class Policy:
    """`model`: a transformers causal LM. `temperature`: what rollouts are sampled with (log-probabilities are of that distribution)."""

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.backbone: nn.Module = _backbone(model)
        self.why_not_packed = self._probe("packed")
        """Why rows cannot be packed with this model; `None` where they can."""
        self.why_not_shared = self._probe("shared")

    @classmethod
    def load(cls, path: str, *, dtype: str = "float32", attention: str = "sdpa", temperature: float = 1.0) -> Self:
        """A model from a folder (or a hub name, where there is a network)."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention), temperature=temperature)

    @property
    def head_weight(self) -> Tensor:
        """float[v, d] of the LM head, tied or not."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    def choose(self, rows: Sequence[Row]) -> Way:
        """The cheapest way for these rows."""
        total = sum(map(len, rows))
        if len(rows) > 1 and self.why_not_shared is None and shared_prefix(rows) * (len(rows) - 1) >= SHARING_PAYS * total:
            return "shared"
        return "packed" if len(rows) > 1 and self.why_not_packed is None else "plain"

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[Tensor]:
        """For each row, float32[k] of its k trained ids. Raises `ConfigError` for a way that this model cannot go."""
        way = way or self.choose(rows)
        why = {"packed": self.why_not_packed, "shared": self.why_not_shared}.get(way)
        if why is not None:
            raise ConfigError(f"{type(self.model).__name__} cannot take {way} rows: {why}")
        return self._logprobs(rows, way)

    def _logprobs(self, rows: Sequence[Row], way: Way) -> list[Tensor]:
        match way:
            case "plain":
                hidden = [self._hidden(row.ids)[0, row.places - 1] for row in rows]
            case "packed":
                hidden = self._packed(rows)
            case "shared":
                hidden = self._shared(rows)
        targets = torch.cat([row.targets for row in rows]).to(self.device)
        found = token_logprobs(torch.cat(hidden), self.head_weight, targets, temperature=self.temperature)
        return list(found.split([len(row.places) for row in rows]))  # type: ignore[no-untyped-call]

    def _hidden(self, ids: Tensor, **more: Any) -> Tensor:
        more.setdefault("use_cache", False)
        hidden: Tensor = self.backbone(input_ids=ids[None].to(self.device), **more).last_hidden_state
        return hidden

    def _packed(self, rows: Sequence[Row]) -> list[Tensor]:
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None].to(self.device)
        hidden = self._hidden(torch.cat([row.ids for row in rows]), position_ids=positions)[0]
        return [part[row.places - 1] for part, row in zip(hidden.split([len(row) for row in rows]), rows, strict=True)]  # type: ignore[no-untyped-call]

    def _shared(self, rows: Sequence[Row]) -> list[Tensor]:
        """The last id of the prefix goes with the rests: the first trained id is predicted from it."""
        length = shared_prefix(rows) - 1
        if length < 1:
            return self._packed(rows) if self.why_not_packed is None else [self._hidden(row.ids)[0, row.places - 1] for row in rows]
        from transformers import DynamicCache

        prefix = DynamicCache()
        self._hidden(rows[0].ids[:length], cache=prefix, use_cache=True)
        found = []
        for row in rows:
            cache = DynamicCache()
            for index, layer in enumerate(prefix.layers):
                cache.update(layer.keys, layer.values, index)
            positions = torch.arange(length, len(row))[None].to(self.device)
            hidden = self._hidden(row.ids[length:], cache=cache, use_cache=True, position_ids=positions)
            found.append(hidden[0, row.places - 1 - length])
        return found

    def _probe(self, way: Way) -> str | None:
        """Tries the way on rows of a few ids. A leak is told by the same row after two different ones: same shapes and same arithmetic, so
        what it does not see cannot change it even in the last bit."""
        size = self.head_weight.shape[0]
        common = torch.arange(6) * 7 % size
        first, second, other = (_probe_row(torch.cat([common, (torch.arange(9) * step + step) % size])) for step in (3, 11, 5))
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                plain = self._logprobs([second], "plain")[0]
                after_first, after_other = (self._logprobs([before, second], way)[1] for before in (first, other))
        except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"its forward pass refuses them ({error})"
        finally:
            self.model.train(was_training)
        if not torch.equal(after_first, after_other):
            return f"one row would leak into the next (log-probabilities change by {float((after_first - after_other).abs().max()):.3g})"
        if (difference := float((plain - after_first).abs().max())) > ROUNDING:
            return f"its log-probabilities would change by {difference:.3g}"
        return None


def _probe_row(ids: Tensor) -> Row:
    places = torch.arange(6, len(ids))
    return Row(ids, places, torch.zeros(len(places)), torch.ones(len(places)), 0.0)


def _backbone(model: Any) -> nn.Module:
    """The model below its LM head, LoRA's wrapper or not. Raises `ConfigError` where there is none, or the head has a bias."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = getattr(inner, inner.base_model_prefix, None)
    if not isinstance(backbone, nn.Module) or backbone is inner:
        raise ConfigError(f"{type(inner).__name__} has no backbone below its LM head: it is no causal language model of the usual kind")
    if getattr(inner.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{type(inner).__name__} has an LM head with a bias, which is not supported")
    return backbone
