"""Renders the example cards of this folder, each from the `privacy.json` beside it.

    python model_cards/render.py             # the cards
    python model_cards/render.py --plan      # the statements too (calibrates the noise again)

The cards show what `export_release` writes; no adapters were trained for them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from raptor_hf.hub.model_card import CardOptions, update_card
from raptor_hf.hub.weights import AdapterContents
from raptor_hf.privacy import PrivacyStatement, StreamStatement, calibrate_noise_multipliers, default_delta

ROOT = Path(__file__).parent
NOTE = "An example of a card: no adapter was trained for it."
HELD_OUT = "on public data of the same format, before the private records were touched"

EXAMPLES: dict[str, dict[str, Any]] = {
    "switch-base-8": dict(
        base="google/switch-base-8", n=67_349, batch=1_000, cycles=1_347, layer=11, experts=8, shared=48, head="score",
        task={"pipeline_tag": "text-classification", "head": "score", "labels": ["negative", "positive"]},
        card=dict(license="apache-2.0", language="en"), corpus="stanfordnlp/imdb (5000 records)",
    ),
    "olmoe-1b-7b": dict(
        base="allenai/OLMoE-1B-7B-0924", n=104_743, batch=1_024, cycles=512, layer=15, experts=64, shared=64,
        head="score", task={"pipeline_tag": "text-classification", "head": "score", "labels": ["no", "yes"]},
        card=dict(license="apache-2.0", language="en"), corpus="Salesforce/wikitext (5000 records)",
    ),
    "deepseek-vl2-tiny": dict(
        base="deepseek-ai/deepseek-vl2-tiny", n=6_218, batch=256, cycles=243, layer=11, experts=64, shared=48,
        head=None, task={"pipeline_tag": "image-text-to-text", "head": None},
        card=dict(license="other", language="en"), corpus=None,
    ),
}  # fmt: skip


def statement_of(name: str, epsilon: float = 8.0) -> PrivacyStatement:
    """A plan of the example's size at `epsilon`, all of it spent."""
    e = EXAMPLES[name]
    n, batch, cycles = e["n"], e["batch"], e["cycles"]
    delta = default_delta(n)
    sigma = calibrate_noise_multipliers(epsilon, delta, batch / n, cycles)
    shared, expert = (
        StreamStatement(noise, batch / n, 1.0, denominator, cycles, cycles)
        for noise, denominator in ((sigma.shared, batch), (sigma.expert, batch / e["experts"]))
    )
    return PrivacyStatement.build(
        method="raptor", shared=shared, expert=expert, delta=delta, dataset_size=n, expected_batch_size=batch,
        target_epsilon=epsilon, num_experts=e["experts"], protected_layer=e["layer"], ownership="gate",
        base_model=e["base"], public_corpus=e["corpus"],
        disjointness="no record of one is in the other" if e["corpus"] else None,
    )  # fmt: skip


def render(name: str) -> str:
    """The card of one example."""
    e = EXAMPLES[name]
    statement = PrivacyStatement.from_json((ROOT / name / "privacy.json").read_text(encoding="utf-8"))
    contents = AdapterContents(
        shared=("",) * e["shared"], experts=(), routers=(), foreign=(), head=e["head"], rank=16, num_outputs=2,
        layers=(e["layer"],), num_experts=e["experts"], stacked=False, unpaired=(),
    )  # fmt: skip
    options = CardOptions(
        repo_id=f"example-org/{name}-private",
        notes=NOTE,
        tuning=HELD_OUT,
        layer_choice=None if e["corpus"] else "the last sparse block, without looking at data",
        **e["card"],
    )
    return update_card(None, statement, {"id": e["base"], "revision": None}, e["task"], contents, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="build the statements again")
    args = parser.parse_args()
    for name in EXAMPLES:
        (ROOT / name).mkdir(exist_ok=True)
        if args.plan:
            text = statement_of(name).to_json()
            (ROOT / name / "privacy.json").write_text(text + "\n", encoding="utf-8")
        (ROOT / name / "README.md").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
