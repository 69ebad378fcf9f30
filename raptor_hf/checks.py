"""Preflight: what would break the guarantee is found before training, and refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import Finding, PrivacyConfigError, UnsupportedModelError
from raptor_hf.limits import Limits, check_limits
from raptor_hf.moe.layout import MoELayout, find_moe_layout, tied_or_shared
from raptor_hf.moe.routing import token_mask
from raptor_hf.moe.selection import all_among
from raptor_hf.privacy.accounting import default_delta
from raptor_hf.probes import probe
from raptor_hf.validate import large_delta

__all__ = [
    "CheckReport",
    "check_batch",
    "check_collator",
    "check_dataset",
    "check_evaluation",
    "check_model",
    "check_processing_class",
    "check_sizes",
]

# As many evaluation records all standing in the training set are no coincidence of duplicates.
_EVALUATION_SAMPLE = 100


@dataclass(frozen=True)
class CheckReport:
    """What `check_model` found. Attributes: layout: None when it could not be told. findings: errors first."""

    layout: MoELayout | None
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which training is refused."""
        return tuple(finding for finding in self.findings if finding.severity == "error")


def check_model(
    model: nn.Module,
    *,
    records: Sequence[Any] = (),
    collate: Callable[[list], Mapping[str, Any]] | None = None,
    mode: str = "functorch",
    label_names: Sequence[str] = ("labels",),
    raise_on_error: bool = True,
) -> CheckReport:
    """Look for everything in a model, and in a collator, that would couple records or break the guarantee.

    Without records the structure alone is looked at. With records, a few real forward passes in train mode and
    per-sample gradients by the engine `mode` show whether a record's values move with its neighbours.

    Args:
        records: dataset items, at most three are used. With a model that has no adapters yet, the passes run on a
            copy of it. collate: records -> batch; default: `transformers.default_data_collator`.

    Raises:
        UnsupportedModelError, PrivacyConfigError: the first error found, unless `raise_on_error=False`.

    Formal guarantees:
        None: a check finds what it looks for. It cannot see what happens on other records only, such as a branch
        taken for long batches.
    """
    layout, findings = _structure(model)
    if not any(finding.severity == "error" for finding in findings) and len(records):
        assert layout is not None
        findings += probe(model, layout, list(records[:3]), collate, mode=mode, label_names=label_names)
    report = CheckReport(layout, tuple(sorted(findings, key=lambda finding: finding.severity != "error")))
    if raise_on_error and report.errors:
        raise report.errors[0].error()
    return report


def _structure(model: nn.Module) -> tuple[MoELayout | None, list[Finding]]:
    try:
        layout = find_moe_layout(model)
    except UnsupportedModelError as error:
        return None, [Finding.of(error)]
    findings = [*(_normalisation(model) or _opacus(model)), *_auxiliary_losses(model), *_task(model), *_peft(model)]
    plan: Any = getattr(model, "raptor_adapters", None)
    attached = plan is not None
    if not attached or plan.weights == "adapters":
        findings += _tied(model, layout)  # base weights are differentiated as a whole, whatever shares them
    if attached:
        findings += [*(_trainable_routers(model, layout) if plan.weights != "full" else []), *_narrow(model)]
    findings += _chance(layout, model, attached)
    return layout, list({finding.what: finding for finding in findings}.values())


# Heads with a loss that is not the mean over a record's own next tokens, nor one label a record.
_OTHER_TASKS = ("ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "ForMultipleChoice")


def _task(model: nn.Module) -> list[Finding]:
    return [
        Finding(
            f"The model's head is one {task} (`{type(model).__name__}`)",
            "Its labels would be taken for a language model's next tokens, or for one label a record: what is "
            "differentiated would not be the loss that the model computes",
            "Use a class for sequence classification or causal language modelling; multiple choice is scored by the "
            "latter (docs/language-models.md)",
            kind=UnsupportedModelError,
        )
        for task in _OTHER_TASKS
        if task in (getattr(model, "loss_type", None) or "", type(model).__name__[-len(task) :])
    ]


def _peft(model: nn.Module) -> list[Finding]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        Finding(
            f"The model carries an adapter of PEFT (`{name}`)",
            "What trained it is in no budget, and records may have been the same; its weights would be taken for the "
            "public base model's",
            "Load the base model without it; to go on with an earlier run, resume from its checkpoint",
            kind=UnsupportedModelError,
        )
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ][:1]


def _opacus(model: nn.Module) -> list[Finding]:
    """Opacus's `ModuleValidator`: batch and instance normalisation with trainable parameters.

    What it says of LSTM, GRU and attention layers is about its own gradient engine. It does not see frozen layers,
    subclasses, routing, losses, collators, nor expert layers whose rows are tokens instead of records.
    """
    from opacus.validators import ModuleValidator

    return [
        Finding(
            f"Opacus's ModuleValidator refuses the model ({type(error).__name__})",
            str(error).strip().split(". ")[0],
            "Replace the layer by one that normalises each record on its own, e.g. `GroupNorm` or `LayerNorm`",
            kind=UnsupportedModelError,
        )
        for error in ModuleValidator.validate(model, strict=False)
        if "Norm" in str(error)
    ]


