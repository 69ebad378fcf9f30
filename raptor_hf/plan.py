"""The public plan of a run: noise, streams and the statement that describes them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn

from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.methods import Method, get_method
from raptor_hf.moe.lora import adapter_plan, attach_adapters, stream_parameters
from raptor_hf.moe.weights import train_weights
from raptor_hf.privacy import PrivacyStatement, StreamStatement, calibrate_noise_multipliers, default_delta
from raptor_hf.privacy.statement import NOT_COVERED
from raptor_hf.state import STATE_FILE, PrivacyLedger, PrivacyPlan, adapter_digest, read_json
from raptor_hf.streams import Stream

__all__ = [
    "check_untrained", "dataset_name", "make_plan", "make_statement", "make_streams", "method_of", "prepare_model",
    "stage_of", "stages",
]  # fmt: skip


def method_of(args: RaptorConfig) -> Method:
    """The method that the arguments name, with the ablations that change its mechanisms."""
    return get_method(args.method, clipping=args.clipping, alternating=args.alternating)


def prepare_model(model: nn.Module, config: Any, method: Method, layer: int | str) -> nn.Module:
    """Make exactly what `method` trains trainable: adapters by `config` (see `attach_adapters`), or base weights."""
    if method.weights == "adapters":
        return attach_adapters(model, config, layer, trains=method.trains, all_layers=method.expert_layers == "all")
    return train_weights(model, method.weights, layer)


def check_prepared(model: nn.Module, method: Method) -> None:
    """Refuse a model that was prepared for another method."""
    plan = adapter_plan(model)
    wanted = (method.weights, set(method.trains), method.expert_layers == "all")
    if (plan.weights, set(plan.trains), plan.all_layers) != wanted:
        raise PrivacyConfigError(
            f"`method={method.name!r}` was set, and the model given trains something else",
            "What is clipped and noised would not be what the method's statement describes",
            "Pass the base model: the trainer prepares it for the method",
        )


def make_plan(args: RaptorConfig, model: nn.Module, dataset_size: int, cycles: int) -> PrivacyPlan:
    """Noise multipliers, sampling rate and delta of a run of `cycles` cycles over `dataset_size` records."""
    assert args.expected_batch_size is not None  # set by the config
    delta = args.target_delta if args.target_delta is not None else default_delta(dataset_size)
    rate = args.expected_batch_size / dataset_size
    shared, expert = args.shared_noise_multiplier, args.expert_noise_multiplier
    method = method_of(args)
    if args.target_epsilon is not None:
        found = calibrate_noise_multipliers(
            args.target_epsilon,
            delta,
            rate,
            cycles,
            budget_split=float(args.budget_split) if method.budget_split is None else method.budget_split,
            rule=args.budget_rule,
            accountant=args.accountant,
        )
        shared, expert = found.shared, found.expert
    return PrivacyPlan(
        shared_noise_multiplier=None if shared is None else float(shared),
        expert_noise_multiplier=None if expert is None else float(expert),
        sample_rate=rate,
        cycles=cycles,
        delta=delta,
        target_epsilon=args.target_epsilon,
        accountant=args.accountant,
        dataset_size=dataset_size,
        expected_batch_size=args.expected_batch_size,
        protected_layer=adapter_plan(model).layers,
        insecure_noise=args.insecure_noise_seed is not None,
        research_diagnostics=args.research_diagnostics,
    )


def check_untrained(model: nn.Module, ledger: PrivacyLedger) -> None:
    """Bind `ledger` to the model; refuse a model that holds training which it does not count."""
    other, loaded = getattr(model, "raptor_ledger", None), getattr(model, "raptor_loaded", None)
    given = None
    if other is not None and other is not ledger and (other.shared_steps or other.expert_steps):
        given = "A model that another trainer has trained was given"
    elif loaded is not None and not _counted(loaded, ledger):
        given = f"A model with the adapter of `{os.path.basename(os.path.normpath(loaded))}` was given"
    elif (other is not ledger or not (ledger.shared_steps or ledger.expert_steps)) and holds_training(model):
        given = "A model was given whose adapters are not at their start: `lora_B` is not zero"
    elif (folder := _trained_base(model)) is not None and not _counted(folder, ledger):
        given = f"The base model `{os.path.basename(os.path.normpath(folder))}` was given, which a run has trained"
    if other is not None and other.plan.research_diagnostics and not ledger.plan.research_diagnostics:
        raise PrivacyConfigError(
            "A model of a run with `research_diagnostics` was given to a run without it",
            "Its private records may have been measured there, and what was seen would be missing from the statement",
            "Load the base model again",
        )
    if given is not None:
        raise PrivacyConfigError(
            given,
            "What that training spent would be missing from this trainer's budget and statement",
            "Go on with the trainer that made it, resume from a checkpoint of it, or load the base model again; to "
            "publish it, export the folder that its own trainer saved",
        )
    model.raptor_ledger = ledger


def _counted(directory: str, ledger: PrivacyLedger) -> bool:
    """Whether the adapter in `directory` is an earlier one of the ledger's own run."""
    state = read_json(Path(directory) / STATE_FILE)
    return (
        state is not None
        and state.get("run") == ledger.run
        and state.get("adapter_sha256") == adapter_digest(directory)
        and state["shared_steps"] <= ledger.shared_steps
        and state["expert_steps"] <= ledger.expert_steps
    )


