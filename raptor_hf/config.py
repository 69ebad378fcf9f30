"""`RaptorConfig`: `TrainingArguments` plus what the private training of a sparse model needs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from dataclasses import dataclass, field

from transformers import TrainingArguments

from raptor_hf.arguments import CHECKPOINTING, NO_EFFECT, REFUSED_ARGUMENTS
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.methods import METHODS, Method, get_method
from raptor_hf.validate import integer, one_of, positive, probability

__all__ = ["REFUSED_ARGUMENTS", "RaptorConfig", "configuration_page"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


# `gradient_accumulation_steps` has a warning of its own; the others are set by launchers and by this class.
_WARNED = set(NO_EFFECT) - {"gradient_accumulation_steps", "local_rank", "ignore_data_skip"}


_METHOD_HELP = "Training method. " + " ".join(f"'{m.name}': {m.description}" for m in METHODS.values())


@dataclass
class RaptorConfig(TrainingArguments):
    """`TrainingArguments` for `RaptorTrainer`. Every inherited argument works as usual or is refused with a reason.

    One optimizer step is one cycle: an update of the shared stream, then one of the expert stream.
    `per_device_train_batch_size` is the micro-batch: memory only, once `expected_batch_size` is set. Without that, it
    also sets B, and with B the noise.

    Raises:
        PrivacyConfigError: a value that would break, weaken or misstate the guarantee.
    """

    method: str = field(default="raptor", metadata=_help(_METHOD_HELP))
    target_epsilon: float | None = field(
        default=None,
        metadata=_help(
            "Privacy budget epsilon of the whole run. Give it, or the noise multipliers of the method's streams."
        ),
    )
    target_delta: float | None = field(
        default=None,
        metadata=_help("delta; default n^-1.1 for n records, which is large for few: a warning above 1e-3."),
    )
    shared_noise_multiplier: float | None = field(
        default=None, metadata=_help("sigma_s: noise of the shared stream in units of its clipping norm.")
    )
    expert_noise_multiplier: float | None = field(
        default=None, metadata=_help("sigma_e: noise of the expert stream in units of its clipping norm.")
    )
    shared_max_grad_norm: float = field(default=1.0, metadata=_help("C_s: per-sample L2 norm in the shared stream."))
    expert_max_grad_norm: float = field(default=1.0, metadata=_help("C_e: per-sample L2 norm in the expert stream."))
    # not 1.0 as inherited: that would clip the noisy mean; a value that is set is refused below
    max_grad_norm: float = field(default=0.0, metadata=_help("Must stay 0: clipping is per sample here."))
    # a number, typed as text so that the command line takes "auto" too
    budget_split: str = field(
        default=0.9,  # type: ignore[assignment]
        metadata=_help(
            "rho: share of epsilon for the shared stream; 'auto': where the noise costs least, by the sensitivities "
            "(Eq. 40) of labelled records of public_dataset."
        ),
    )
    clipping_quantile: float | None = field(
        default=None,
        metadata=_help(
            "Set both clipping norms to this quantile of the gradient norms of labelled records of public_dataset."
        ),
    )
    budget_rule: str = field(
        default="joint",
        metadata=_help("'joint' calibrates both streams' composition to the target; 'basic' adds their budgets."),
    )
    accountant: str = field(default="prv", metadata=_help("'prv', or 'pld' as the cross-check."))
    expected_batch_size: int | None = field(
        default=None,
        metadata=_help(
            "B: expected number of records a stream draws in a cycle, and the public denominator. Default: "
            "per_device_train_batch_size x gradient_accumulation_steps x processes; once it is set, the per-device "
            "size is memory only."
        ),
    )
    dataset_size: int | None = field(
        default=None, metadata=_help("The public n; default len(train_dataset). The privacy statement states it.")
    )
    protected_layer: str = field(
        default="auto",
        metadata=_help(
            "Block whose routed experts are trained: an index, 'first', 'last', or 'auto' (largest owner entropy on "
            "public_dataset, the last sparse block without one). Several, as '1,3', are trained one after another, in "
            "stages of equal length."
        ),
    )
    ownership: str = field(default="gate", metadata=_help("Owner of a record by 'gate' weights (Eq. 5) or 'vote'."))
    expert_denominator: str = field(
        default="owners", metadata=_help("'owners': D_e = B/E (Eq. 9); 'batch': D_e = B (ablation).")
    )
    clipping: str = field(
        default="per_stream",
        metadata=_help(
            "'per_stream': one norm a stream; 'global' (ablation): one norm, one draw and one noise for both, in one "
            "joint step, of shared_max_grad_norm and the shared noise multiplier."
        ),
    )
    alternating: bool = field(
        default=True,
        metadata=_help(
            "Update the experts on the updated shared parameters, as in Algorithm 1; False (ablation): both at once."
        ),
    )
    residual_weighting: bool = field(
        default=True, metadata=_help("Weight a record's expert loss by 1 - p(label) (Eq. 22).")
    )
    residual_gamma: float = field(default=1.0, metadata=_help("Exponent of the residual weight."))
    grad_sample_mode: str = field(
        default="functorch",
        metadata=_help("Per-sample gradient engine: 'functorch', 'hooks' (checkpointing too) or 'reference' (slow)."),
    )
    lora_rank: int = field(default=16, metadata=_help("LoRA rank r of both streams."))
    lora_alpha: float = field(default=16.0, metadata=_help("LoRA alpha; the update is scaled by alpha / r."))
    shared_target_modules: list[str] | None = field(
        default=None,
        metadata=_help("Linear layers with LoRA in the shared stream; default: the attention projections."),
    )
    expert_learning_rate: float | None = field(
        default=None, metadata=_help("eta_e: learning rate of the expert stream; default: learning_rate.")
    )
    secure_mode: bool = field(
        default=False, metadata=_help("Add four Gaussians a draw, against attacks on floating-point noise.")
    )
    insecure_noise_seed: int | None = field(
        default=None,
        metadata=_help("Reproducible noise and sampling, for debugging only: the run is then NOT private."),
    )
    research_diagnostics: bool = field(
        default=False,
        metadata=_help("Compute and log private diagnostics such as the training loss: the run is then NOT private."),
    )

    # From which arguments B was computed, when `expected_batch_size` was not given.
    batch_from = ""

    def __post_init__(self) -> None:
        accumulation: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        super().__post_init__()
        self._refuse_inherited()
        self.max_grad_norm = 0.0  # not None, which the training loop would compare with a number
        self._check_privacy()
        # one process drives one device: DataParallel would scatter a micro-batch behind the engines' back
        self._n_gpu = min(1, self.n_gpu)
        if self.expected_batch_size is None:
            processes = max(1, self.world_size)
            self.expected_batch_size = self.per_device_train_batch_size * accumulation * processes
            self.batch_from = (
                f"`per_device_train_batch_size={self.per_device_train_batch_size}` x {accumulation} accumulation steps "
                f"x {processes} processes, as `expected_batch_size` was not set"
            )
        elif accumulation > 1:
            warnings.warn(
                f"`gradient_accumulation_steps={accumulation}` has no effect beside `expected_batch_size="
                f"{self.expected_batch_size}`: a logical batch is always cut into micro-batches.",
                stacklevel=3,
            )
        integer("expected_batch_size", self.expected_batch_size, minimum=1)
        # one step of the training loop is one cycle; the micro-batches are cut inside it
        self.gradient_accumulation_steps = 1
        # fresh coins after a resume, never the ones already used
        self.ignore_data_skip = True

    def _refuse_inherited(self) -> None:
        for name, (accepts, why, instead) in REFUSED_ARGUMENTS.items():
            value = getattr(self, name, None)
            if not accepts(value) and not (name in CHECKPOINTING and self.grad_sample_mode != "functorch"):
                raise PrivacyConfigError(f"`{name}={value!r}` was set", why, instead)
        for name in CHECKPOINTING:
            options = getattr(self, f"{name}_kwargs", None)
            if isinstance(options, dict) and options.get("use_reentrant"):
                raise PrivacyConfigError(
                    f"`{name}_kwargs={options!r}` was set",
                    "Reentrant checkpointing runs a backward pass of its own for each layer, which the per-sample "
                    "gradient engines do not see",
                    'Leave `"use_reentrant"` at False',
                )
            if getattr(self, name, None) and hasattr(self, f"{name}_kwargs"):
                setattr(self, f"{name}_kwargs", {**(options or {}), "use_reentrant": False})
        watch = os.environ.get("WANDB_WATCH", "false").lower()
        if "wandb" in (self.report_to or []) and watch not in ("", "false", "0"):
            raise PrivacyConfigError(
                f"The environment variable `WANDB_WATCH={watch}` is set",
                "Weights & Biases would record gradients as they are computed, before they are clipped and noisy",
                "Unset it",
            )
        for declared in dataclasses.fields(TrainingArguments):
            value = getattr(self, declared.name, None)
            if declared.name in _WARNED and value not in (declared.default, None):
                warnings.warn(f"`{declared.name}={value!r}` has no effect: {NO_EFFECT[declared.name]}.", stacklevel=4)

    def _check_privacy(self) -> None:
        method = get_method(self.method, clipping=self.clipping, alternating=self.alternating)
        one_of("budget_rule", self.budget_rule, ("joint", "basic"))
        one_of("accountant", self.accountant, ("prv", "pld"))
        one_of("ownership", self.ownership, ("gate", "vote"))
        one_of("expert_denominator", self.expert_denominator, ("owners", "batch"))
        one_of("grad_sample_mode", self.grad_sample_mode, ("functorch", "hooks", "reference"))
        if method.weights != "adapters" and self.grad_sample_mode == "hooks":
            raise PrivacyConfigError(
                f'`grad_sample_mode="hooks"` was set with `method={self.method!r}`',
                "It trains base weights, of which only one record at a time can be differentiated exactly",
                "Leave `grad_sample_mode` out",
            )
        self._check_budget(method)
        if self.target_epsilon is not None:
            positive("target_epsilon", self.target_epsilon)
        for name in ("shared_noise_multiplier", "expert_noise_multiplier"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise PrivacyConfigError(
                    f"`{name}={value!r}` was given", "It must be a number >= 0", f"Set `{name}` to one"
                )
        if self.target_delta is not None:
            probability("target_delta", self.target_delta, one=False)
        self._check_auto(method)
        for name in ("shared_max_grad_norm", "expert_max_grad_norm", "lora_alpha", "residual_gamma"):
            positive(name, getattr(self, name))
        integer("lora_rank", self.lora_rank, minimum=1)
        if self.expert_learning_rate is not None:
            positive("expert_learning_rate", self.expert_learning_rate)
        if self.insecure_noise_seed is not None:
            integer("insecure_noise_seed", self.insecure_noise_seed)
            warnings.warn("`insecure_noise_seed` is set: this run is NOT private.", stacklevel=4)
        self.protected_layer = str(self.protected_layer)

    def _check_auto(self, method: Method) -> None:
        """`budget_split` and `clipping_quantile`."""
        if isinstance(self.budget_split, str) and self.budget_split != "auto":
            with contextlib.suppress(ValueError):  # what is no number is refused below
                self.budget_split = float(self.budget_split)  # type: ignore[assignment]
        if self.budget_split != "auto":
            probability("budget_split", self.budget_split, one=False)  # type: ignore[arg-type]
        elif self.target_epsilon is None or method.budget_split is not None:
            raise PrivacyConfigError(
                f'`budget_split="auto"` was set with `method={self.method!r}`, `target_epsilon={self.target_epsilon}`',
                "There is no budget to divide between two streams",
                "Set `target_epsilon` with a method of two streams, or leave `budget_split` out",
            )
        if self.clipping_quantile is not None:
            probability("clipping_quantile", self.clipping_quantile)
            if not method.private or method.weights != "adapters" or set(method.trains) != {"shared", "expert"}:
                raise PrivacyConfigError(
                    f"`clipping_quantile={self.clipping_quantile}` was set with `method={self.method!r}`",
                    "It measures the gradients of the two streams' adapters, which are not what this method clips",
                    "Set `shared_max_grad_norm` and `expert_max_grad_norm`",
                )

    def _check_budget(self, method: Method) -> None:
        """The target, or the noise multipliers of exactly the method's streams."""
        names = [f"{counter}_noise_multiplier" for counter in method.counters]
        given = {
            name: getattr(self, name)
            for name in ("target_epsilon", "shared_noise_multiplier", "expert_noise_multiplier")
            if getattr(self, name) is not None
        }
        if not method.private:
            if given:
                raise PrivacyConfigError(
                    f"`method={self.method!r}` and {given} were set",
                    "The method has no privacy: nothing is clipped, and no noise would protect anybody",
                    "Leave them out, or choose a private method",
                )
            warnings.warn(f"`method={self.method!r}`: this run is NOT private.", stacklevel=5)
            return
        if set(given) in ({"target_epsilon"}, set(names)):
            return
        wanted = " and ".join(f"`{name}`" for name in names)
        raise PrivacyConfigError(
            f"`method={self.method!r}` was set with {given or 'neither a budget nor noise'}",
            "The budget decides the noise, or the noise decides the budget; with both they could contradict each "
            "other, with neither there is no noise",
            f"Set `target_epsilon`, or {wanted}" + " and no other" * (len(names) < 2),
        )


_HEAD = """# Fields of `RaptorConfig`

<!-- Made from the fields of raptor_hf/config.py by `python -m raptor_hf.config`; a test compares. -->

`RaptorConfig` is `TrainingArguments` with these fields of its own. Each is also a key of the YAML file of
`raptor-hf train` and a flag, `--field value`; `--field none` unsets a number that the file sets, where unset is the
default. The inherited ones are in [arguments.md](arguments.md).

| field | type | default | meaning |
|---|---|---|---|
"""


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    declared_by_name = {declared.name: declared for declared in dataclasses.fields(RaptorConfig)}
    own = [declared_by_name[name] for name in RaptorConfig.__annotations__]
    return _HEAD + "".join(
        f"| `{declared.name}` | {RaptorConfig.__annotations__[declared.name].removesuffix(' | None')} | "
        f"{'unset' if declared.default is None else f'`{declared.default!r}`'} | {declared.metadata['help']} |\n"
        for declared in own
    )


if __name__ == "__main__":
    print(configuration_page(), end="")