def _normalisation(model: nn.Module) -> list[Finding]:
    for name, module in model.named_modules():
        tracked = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if tracked or isinstance(module, nn.modules.batchnorm._BatchNorm):
            return [
                Finding(
                    f"The model has batch normalisation (`{name}`)",
                    "It normalises a record by statistics of the other records of the batch",
                    "Use a model with layer or RMS normalisation",
                    kind=UnsupportedModelError,
                )
            ]
    return []


def _auxiliary_losses(model: nn.Module) -> list[Finding]:
    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    for config in list(configs.values()):
        configs.update({id(part): part for part in vars(config).values() if hasattr(part, "model_type")})
    return [
        Finding(
            f"The model's `config.{flag}` is True",
            "The auxiliary load-balancing loss is a product of averages over the whole batch: one record's "
            "gradient would depend on its neighbours",
            f"Set `model.config.{flag} = False`; a frozen router needs no balancing",
        )
        for flag in ("output_router_logits", "add_router_probs")
        if any(getattr(config, flag, False) for config in configs.values())
    ]


def _tied(model: nn.Module, layout: MoELayout) -> list[Finding]:
    attached = getattr(model, "raptor_adapters", None) is not None
    return [
        Finding(
            f"The trainable parameter `{names[0]}` is tied to `{names[1]}`",
            "It belongs to two modules: a rule for one of them gives half of its per-sample gradient, and what is "
            "clipped is not what is added up",
            "Untie it in the model's configuration (`tie_word_embeddings=False`)",
            kind=UnsupportedModelError,
        )
        for parameter, names in tied_or_shared(model).items()
        if (
            parameter.requires_grad
            if attached
            else layout.trains_head and any(layout.role(name) == "head" for name in names)
        )
    ]


def _trainable_routers(model: nn.Module, layout: MoELayout) -> list[Finding]:
    return [
        Finding(
            f"The router parameter `{name}` is trainable",
            "Routing must stay as the public base model has it, or the owner map no longer says which expert a "
            "record touches",
            "Freeze it: `parameter.requires_grad_(False)`",
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and layout.role(name) == "router"
    ][:1]


def _narrow(model: nn.Module) -> list[Finding]:
    narrow = [
        n for n, p in model.named_parameters() if p.requires_grad and p.dtype not in (torch.float32, torch.float64)
    ]
    return [
        Finding(
            f"The trainable parameter `{name}` is not float32",
            "Noise and learning rate are spread over many small updates, which rounding to a narrower type would lose, "
            "while the budget is spent all the same",
            "Cast the base model before `attach_adapters`, not the adapters after it; `bf16=True` computes in bfloat16",
        )
        for name in narrow[:1]
    ]


def _chance(layout: MoELayout, model: nn.Module, attached: bool) -> list[Finding]:
    """Jitter and dropout in sparse layers: `attach_adapters` switches them off, so that later they are errors."""
    jitter, dropout = [], []
    for layer in layout.sparse_layers:
        for name, module in model.get_submodule(layer.name).named_modules(prefix=layer.name):
            rates = {key: value for key, value in vars(module).items() if "jitter" in key and isinstance(value, float)}
            on = any(rate > 0 for key, rate in rates.items() if key not in layout.family.not_chance)
            jitter += [name] if on else []
            inside = name.startswith(f"{layer.name}.{layer.experts_path}.")
            if inside and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                dropout.append(name)
    severity = "error" if attached else "warning"
    instead = "Set it to 0" if attached else "Nothing: `attach_adapters` and `RaptorTrainer` switch it off"
    findings = []
    if jitter:
        why = "It multiplies hidden states by noise before routing: chance would decide which expert owns a record"
        findings.append(Finding(f"The router `{jitter[0]}` has jitter noise", why, instead, severity))
    if dropout:
        why = "Its masks are drawn for the tokens that an expert got from the whole batch, not for each record"
        findings.append(Finding(f"There is dropout inside the routed experts (`{dropout[0]}`)", why, instead, severity))
    return findings


def check_dataset(dataset: Any) -> None:
    """Refuse a training set whose records cannot be drawn by index."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise PrivacyConfigError(
            f"`train_dataset` is a `{type(dataset).__name__}` without length or index",
            "Poisson sampling flips a coin for every record in every cycle, and the accounting is of that sampling; "
            "a stream of records cannot be sampled so",
            "Pass a map-style dataset, e.g. `datasets.Dataset`",
        )


def check_sizes(
    dataset: Any,
    dataset_size: int,
    expected_batch_size: int,
    *,
    batch_from: str = "",
    target_delta: float | None = None,
    private: bool = True,
) -> None:
    """Refuse B > n, and a public n that is not the number of records.

    Args:
        batch_from: from which arguments B was computed, when it was not given.
        target_delta: None: delta is n^-1.1; a large one gives a warning.
        private: whether the run has a guarantee, and so a delta.
    """
    if len(dataset) != dataset_size:
        raise PrivacyConfigError(
            f"`dataset_size={dataset_size}` was set for a training set of another length",
            "The sampling rate p = B / n and delta are computed from it, while every record that is there is sampled",
            "Leave `dataset_size` unset, or pass exactly that many records",
        )
    if expected_batch_size > dataset_size:
        raise PrivacyConfigError(
            f"`expected_batch_size={expected_batch_size}` ({batch_from or 'as was set'}) is more than the "
            f"{dataset_size} records",
            "The sampling rate p = B / n cannot exceed 1",
            f"{'Set' if batch_from else 'Lower'} `expected_batch_size` to the number of records or less, or add some",
        )
    if private and target_delta is None and (text := large_delta(default_delta(dataset_size), dataset_size)):
        warnings.warn(text, stacklevel=3)


def check_processing_class(processing_class: Any) -> None:
    """Refuse a tokenizer that pads on the left."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise PrivacyConfigError(
            'The tokenizer has `padding_side="left"`',
            "Padding in front of a record is routed before it and takes its expert capacity, so that its loss depends "
            "on the length of its neighbours",
            'Set `tokenizer.padding_side = "right"`',
        )