def _trained_base(model: nn.Module) -> str | None:
    """The folder from which the base model was loaded, if a method that trains base weights saved it there."""
    name = getattr(model, "name_or_path", None)
    if not name or not (Path(name) / STATE_FILE).exists():
        return None
    # beside an adapter the state is the adapter's, and a base model in the same folder is untouched
    return None if (Path(name) / "adapter_model.safetensors").exists() else str(name)


def holds_training(model: nn.Module) -> bool:
    """Whether an adapter has moved: LoRA's B is zero at the start of every run."""
    return any(
        bool(parameter.detach().any())
        for parameters in stream_parameters(model).values()
        for name, parameter in parameters.items()
        if name.endswith("lora_B")
    )


def stages(method: Method, model: nn.Module) -> tuple[int, ...]:
    """The protected layers, in the order in which their experts are trained; one, but for several stages."""
    plan = adapter_plan(model)
    return plan.expert_layers if method.owners else (plan.layer,)


def stage_of(cycle: int, cycles: int, count: int) -> int:
    """The stage of a cycle: `count` stages of (nearly) equal length. A function of public numbers."""
    return min(count - 1, cycle * count // max(1, cycles))


def make_streams(args: RaptorConfig, model: nn.Module, plan: PrivacyPlan, stage: int = 0) -> dict[str, Stream]:
    """The method's mechanisms in the order of their updates: parameters, norms, noise and public denominators.

    By the name of their counter in the ledger. `stage`: which of several protected layers is trained.
    """
    method, parameters = method_of(args), stream_parameters(model)
    if method.owners:
        own = adapter_plan(model).layout.layer(stages(method, model)[stage]).name + "."
        parameters["expert"] = {name: p for name, p in parameters["expert"].items() if name.startswith(own)}
    experts = adapter_plan(model).protected.num_experts
    batch = plan.expected_batch_size
    per_owner = batch / experts if args.expert_denominator == "owners" else batch
    owned = frozenset(parameters["expert"]) if method.owners else frozenset()
    streams = {}
    for mechanism, counter in zip(method.mechanisms, method.counters, strict=True):
        sigma = plan.expert_noise_multiplier if counter == "expert" else plan.shared_noise_multiplier
        if method.private and sigma is None:
            raise PrivacyConfigError(
                f"`method={method.name!r}` releases a stream for which the plan has no noise ({counter})",
                "It would be released without noise",
                "Start a new run of this method from the base model",
            )
        if mechanism == "expert":
            streams[counter] = Stream(
                counter, parameters["expert"], args.expert_max_grad_norm, sigma or 0.0, per_owner, experts, owned
            )
            continue
        norm = args.shared_max_grad_norm if method.private else None
        if mechanism == "shared":
            streams[counter] = Stream(counter, parameters["shared"], norm, sigma or 0.0, batch)
        else:
            everything = {**parameters["shared"], **parameters["expert"]}
            streams[counter] = Stream(
                counter, everything, norm, sigma or 0.0, batch, experts if owned else None, owned, per_owner
            )
    return streams


def make_statement(
    args: RaptorConfig,
    model: nn.Module,
    ledger: PrivacyLedger,
    *,
    secure: bool,
    public_corpus: str | None,
    disjointness: str | None,
) -> PrivacyStatement:
    """The privacy statement of what is planned and spent; its numbers are those that training used."""
    plan, adapters = ledger.plan, adapter_plan(model)
    args = _as_trained(args, ledger)
    method = method_of(args)
    # one layer's experts are trained, so they can be named; by owners, or not
    one_layer = "expert" in method.trains and method.expert_layers == "protected" and method.weights == "adapters"
    spent = {"shared": ledger.shared_steps, "expert": ledger.expert_steps}
    described = {
        name: StreamStatement(
            noise_multiplier=stream.noise_multiplier or None,  # None: no noise, and the statement says so
            sample_rate=plan.sample_rate,
            max_grad_norm=stream.max_norm,
            denominator=stream.denominator,
            steps_planned=max(plan.cycles, spent[name]),  # more after a second call of `train`
            steps_taken=spent[name],
        )
        for name, stream in make_streams(args, model, plan).items()
    }
    return PrivacyStatement.build(
        method=method.label,
        shared=described.get("shared"),
        expert=described.get("expert"),
        delta=plan.delta,
        dataset_size=plan.dataset_size,
        expected_batch_size=plan.expected_batch_size,
        target_epsilon=plan.target_epsilon,
        num_experts=adapters.protected.num_experts if one_layer else None,
        protected_layer=adapters.layers if one_layer else None,
        ownership=args.ownership if method.owners else None,
        accountant=plan.accountant,
        noise_source="os_entropy" if secure and not plan.insecure_noise else "insecure_seed",
        research_diagnostics=plan.research_diagnostics or args.research_diagnostics,
        base_model=_public_name(model),
        public_corpus=public_corpus,
        disjointness=disjointness,
        not_covered=(*NOT_COVERED, *_chosen_by(args)),
    )


_STATED = (
    "method", "clipping", "alternating", "ownership", "shared_max_grad_norm", "expert_max_grad_norm",
    "expert_denominator",
)  # fmt: skip


def _as_trained(args: RaptorConfig, ledger: PrivacyLedger) -> RaptorConfig:
    """The arguments with the values of the training so far, whatever was assigned to them since."""
    found = copy.copy(args)
    for name in _STATED:
        setattr(found, name, ledger.arguments.get(name, getattr(args, name)))
    return found


def _chosen_by(args: RaptorConfig) -> tuple[str, ...]:
    """What the run chose by its evaluation split."""
    used = [name for name in ("load_best_model_at_end", "metric_for_best_model") if getattr(args, name)]
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        used.append("lr_scheduler_type")
    if not used:
        return ()
    names = " and ".join(f"`{name}`" for name in used)
    return (f"the records of the evaluation split: {names} let the run choose by them, and the choice is not private",)


def _public_name(model: nn.Module) -> str | None:
    """The model's id, or the last part of a local path: a path can name a person or a machine."""
    name = getattr(model, "name_or_path", None)
    return os.path.basename(os.path.normpath(name)) if name and os.path.exists(name) else (name or None)


def dataset_name(dataset: Any) -> str:
    """A public dataset's name, as far as it has one, and its size."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return f"{name or 'public corpus'} ({len(dataset)} records)"
