"""The model card: metadata for the Hub, and a section made from the privacy statement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor_hf.errors import Finding
from raptor_hf.hub.contents import error
from raptor_hf.privacy.statement import PrivacyStatement

__all__ = ["CardOptions", "check_card", "privacy_section", "render_section", "update_card"]

BEGIN, END = "<!-- raptor-hf: begin (made from privacy.json; edits in here are lost) -->", "<!-- raptor-hf: end -->"
TAGS = ("lora", "moe", "differential-privacy", "dp-sgd", "raptor")
_TEMPLATES = Path(__file__).parent / "templates"
_CLAIM = re.compile(
    r"(?:ε|\\(?:var)?epsilon|\bepsilon|\beps)\W{0,4}(?:(?:of|is|at|to)\W{0,3})?(\d+(?:\.\d+)?)(?![\d.]*e-)", re.I
)


@dataclass(frozen=True)
class CardOptions:
    """What only the author knows.

    Attributes:
        repo_id: Hub id of the release. license, language: metadata. tags: further ones.
        datasets: Hub ids of *public* data sets only (the private one is not named).
        metrics: name -> value of an evaluation that may be published; metrics_dataset: on which data.
        layer_choice, tuning: how the protected layer and the hyper-parameters were chosen. notes: any more text.
    """

    repo_id: str | None = None
    license: str | None = None
    language: str | Sequence[str] | None = None
    tags: Sequence[str] = ()
    datasets: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_dataset: str | None = None
    layer_choice: str | None = None
    tuning: str | None = None
    notes: str | None = None


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_TEMPLATES), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip


def privacy_section(statement: PrivacyStatement) -> str:
    """The part of a card that `verify_release` compares word for word."""
    return statement.to_markdown().strip()


def render_section(
    statement: PrivacyStatement, base: Mapping[str, Any], task: Mapping[str, Any], contents: Any, options: CardOptions
) -> str:
    """The package's section of the card, markers included."""
    body = _environment().get_template("section.md.jinja").render(
        statement=statement, privacy=privacy_section(statement), base=base, task=task, contents=contents,
        options=options, repo=options.repo_id or "OWNER/NAME",
    )  # fmt: skip
    return f"{BEGIN}\n{body.strip()}\n{END}"


def _metadata(
    existing: dict[str, Any], base: Mapping[str, Any], task: Mapping[str, Any], options: CardOptions
) -> dict[str, Any]:
    """The card's YAML: what is there stays, what the release knows is set."""
    from huggingface_hub import EvalResult, ModelCardData

    data = dict(existing)
    data["library_name"] = "peft"
    for name, value in (("license", options.license), ("language", options.language)):
        if value:
            data[name] = list(value) if isinstance(value, (tuple, list)) else value
    if base["id"]:
        data["base_model"], data["base_model_relation"] = base["id"], "adapter"
    else:
        data.pop("base_model", None)
    data["pipeline_tag"] = task["pipeline_tag"]
    data["tags"] = list(dict.fromkeys([*TAGS, *(existing.get("tags") or []), *options.tags]))
    if options.datasets:
        data["datasets"] = list(options.datasets)
    if options.metrics:
        name = (options.repo_id or "release").split("/")[-1]
        results = [
            EvalResult(
                task_type=task["pipeline_tag"],
                dataset_type=(options.metrics_dataset or "not-stated").lower().replace(" ", "-"),
                dataset_name=options.metrics_dataset or "not stated",
                metric_type=metric,
                metric_value=value,
            )
            for metric, value in options.metrics.items()
        ]
        data["model-index"] = ModelCardData(model_name=name, eval_results=results).to_dict()["model-index"]
    return data


def _split(text: str) -> tuple[dict[str, Any], str]:
    """(metadata, body) of a card."""
    import yaml

    match = re.match(r"\s*---\s*\n(.*?)\n---\s*\n?", text, re.S)
    if match is None:
        return {}, text
    values = yaml.safe_load(match.group(1))
    return (values if isinstance(values, dict) else {}), text[match.end() :]