def check_batch(
    batch: Mapping[str, Any], records: int, label_names: Sequence[str], limits: Limits | None = None
) -> None:
    """Refuse a collated batch that does not keep one row a record, pads on the left, lacks labels, or holds what the
    model cannot take.

    Args:
        limits: of the model (see `limits_of`); None: values are not looked at.
    """
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != records:
            # how many records were drawn, and how long they are, is private
            made = "with another number of rows" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise PrivacyConfigError(
                f"The data collator made `{key}` {made} from some records",
                "Per-sample gradients need exactly one row a record: packing or dropping records would clip several "
                "people as one, or not at all",
                "Use a collator that pads and stacks, e.g. `DataCollatorWithPadding`",
            )
    if "input_ids" in batch:
        token_mask(batch)
    _refuse_packing(batch)
    missing = [name for name in label_names if name not in batch]
    if missing:
        raise PrivacyConfigError(
            f"The training batches have no `{missing[0]}`",
            "Without labels there is no loss to differentiate",
            f"Add a `{missing[0]}` column to `train_dataset`, or name the label columns in `label_names`",
        )
    if limits is not None:
        check_limits(batch, label_names, limits)


def check_evaluation(dataset: Any, records: Any, allowed: bool) -> None:
    """Refuse to evaluate on the training records: their exact loss is private.

    Args:
        dataset: evaluation records, or a dict of such. records: the training records.
        allowed: private diagnostics are on (the statement then says so).
    """
    if allowed or dataset is None or records is None or isinstance(dataset, str):
        return
    if isinstance(dataset, dict):
        for part in dataset.values():
            check_evaluation(part, records, allowed)
        return
    same = dataset is records
    if not same and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) and len(records):
        sample = [dataset[i] for i in range(min(_EVALUATION_SAMPLE, len(dataset)))]
        if all(isinstance(record, Mapping) for record in sample):
            same = all_among(sample, (records[i] for i in range(len(records))))
    if same:
        raise PrivacyConfigError(
            "Evaluation on the training records was asked for",
            "It would show their exact loss and metrics, without noise, and let the run choose by them",
            "Evaluate on other records; with `research_diagnostics=True` it is allowed, and the run is NOT PRIVATE",
        )


def _refuse_packing(batch: Mapping[str, Any]) -> None:
    """Refuse rows in which several records follow one another."""
    positions = batch.get("position_ids")
    restarts = False
    if positions is not None and positions.dim() == 2:
        mask = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(positions).bool()
        restarts = bool(((positions[:, 1:] <= positions[:, :-1]) & mask[:, 1:]).any())
    marks = [name for name in ("seq_idx", "seq_lengths", "cu_seq_lens_q") if name in batch]
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not mask.is_floating_point() and bool((mask > 1).any()):
        marks.append("attention_mask")
    if restarts or marks:
        raise PrivacyConfigError(
            f"The data collator made packed rows (`{'position_ids' if restarts else marks[0]}`)",
            "Several records in one row are clipped as one: none of them is bounded by the clipping norm",
            "Turn packing off, and give one record a row",
        )


def check_collator(collate: Callable[[list], Mapping[str, Any]], records: list, label_names: Sequence[str]) -> None:
    """Collate one record alone and two together, and check both batches."""
    for some in (records[:1], records[:2]):
        if some:
            check_batch(collate(some), len(some), label_names)
