"""A training method as data: which parameters are trained, and which mechanisms release their gradients.

The methods of mechanism section 6 run through one code path: the same sampling, clipping, noise and accounting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import one_of

__all__ = ["METHODS", "Method", "get_method"]

CLIPPING = ("per_stream", "global")


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: as in `RaptorConfig.method`. description: one line for statements and cards.
        mechanisms: what releases gradients in a cycle, in order, each from a Poisson draw of its own. `"shared"` and
            `"expert"` are RAPTOR's streams; `"joint"` is one block of all trainables: one clipping norm, one noise.
        trains: the roles that are trained. `"shared"` includes the head.
        expert_layers: whose routed experts carry adapters, `"protected"` (one layer) or `"all"` sparse layers.
        weights: `"adapters"` (LoRA and head), or base weights: `"ffn"` (all feed-forward layers, dense and routed, and
            the head), `"full"` (every parameter, routers too).
        private: whether gradients are clipped and noisy.
        owners: whether routed experts are trained by their owners' records alone (Eq. 8).
        alternating: whether the second mechanism sees the parameters that the first one has updated.
    """

    name: str
    description: str
    mechanisms: tuple[str, ...]
    trains: tuple[str, ...] = ("shared", "expert")
    expert_layers: str = "protected"
    weights: str = "adapters"
    private: bool = True
    owners: bool = False
    alternating: bool = True

    @property
    def counters(self) -> tuple[str, ...]:
        """The ledger's counter of each mechanism; a joint block is counted, and stated, as `"shared"`."""
        return tuple("expert" if name == "expert" else "shared" for name in self.mechanisms)

    @property
    def label(self) -> str:
        """The name with what an ablation changes, for statements."""
        changed = []
        if self.name == "raptor" and self.mechanisms == ("joint",):
            changed.append("clipping=global")
        if not self.alternating:
            changed.append("alternating=False")
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    @property
    def budget_split(self) -> float | None:
        """The shared counter's share of epsilon where the method fixes it; None where `budget_split` decides."""
        if len(self.counters) > 1:
            return None
        return 1.0 if self.counters == ("shared",) else 0.0


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "raptor",
            "Two alternating streams: the shared parameters, then the routed experts of one layer by owner (Alg. 1).",
            ("shared", "expert"),
            owners=True,
        ),
        Method(
            "matched_global",
            "RAPTOR's parameters as one block: one step, one clipping norm, one noise, denominator B, no owners.",
            ("joint",),
        ),
        Method("shared_only", "The shared stream alone, with the whole budget.", ("shared",), trains=("shared",)),
        Method(
            "expert_only",
            "The expert stream alone, with the whole budget; attention and head stay as they are.",
            ("expert",),
            trains=("expert",),
            owners=True,
        ),
        Method(
            "monolithic_lora",
            "DP-Adam on LoRA of the attention and of all experts of all sparse layers, as one block.",
            ("joint",),
            expert_layers="all",
        ),
        Method("monolithic_full", "DP-Adam on all parameters, as one block.", ("joint",), weights="full"),
        Method(
            "nonprivate_lora",
            "RAPTOR's parameters by ordinary fine-tuning: no clipping, no noise, no privacy.",
            ("joint",),
            private=False,
        ),
        Method(
            "nonprivate_ffn",
            "All feed-forward layers and the head by ordinary fine-tuning: no clipping, no noise, no privacy.",
            ("joint",),
            weights="ffn",
            private=False,
        ),
    )
}


def get_method(name: str, *, clipping: str = "per_stream", alternating: bool = True) -> Method:
    """The method called `name`, with the ablations of RAPTOR that change its mechanisms.

    Args:
        clipping: `"global"` clips a record's gradients of both streams by one norm, which takes one joint step: one
            draw and one mechanism, whose noise multiplier is the shared one.
        alternating: False updates both streams at once, from gradients at the same parameters. Two draws and two
            mechanisms as before, so the accounting is the same.

    Raises:
        PrivacyConfigError: an unknown name, or an ablation of another method than `raptor`.
    """
    method = METHODS[one_of("method", name, tuple(METHODS))]
    one_of("clipping", clipping, CLIPPING)
    if not isinstance(alternating, bool):
        raise PrivacyConfigError(f"`alternating={alternating!r}` was given", "It is a switch", "Use True or False")
    if name != "raptor" and (clipping != "per_stream" or not alternating):
        changed = "clipping='global'" if clipping != "per_stream" else "alternating=False"
        raise PrivacyConfigError(
            f"`{changed}` was set with `method={name!r}`",
            "It is an ablation of `raptor`, the one method with two streams to clip together or to update at once",
            'Leave it at its default, or use `method="raptor"`',
        )
    if clipping == "global":
        return replace(method, mechanisms=("joint",))
    return replace(method, alternating=alternating)