def update_card(
    existing: str | None,
    statement: PrivacyStatement,
    base: Mapping[str, Any],
    task: Mapping[str, Any],
    contents: Any,
    options: CardOptions,
) -> str:
    """A new card, or `existing` with its metadata and the package's section brought up to date."""
    import yaml

    metadata, body = _split(existing) if existing else ({}, "")
    section = render_section(statement, base, task, contents, options)
    start, stop = body.find(BEGIN), body.find(END)
    if 0 <= start < stop:
        body = body[:start] + section + body[stop + len(END) :]
    elif body.strip():
        body = f"{section}\n\n{body.lstrip()}"
    else:
        title = (options.repo_id or "A private Mixture-of-Experts adapter").split("/")[-1]
        body = f"# {title}\n\n{section}\n"
    values = _metadata(metadata, base, task, options)
    front = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).strip()
    return f"---\n{front}\n---\n\n{body.strip()}\n"


def check_card(text: str, statement: PrivacyStatement, base: Mapping[str, Any]) -> list[Finding]:
    """Findings about a card: it must say what the statement says, first and in full."""
    again = "Render it again with `export_release`, which keeps the text outside the package's section"
    try:
        metadata, body = _split(text)
    except ValueError:
        metadata, body = {}, text
    found = []
    start, stop = body.find(BEGIN), body.find(END)
    if not 0 <= start < stop or privacy_section(statement) not in body[start:stop]:
        found.append(error("The card's privacy section is not that of the statement", "Card and statement must agree",
                           again))  # fmt: skip
    expected = {"library_name": "peft", "base_model": base.get("id")}
    if base.get("id"):
        expected["base_model_relation"] = "adapter"
    for key, value in expected.items():
        if metadata.get(key) != value:
            found.append(error(f"The card's metadata say `{key}: {metadata.get(key)}`", f"The release says {value!r}",
                               again))  # fmt: skip
    if missing := sorted(set(TAGS) - set(metadata.get("tags") or [])):
        found.append(error(f"The card's metadata lack the tag `{missing[0]}`", "People filter by it", again, "warning"))
    if not statement.private and "NOT PRIVATE" not in body[: max(start, 0) + 600]:
        found.append(error("The card does not begin by saying that the run is not private",
                           "A reader must see it at once", again))  # fmt: skip
    outside = body[:start] + body[stop:] if 0 <= start < stop else body
    for match in _CLAIM.finditer(outside):
        if statement.epsilon_spent is None or not statement.private or float(match.group(1)) < statement.epsilon_spent:
            found.append(
                error(
                    f"The card says `{match.group().strip()}` outside the privacy section",
                    f"The statement says {statement.verdict!r}",
                    "Correct that sentence, or leave epsilon to the privacy section",
                )
            )
    return found


def merge_cards(theirs: str, ours: str) -> str:
    """`ours` for a repository that has the card `theirs`: their text stays, unless `ours` has text of its own."""
    import yaml

    (metadata, body), (new, mine) = _split(theirs), _split(ours)
    start, stop = mine.find(BEGIN), mine.find(END)
    if not 0 <= start < stop:
        return ours
    section = mine[start : stop + len(END)]
    own_text = [line for line in (mine[:start] + mine[stop + len(END) :]).splitlines() if line.strip()]
    merged = {**metadata, **new}
    merged["tags"] = list(dict.fromkeys([*new.get("tags", []), *(metadata.get("tags") or [])]))
    if len(own_text) > 1:  # more than the title
        body = mine
    else:
        start, stop = body.find(BEGIN), body.find(END)
        if 0 <= start < stop:
            body = body[:start] + section + body[stop + len(END) :]
        else:
            body = f"{section}\n\n{body.lstrip()}" if body.strip() else mine
    front = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True).strip()
    return f"---\n{front}\n---\n\n{body.strip()}\n"
