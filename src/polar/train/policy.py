"""A causal language model of transformers, as the trainer sees it: rows in, log-probabilities of their trained ids out.

Knows no rewards and no loss. Four ways through the model, all to the same numbers:

* `plain`: one row at a time;
* `padded`: rows of about equal length side by side, the short ones filled up behind their end: for a model that can't take the next two;
* `packed`: rows end to end in one sequence, attention inside rows (`polar.train.attention`);
* `shared`: the same, with every beginning that rows have in common once (`polar.train.forest`), whether the system prompt and tools of all
  rows, a group's task, or the requests of a session before this one. Its cost is that of the ids that differ.

Whether this model really keeps rows apart is tried out once when it is loaded, since nothing in a configuration says so reliably.
Gradient checkpointing works with all of them; none uses a cache.

What `shared` costs is mostly attention where the prefix is long and the model small: 32 rows of 300 ids behind a prefix of 7,000 are 16,600
ids instead of 233,600, and a step over them takes a tenth of the time; of what is left, nine tenths are the rows' looks at the prefix, in
proportion to `layers * heads * head_dim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polar.errors import ConfigError
from polar.train.attention import FOREST, Kernel, Layout, kernel_for, prepare
from polar.train.forest import GRAIN, Forest, plant, rectangles
from polar.train.logprobs import token_logprobs
from polar.train.packing import pack, pack_shared
from polar.train.rows import Row

Way = Literal["plain", "padded", "packed", "shared"]

ROUNDING = 0.05
"""The largest difference, in log-probability, that another order of summation may make to a row (bfloat16 included)."""
SHARING_PAYS = 0.05
"""The share of the tokens that common beginnings must save."""


class Policy:
    """`model`: a transformers causal LM. `temperature`: what rollouts are sampled with (log-probabilities are of that distribution).

    Raises `ConfigError` for a model whose logits are anything but its LM head times its last hidden state (scaled or capped ones).
    """

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.backbone: nn.Module = _backbone(model)
        self._check_head()
        self._kernels: dict[tuple[torch.device, torch.dtype], Kernel | None] = {}
        self.why_not: dict[Way, str | None] = {"plain": None}
        """For each way, why this model cannot go it; `None` where it can."""
        unprepared: str | None = None
        try:
            prepare(self.backbone)
        except ConfigError as error:
            unprepared = str(error)
        self.why_not["padded"] = self._probe("padded")
        self.why_not["packed"] = unprepared or self._probe("packed")
        self.why_not["shared"] = self.why_not["packed"] or self._probe("shared")

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
    def vocabulary(self) -> int:
        """How many ids the model takes."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def _config(self) -> Any:
        config: Any = self.backbone.config
        return config.get_text_config()

    def choose(self, rows: Sequence[Row]) -> Way:
        """The cheapest way for these rows."""
        if len(rows) < 2:
            return "plain"
        if self.why_not["shared"] is None:
            whole = sum(map(len, rows))
            if whole - len(plant([row.ids for row in rows])) >= SHARING_PAYS * whole:
                return "shared"
        return next((way for way in ("packed", "padded") if self.why_not[way] is None), "plain")

    def pack(self, rows: Sequence[Row], budget: int, way: Way | None = None) -> list[list[int]]:
        """Row numbers in micro-batches of at most `budget` ids; where beginnings are shared, those count once."""
        plain = pack([len(row) for row in rows], budget)
        if self.why_not["shared"] is not None or way not in (None, "shared"):
            return plain
        shared = pack_shared([row.ids.numpy() for row in rows], budget, grain=GRAIN)
        computed = sum(len(plant([rows[number].ids for number in part])) for part in shared)
        pays = computed <= (1 - SHARING_PAYS) * sum(map(len, rows))
        return shared if way == "shared" or pays else plain

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[Tensor]:
        """For each row, float32[k] of its k trained ids. Raises `ConfigError` for a way that this model cannot go."""
        way = way or self.choose(rows)
        if (why := self.why_not[way]) is not None:
            raise ConfigError(f"{type(self.model).__name__} cannot take {way} rows: {why}")
        return self._logprobs(rows, way)

    def _logprobs(self, rows: Sequence[Row], way: Way, grain: int = GRAIN) -> list[Tensor]:
        match way:
            case "plain":
                hidden = [self._hidden(row.ids[None])[0, row.places - 1] for row in rows]
            case "padded":
                hidden = self._padded(rows)
            case "packed":
                hidden = self._grown(rows, plant([row.ids for row in rows], grain=None))
            case "shared":
                hidden = self._grown(rows, plant([row.ids for row in rows], grain=grain))
        targets = torch.cat([row.targets for row in rows]).to(self.device)
        found = token_logprobs(torch.cat(hidden), self.head_weight, targets, temperature=self.temperature)
        return list(found.split([len(row.places) for row in rows]))  # type: ignore[no-untyped-call]

    def _hidden(self, ids: Tensor, **more: Any) -> Tensor:
        """float[b, n, d] of int64[b, n]."""
        hidden: Tensor = self.backbone(input_ids=ids.to(self.device), use_cache=False, **more).last_hidden_state
        return hidden

    def _padded(self, rows: Sequence[Row]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for rectangle in rectangles([row.ids for row in rows]):
            hidden = self._hidden(rectangle.places)
            found.update((number, part[rows[number].places - 1]) for number, part in zip(rectangle.numbers, hidden, strict=True))
        return [found[number] for number in range(len(rows))]

    def _grown(self, rows: Sequence[Row], forest: Forest) -> list[Tensor]:
        """The mask says nothing: one of four dimensions is handed on as it is, so that no mask over all pairs is made."""
        places = [path[row.places - 1] for path, row in zip(forest.paths, rows, strict=True)]
        forest = forest.to(self.device)
        layers = int(self._config.num_hidden_layers)
        layout = Layout(forest, self._kernel(), torch.unique(torch.cat(places)), layers)
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        more = {FOREST: layout, "position_ids": forest.positions[None], "attention_mask": nothing}
        hidden = self._hidden(forest.ids[None], **more)[0]
        return [hidden[chosen.to(hidden.device)] for chosen in places]

    def _kernel(self) -> Kernel | None:
        key = (self.device, self.head_weight.dtype)
        if key not in self._kernels:
            config = self._config
            heads = int(config.num_attention_heads)
            groups = int(getattr(config, "num_key_value_heads", None) or heads)
            size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
            self._kernels[key] = kernel_for(*key, heads, groups, size)
        return self._kernels[key]

    def _check_head(self) -> None:
        row = _probe_row(self.head_weight.shape[0], 0, 3)
        with self.quietly():
            found = self._logprobs([row], "plain")[0]
            logits = self.model(input_ids=row.ids[None].to(self.device), use_cache=False).logits[0, row.places - 1].float()
        expected = torch.log_softmax(logits / self.temperature, -1).gather(1, row.targets[:, None].to(self.device))[:, 0]
        if (difference := float((expected - found).abs().max())) > ROUNDING:
            raise ConfigError(
                f"{type(self.model).__name__} makes its logits otherwise than by its LM head alone (a scale or a soft cap?), which is not "
                f"supported: log-probabilities would be off by {difference:.3g}"
            )

    def _probe(self, way: Way) -> str | None:
        """Tries the way on rows of a few ids. A leak is told by the same row after two different ones: same shapes and same arithmetic, so
        what it does not see cannot change it even in the last bit. It comes last in any order that a way may take."""
        size = self.head_weight.shape[0]
        first, other, second = (_probe_row(size, *kind) for kind in ((0, 3), (min(1, size - 2), 5), (size - 1, 11)))
        try:
            with self.quietly():
                plain = self._logprobs([second], "plain")[0]
                after_first, after_other = (self._logprobs([before, second], way, grain=1)[1] for before in (first, other))
        except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"its forward pass refuses them ({error})"
        if not torch.equal(after_first, after_other):
            return f"one row would leak into the next (log-probabilities change by {float((after_first - after_other).abs().max()):.3g})"
        if (difference := float((plain - after_first).abs().max())) > ROUNDING:
            return f"its log-probabilities would change by {difference:.3g}"
        return None

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Without gradients and dropout."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)


def _probe_row(vocabulary: int, begin: int, step: int) -> Row:
    """A few ids that all such rows have in common, then `begin`, then others."""
    ids = torch.cat([torch.arange(6) * 7 % vocabulary, torch.tensor([begin]), (torch.arange(8) * step + step) % vocabulary])
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
