"""What a model can take of a record: how many tokens, which token ids, which labels.

Messages name the limit, which is public, and never the record, its length or its label, which are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError

__all__ = ["Limits", "check_lengths", "check_limits", "class_count", "limits_of"]

_IGNORED_LABEL = -100  # of the loss functions of torch and transformers
_INTEGERS = (torch.int64, torch.int32)
# Names of tables of learned positions: a token behind the last row has none.
_POSITIONS = ("position_embeddings", "embed_positions", "position_embedding", "wpe")
# Tokenizers without a limit say a huge number.
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class Limits:
    """Public limits of a record. None: no limit, or not known.

    Attributes:
        tokens: most tokens, padding included. vocabulary: token ids lie below it. words: token labels lie below it.
        classes: class labels lie below it (see `class_count`).
    """

    tokens: int | None = None
    vocabulary: int | None = None
    words: int | None = None
    classes: int | None = None


def class_count(model: nn.Module) -> int | None:
    """Number of classes of a model with one class label a record; None where labels are something else."""
    config = getattr(model, "config", None)
    names = [cls.__name__ for cls in type(model).__mro__]
    classifier = any(name.endswith(("ForSequenceClassification", "ForImageClassification")) for name in names)
    kind = getattr(config, "problem_type", None) or "single_label_classification"
    count = getattr(config, "num_labels", None)
    return count if classifier and kind == "single_label_classification" and (count or 0) > 1 else None


def _rows(module: nn.Module | None) -> int | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.shape[0]


def _positions(model: nn.Module) -> int | None:
    """Rows of the model's table of learned positions, less those that it keeps for padding."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            kept = 0 if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - kept)
    declared = [
        getattr(getattr(model, "config", None), key, None) for key in ("max_position_embeddings", "n_positions")
    ]
    return min([*found, *(limit for limit in declared if isinstance(limit, int))]) if found else None


def limits_of(model: nn.Module, processing_class: Any = None) -> Limits:
    """The limits of a model (learned positions, embeddings, head) and of its tokenizer (`model_max_length`)."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokens = [_positions(model), getattr(tokenizer, "model_max_length", None)]
    known = [limit for limit in tokens if isinstance(limit, int) and limit < _NO_LIMIT]
    pretrained = hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")
    return Limits(
        tokens=min(known) if known else None,
        vocabulary=_rows(model.get_input_embeddings()) if pretrained else None,
        words=_rows(model.get_output_embeddings()) if pretrained else None,
        classes=class_count(model),
    )


def _too_long(limit: int) -> PrivacyConfigError:
    return PrivacyConfigError(
        f"A record of more than {limit} tokens was given",
        f"The model or its tokenizer goes up to {limit}: behind that there are no positions, and an update that fails "
        "in the middle of training would tell that the record was drawn",
        f"Cut records when they are tokenized (`truncation=True, max_length={limit}`), or raise "
        "`tokenizer.model_max_length` if the model can take more",
    )


def _no_tokens() -> PrivacyConfigError:
    return PrivacyConfigError(
        "A record without tokens was given, and the data collator makes a row of width zero of it",
        "The model has nothing to read: an update that fails in the middle of training would tell that the record was "
        "drawn",
        "Give such a record one padding token with mask 0, as `CompletionCollator` does, or leave it out",
    )


def check_lengths(records: Any, limits: Limits, collate: Callable[[list], Mapping[str, Any]]) -> None:
    """Refuse, before training, records that are too long, or empty ones that the collator cannot make a row of.

    Looks at `input_ids` of lists and of `datasets.Dataset`. Records that only the collator makes are looked at in its
    batches (`check_limits`), all of them when owners are computed.
    """
    if "input_ids" in (getattr(records, "column_names", None) or ()):
        plain = records.with_format(None) if hasattr(records, "with_format") else records
        lengths = [len(ids) for ids in plain["input_ids"]]
    elif isinstance(records, (list, tuple)):
        lengths = [len(r["input_ids"]) if isinstance(r, Mapping) and "input_ids" in r else -1 for r in records]
    else:
        return
    if limits.tokens is not None and max(lengths, default=0) > limits.tokens:
        raise _too_long(limits.tokens)
    if 0 in lengths and _width(collate([records[lengths.index(0)]])) == 0:
        raise _no_tokens()


def _width(batch: Mapping[str, Any]) -> int | None:
    ids = batch.get("input_ids")
    return ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() >= 2 else None


def check_limits(batch: Mapping[str, Any], label_names: Sequence[str], limits: Limits) -> None:
    """Refuse a batch with a record that the model cannot take."""
    width = _width(batch)
    if width == 0:
        raise _no_tokens()
    if width is not None and limits.tokens is not None and width > limits.tokens:
        raise _too_long(limits.tokens)
    ids = batch.get("input_ids")
    if ids is not None and limits.vocabulary is not None and bool(((ids < 0) | (ids >= limits.vocabulary)).any()):
        raise PrivacyConfigError(
            f"A record has a token id outside 0 to {limits.vocabulary - 1}",
            "The model has no embedding for it",
            "Tokenize with the model's own tokenizer, or enlarge the embeddings (`resize_token_embeddings`)",
        )
    for name in label_names:
        labels = batch.get(name)
        if labels is None or labels.dtype not in _INTEGERS:
            continue
        one_each = labels.numel() == labels.shape[0]
        if one_each and limits.classes is not None and _outside(labels, limits.classes):
            raise PrivacyConfigError(
                f"A record has a class label in `{name}` outside 0 to {limits.classes - 1}",
                f"The model's head has {limits.classes} outputs (`model.config.num_labels`), and no loss for another "
                "class",
                "Number the classes from 0, and load the model with `num_labels` set to their number "
                f"({_IGNORED_LABEL} marks a record without a label)",
            )
        if labels.dim() == 2 and limits.classes is None and limits.words is not None and _outside(labels, limits.words):
            raise PrivacyConfigError(
                f"A record has a token label in `{name}` outside 0 to {limits.words - 1}",
                f"The model's LM head has {limits.words} outputs, and no loss for another token",
                f"Use token ids as labels, and {_IGNORED_LABEL} for tokens that are not supervised",
            )


def _outside(labels: torch.Tensor, count: int) -> bool:
    return bool((((labels < 0) | (labels >= count)) & (labels != _IGNORED_LABEL)).any())
