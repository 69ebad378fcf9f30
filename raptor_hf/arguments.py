"""What every argument of `TrainingArguments` and `Trainer` does here: works, is refused, or has no effect; and why.

One table. The config refuses by it, `docs/arguments.md` is made from it, and a test fails when a new release of
`transformers` has an argument that is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "CHECKPOINTING",
    "NO_EFFECT",
    "REFUSED_ARGUMENTS",
    "TRAINER_ARGUMENTS",
    "WORKS",
    "argument_rows",
    "arguments_page",
]


def _off(value: Any) -> bool:
    return value is None or value is False or value == 0 or value in ("", "no", "none") or value == []


# Refused only with the "functorch" engine, or when reentrant.
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")

# Inherited arguments that cannot work: name -> (accepted values, why, what to do instead).
REFUSED_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "max_grad_norm": (
        _off,
        "It would clip the noisy mean gradient a second time, after the noise, and bound nothing about a record",
        "Set the per-sample norms `shared_max_grad_norm` and `expert_max_grad_norm`",
    ),
    "label_smoothing_factor": (
        _off,
        "The residual weight is one minus the probability of a record's label, which a smoothed loss does not give",
        "Leave it at 0",
    ),
    "fp16": (
        _off,
        "Loss scaling changes with overflows in the private gradients, and half-precision gradients overflow before "
        "they are clipped",
        "Use float32 or `bf16=True`",
    ),
    "fp16_full_eval": (
        _off,
        "It casts the trained adapters themselves, in place: what is saved and trained after an evaluation would be "
        "rounded to half precision",
        "Use float32, or `bf16=True` for evaluation under autocast",
    ),
    "bf16_full_eval": (
        _off,
        "It casts the trained adapters themselves, in place: what is saved and trained after an evaluation would be "
        "rounded to eight bits",
        "Load the frozen base model in bfloat16, or use `bf16=True`; adapters stay float32",
    ),
    "torch_compile": (_off, "Compiled modules do not go through `torch.func`", "Leave it off"),
    "use_liger_kernel": (_off, "Its fused kernels have no per-sample gradient", "Leave it off"),
    "neftune_noise_alpha": (
        _off,
        "Its hook scales noise by the padded length, which depends on the other records of a micro-batch",
        "Leave it unset",
    ),
    "auto_find_batch_size": (
        _off,
        "It restarts training from scratch after an out-of-memory error, and every restart spends the budget again",
        "Set `expected_batch_size` and lower `per_device_train_batch_size`, which then changes memory only",
    ),
    "dataloader_drop_last": (
        _off,
        "A Poisson draw has no incomplete last batch; dropping records from it voids the accounting",
        "Leave it off",
    ),
    "train_sampling_strategy": (
        lambda value: value == "random",
        "The accounting is that of Poisson sampling: every record enters a draw by a coin of its own",
        'Leave it at "random"; micro-batches are sorted by length already',
    ),
    "activation_checkpointing": (
        _off,
        'torch.func does not support saved-tensor hooks, so the "functorch" engine cannot recompute activations',
        'Set `grad_sample_mode="hooks"`, or lower `per_device_train_batch_size` beside a set `expected_batch_size`',
    ),
    "gradient_checkpointing": (
        _off,
        'torch.func does not support saved-tensor hooks, so the "functorch" engine cannot recompute activations',
        'Set `grad_sample_mode="hooks"`, or lower `per_device_train_batch_size` beside a set `expected_batch_size`',
    ),
    "include_num_input_tokens_seen": (
        _off,
        "The number of tokens of the records drawn depends on private data and would be logged",
        'Leave it at "no"',
    ),
    "skip_memory_metrics": (
        lambda value: value is True,
        "Peak memory follows the realised batch sizes, which are private",
        "Leave it at True",
    ),
    "enable_jit_checkpoint": (
        _off,
        "It saves between a release and the step that applies it: the checkpoint would count a release that its "
        "adapters do not have, and lose its noisy gradient",
        "Use `save_steps`: a checkpoint between two cycles is exact",
    ),
    "deepspeed": (_off, "Sharded gradients have no per-sample clipping here", "Use one process or plain DDP"),
    "fsdp": (_off, "Sharded parameters have no per-sample clipping here", "Use one process or plain DDP"),
    "parallelism_config": (
        lambda value: value is None,
        "A model split over devices (tensor, context or sequence parallel) has no per-sample clipping here",
        "Use one process or plain DDP",
    ),
    "debug": (_off, "It prints activations of private records", "Debug on public data with the plain Trainer"),
}

_LATER = "Read only together with `{}`, which is refused"
_MULTI = "Gradients do not go through the wrapper of `DistributedDataParallel`: clipped sums are added up explicitly"
_SINGLE = "Training batches are drawn and collated in the main process; it acts in evaluation and prediction"

# Inherited arguments that change nothing in training. Setting one gives a warning when it would be expected to act.
NO_EFFECT: dict[str, str] = {
    "gradient_accumulation_steps": "It only multiplies the default of `expected_batch_size`: a logical batch is always "
    "cut into micro-batches and makes one update",
    "average_tokens_across_devices": "A record's loss is never divided by a count of other records' tokens",
    "optim_target_modules": "Only optimizers that are refused (GaLore, APOLLO) read it",
    "torch_compile_backend": "Setting it turns `torch_compile` on, which is refused",
    "torch_compile_mode": "Setting it turns `torch_compile` on, which is refused",
    "liger_kernel_config": _LATER.format("use_liger_kernel"),
    "torch_empty_cache_steps": "It belongs to the training step that is replaced here; no activations outlive a "
    "micro-batch",
    "logging_nan_inf_filter": "The training loss is private and not logged",
    "ignore_data_skip": "Always on: after a resume the coins are fresh, never those that were used before",
    "data_seed": "Poisson sampling draws its coins from the operating system's entropy",
    "length_column_name": "Read only by sampling by length, which is refused; micro-batches are sorted anyway",
    "ddp_find_unused_parameters": _MULTI,
    "ddp_bucket_cap_mb": _MULTI,
    "ddp_static_graph": _MULTI,
    "ddp_broadcast_buffers": "Nothing changes a buffer: a model that does is refused",
    "fsdp_config": _LATER.format("fsdp"),
    "hub_always_push": "A push is one commit, and is waited for",
    "local_rank": "Set by the launcher",
}

_LOGS = "Only public quantities are logged: epsilon, learning rates, the noisy gradient's norm"
_CHOICE = "The evaluation split is not protected, and the privacy statement says that the run chose by it"
_DDP = "As in `Trainer`"

# Inherited arguments that work; a remark where the meaning needs one.
WORKS: dict[str, str] = {
    "output_dir": "",
    "per_device_train_batch_size": "The micro-batch: memory only, once `expected_batch_size` is set. Without that it "
    "also sets B (x accumulation steps x processes), and with B the noise",
    "num_train_epochs": "An epoch is n / B cycles",
    "max_steps": "Cycles: an update of each stream",
    "learning_rate": "Of both streams, unless `expert_learning_rate` is set",
    "lr_scheduler_type": 'All of them. "reduce_lr_on_plateau" and "greedy" follow the evaluation split. ' + _CHOICE,
    "lr_scheduler_kwargs": "",
    "warmup_steps": "",
    "optim": "Every ordinary `torch.optim.Optimizer`; those that take gradients apart by layer or project them (LOMO, "
    "GaLore, APOLLO) are refused when training starts",
    "optim_args": "",
    "weight_decay": "Acts on released values only",
    "adam_beta1": "",
    "adam_beta2": "",
    "adam_epsilon": "",
    "bf16": "Forward and backward passes under autocast; adapters, clipping, sums and noise stay float32",
    "tf32": "Forward and backward passes; norms and clipped sums are taken in full precision",
    "activation_checkpointing_kwargs": "`use_reentrant=True` is refused",
    "gradient_checkpointing_kwargs": "`use_reentrant=True` is refused",
    "use_cache": "",
    "logging_strategy": _LOGS,
    "logging_steps": _LOGS,
    "logging_first_step": _LOGS,
    "log_on_each_node": "",
    "log_level": "",
    "log_level_replica": "",
    "disable_tqdm": "",
    "report_to": _LOGS + ". `WANDB_WATCH` must be unset: it would upload raw gradients",
    "run_name": "",
    "project": "",
    "trackio_space_id": "",
    "trackio_bucket_id": "",
    "trackio_static_space_id": "",
    "eval_strategy": "",
    "eval_steps": "",
    "eval_delay": "",
    "per_device_eval_batch_size": "Also of the pass that finds the owners; it does not change them",
    "prediction_loss_only": "",
    "eval_on_start": "",
    "eval_do_concat_batches": "",
    "eval_use_gather_object": "",
    "eval_accumulation_steps": "",
    "include_for_metrics": "",
    "batch_eval_metrics": "",
    "save_only_model": "The state of the budget is saved all the same",
    "save_strategy": "",
    "save_steps": "",
    "save_on_each_node": "",
    "save_total_limit": "",
    "push_to_hub": "Pushes releases (adapter, tokenizer, statement, card), never the output folder",
    "hub_strategy": '"end" or "every_save"; those that upload training state are refused',
    "hub_token": "",
    "hub_private_repo": "",
    "hub_model_id": "",
    "hub_revision": "",
    "load_best_model_at_end": _CHOICE,
    "metric_for_best_model": _CHOICE,
    "greater_is_better": "",
    "restore_callback_states_from_checkpoint": "The budget does not live in a callback and is always restored",
    "full_determinism": "Of everything but the noise, the sampling and dropout, which stay secret",
    "seed": "Of the adapters' initial values; the noise, the sampling and dropout never come from it",
    "use_cpu": "",
    "accelerator_config": _SINGLE,
    "dataloader_num_workers": _SINGLE,
    "dataloader_pin_memory": _SINGLE,
    "dataloader_persistent_workers": _SINGLE,
    "dataloader_prefetch_factor": _SINGLE,
    "dataloader_multiprocessing_context": _SINGLE,
    "dataloader_in_order": _SINGLE,
    "remove_unused_columns": "",
    "label_names": "",
    "ddp_backend": _DDP,
    "ddp_timeout": _DDP,
    "do_train": "For scripts, as in `Trainer`",
    "do_eval": "For scripts, as in `Trainer`",
    "do_predict": "For scripts, as in `Trainer`",
    "resume_from_checkpoint": "For scripts, as in `Trainer`",
}

# Arguments of `Trainer.__init__`: name -> (status, remark).
TRAINER_ARGUMENTS: dict[str, tuple[str, str]] = {
    "model": ("works", "A sparse model of a registered family; adapters are attached to it in place"),
    "args": ("works", "A `RaptorConfig`"),
    "data_collator": ("works", "One that pads and stacks; mixing, packing, dropping or left padding is refused"),
    "train_dataset": ("works", "Map-style; an iterable dataset has no Poisson sampling and is refused"),
    "eval_dataset": ("works", "Not protected"),
    "processing_class": ("works", "A tokenizer that pads on the left is refused"),
    "model_init": ("refused", "It serves a search, in which every trial spends privacy. Pass `model`"),
    "compute_loss_func": (
        "refused",
        "It sees a whole batch, and nothing shows that it keeps the records apart. Let the model compute the loss",
    ),
    "compute_metrics": ("works", "Of the evaluation split, which is not protected"),
    "callbacks": ("works", "They see noisy gradients only; what one does with the records is not covered"),
    "optimizers": ("works", "Built on `stream_parameters(model)` after `attach_adapters`; any other is refused"),
    "optimizer_cls_and_kwargs": ("works", "As for `optim`"),
    "preprocess_logits_for_metrics": ("works", ""),
}


def argument_rows() -> Iterator[tuple[str, str, str]]:
    """(name, "works" | "refused" | "no effect" | "depends", why) of every inherited argument."""
    for name, (_, why, instead) in REFUSED_ARGUMENTS.items():
        if name in CHECKPOINTING:
            yield (
                name,
                "depends",
                'Works with `grad_sample_mode="hooks"` and `"reference"`, not reentrant. Otherwise refused: '
                f"{why}. {instead}",
            )
        else:
            yield name, "refused", f"{why}. {instead}"
    yield from ((name, "no effect", why) for name, why in NO_EFFECT.items())
    yield from ((name, "works", why) for name, why in WORKS.items())


_HEAD = """# Arguments of `Trainer`: works, refused, no effect

<!-- Made from raptor_hf/arguments.py by `python -m raptor_hf.arguments`; a test compares. -->

`RaptorConfig` takes every argument of `TrainingArguments`. One that would break the guarantee is refused with an error
that says what to do instead; one that changes nothing gives a warning when it is set.
"""


def arguments_page() -> str:
    """The text of docs/arguments.md."""
    parts = [_HEAD]
    titles = {"refused": "Refused", "depends": "Depends on the engine", "no effect": "No effect", "works": "Works"}
    rows = list(argument_rows())
    for status, title in titles.items():
        parts.append(f"## {title}\n\n| argument | why |\n|---|---|")
        parts.extend(_row(name, why) for name, found, why in rows if found == status)
        parts.append("")
    parts.append("## Arguments of `Trainer(...)`\n\n| argument | | remark |\n|---|---|---|")
    parts.extend(f"| `{name}` | {status} | {_end(why)} |" for name, (status, why) in TRAINER_ARGUMENTS.items())
    return "\n".join(parts) + "\n"


def _row(name: str, why: str) -> str:
    return f"| `{name}` | {_end(why)} |"


def _end(text: str) -> str:
    return text.rstrip(".") + "." if text else ""


if __name__ == "__main__":
    print(arguments_page(), end="")
