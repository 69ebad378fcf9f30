"""`verify_release`: everything about a release that can be checked without trusting whoever made it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

from raptor_hf.errors import Finding, PrivacyConfigError, ReleaseError
from raptor_hf.hub import contents
from raptor_hf.hub.contents import ADAPTER_CONFIG, CARD, MANIFEST, STATEMENT, error
from raptor_hf.hub.model_card import check_card
from raptor_hf.hub.release import MANIFEST_VERSION, check_files
from raptor_hf.hub.remote import Snapshot, foreign_history, open_release
from raptor_hf.privacy.accounting import ACCOUNTANTS, EpsilonBounds
from raptor_hf.privacy.statement import NOT_COVERED, PrivacyStatement

__all__ = ["VerificationReport", "verify_release"]


@dataclass(frozen=True)
class VerificationReport:
    """What `verify_release` found.

    Attributes:
        source, revision: what was read; the commit, for a repository.
        findings: `Finding`s; "error": the release must not be relied on, "warning": something was not checked.
        statement: the privacy statement, None when it cannot be read.
        epsilon: accountant -> epsilon spent, recomputed from the statement's numbers.
        digest: SHA-256 of the manifest, which holds the hash of every other file but the card.
    """

    source: str
    revision: str | None
    findings: tuple[Finding, ...]
    statement: PrivacyStatement | None
    epsilon: dict[str, EpsilonBounds] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    digest: str | None = None

    @property
    def ok(self) -> bool:
        """No error. A release that says it is not private can be `ok`: see `private`."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def private(self) -> bool:
        """The statement claims a guarantee and nothing was found against it."""
        return self.ok and self.statement is not None and self.statement.private

    def raise_on_error(self) -> None:
        """Raise the first error as a `ReleaseError`."""
        for finding in self.errors:
            raise finding.error()

    def to_json(self) -> str:
        """For machines; the fields are those of the report."""
        statement = self.statement
        values: dict[str, Any] = {
            "source": self.source,
            "revision": self.revision,
            "ok": self.ok,
            "private": self.private,
            "verdict": statement.verdict if statement else None,
            "epsilon_claimed": statement.epsilon_spent if statement else None,
            "delta": statement.delta if statement else None,
            "epsilon_recomputed": {name: bounds.upper for name, bounds in self.epsilon.items()},
            "findings": [
                {"severity": f.severity, "what": f.what, "why": f.why, "instead": f.instead} for f in self.findings
            ],
            "files": self.files,
            "digest": self.digest,
        }
        return json.dumps(values, indent=2)


def verify_release(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    history: bool = False,
) -> VerificationReport:
    """Check a release: a folder, or a repository of the Hub (`owner/name`, `owner/name@revision`).

    Checked: only allowed files, without local paths, tokens or fields of the run; adapters on the declared roles only
    (no router, one protected layer); the statement's schema; its epsilons, by the accountant that made the claim and
    by the other one; card, manifest and statement agree; hashes. Nothing is unpickled, no code of the release runs.

    Not checked, because files cannot show it: that the numbers in the statement are those of the run.

    Args:
        history: look at the file names of all earlier commits too (a repository's; one request a commit). What was
            deleted from the newest commit can still be downloaded.

    Raises:
        ReleaseError: there is nothing to read. What is wrong with a release is in the report, not raised.
    """
    snapshot = open_release(path_or_repo, revision=revision, token=token)
    if history and snapshot.revision is not None:
        snapshot = replace(snapshot, history=foreign_history(snapshot.source, snapshot.revision, token))
    return verify_snapshot(snapshot)


def verify_snapshot(snapshot: Snapshot, *, accountants: bool = True) -> VerificationReport:
    """`verify_release` for what has been read already."""
    if snapshot.revision is None and contents.STATE in snapshot.names and MANIFEST not in snapshot.names:
        # the advice for a release with foreign files, to delete them, would lose what the run needs to go on
        finding = error(
            f"`{snapshot.source}` is what a training saved, and no release",
            "It holds private files that a resumed run needs, and is never published as it is",
            "Delete nothing: make a release by `export_release(folder, target)`, and verify that",
        )
        hashes = {name: contents.sha256(data) for name, data in sorted(snapshot.files.items())}
        return VerificationReport(snapshot.source, None, (finding,), None, files=hashes)
    names = set(snapshot.names) - contents.HUB_FILES
    files = {**dict.fromkeys(names, b""), **snapshot.files}
    manifest, findings = _manifest(snapshot.files)
    base = manifest.get("base_model", {}) if manifest else {}
    base = base if isinstance(base, dict) else {}
    findings += check_files(files, public=(base.get("id"), snapshot.source))
    for commit, name in snapshot.history:
        if name not in names:
            findings.append(error(f"The file `{name}` is in the history (commit {commit[:12]})",
                                  "Whoever knows the commit can still download it",
                                  "Treat what it holds as public, and release in a new repository"))  # fmt: skip
    statement, epsilon = None, dict[str, EpsilonBounds]()
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # among the findings of `check_files`
        statement = PrivacyStatement.from_json(snapshot.files[STATEMENT].decode("utf-8"))
    if statement is not None:
        findings += _claims(statement)
        if accountants:
            epsilon, found = _recompute(statement)
            findings += found
        if CARD in snapshot.files:
            findings += check_card(snapshot.files[CARD].decode("utf-8", "replace"), statement, base)
        if statement.base_model != base.get("id"):
            findings.append(error(f"The statement is about {statement.base_model!r}",
                                  f"The manifest says {base.get('id')!r}", "Do not rely on either"))  # fmt: skip
    findings += _same_base(snapshot.files, base)
    return VerificationReport(
        source=snapshot.source,
        revision=snapshot.revision,
        findings=tuple(findings),
        statement=statement,
        epsilon=epsilon,
        files={name: contents.sha256(data) for name, data in sorted(snapshot.files.items())},
        digest=contents.sha256(snapshot.files[MANIFEST]) if MANIFEST in snapshot.files else None,
    )


def _manifest(files: dict[str, bytes]) -> tuple[dict[str, Any], list[Finding]]:
    """The manifest, and findings about hashes."""
    if MANIFEST not in files:
        return {}, []  # that it is missing is among the findings of `check_names`
    again = "Do not use the release: ask its author"
    try:
        manifest = json.loads(files[MANIFEST])
        listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        unknown = set(manifest) - {"schema_version", "base_model", "task", "files"}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        return {}, [error(f"`{MANIFEST}` is damaged ({problem!r})", "No hash can be checked", again)]
    findings = []
    if manifest.get("schema_version") != MANIFEST_VERSION or unknown:
        findings.append(
            error(f"`{MANIFEST}` has version {manifest.get('schema_version')} and fields {sorted(unknown)} more",
                  f"Version {MANIFEST_VERSION} has its own fields", "Use the package version that wrote it")
        )  # fmt: skip
    present = set(files) - {MANIFEST, CARD}
    for name in sorted(present & set(listed)):
        if contents.sha256(files[name]) != listed[name]:
            findings.append(error(f"`{name}` is not the file that was released (SHA-256 differs)",
                                  "It was changed after the export", again))  # fmt: skip
    for name in sorted(present ^ set(listed)):
        findings.append(error(f"`{name}` is listed or present, not both", "The release is not complete", again))
    return manifest, findings


def _claims(statement: PrivacyStatement) -> list[Finding]:
    """Findings about a statement that its own constructor does not see."""
    found = []
    again = "Do not rely on it: ask its author for the statement that the trainer wrote"
    if statement.expert is not None and statement.num_experts:
        batch = statement.expected_batch_size
        if not any(
            abs(statement.expert.denominator - value) <= 1e-6 * value
            for value in (batch / statement.num_experts, batch)
        ):
            found.append(error(f"The expert stream divides by {statement.expert.denominator:g}",
                               "That is neither B nor B / E, so it may be a realised count", again))  # fmt: skip
    if statement.method == "raptor" and (statement.expert is None or statement.shared is None):
        found.append(error("The statement of method `raptor` has one stream", "It trains two", again))
    missing = [text for text in NOT_COVERED if text not in statement.not_covered]
    if missing:  # another version of the package may word a limit differently; it never has fewer
        severity = "error" if len(set(statement.not_covered)) < len(NOT_COVERED) else "warning"
        found.append(error(f"The statement no longer says that it does not cover {missing[0]!r}",
                           "A claim without its limits is another claim", again, severity))  # fmt: skip
    if not statement.private:
        found.append(error(f"The release is {statement.verdict}", "It has no privacy guarantee, and says so",
                           "Treat it as you would its training data", "warning"))  # fmt: skip
    return found


def _recompute(statement: PrivacyStatement) -> tuple[dict[str, EpsilonBounds], list[Finding]]:
    """Epsilon by the accountant that made the claim, and by the other one."""
    if statement.epsilon_spent is None:
        return {}, []
    epsilon: dict[str, EpsilonBounds] = {}
    findings = []
    for name in sorted(ACCOUNTANTS, key=lambda name: name != statement.accountant):
        try:
            epsilon[name] = statement.recompute(accountant=name)
        except ReleaseError as problem:
            findings.append(Finding.of(problem))
        except (PrivacyConfigError, ImportError) as problem:
            findings.append(error(f"The {name} accountant did not check epsilon ({problem})", "One opinion is missing",
                                  "Install `raptor-hf[pld]`", "warning"))  # fmt: skip
    if not epsilon and not findings:
        findings.append(error("Epsilon was not recomputed", "The claim stands unchecked", "Install an accountant"))
    return epsilon, findings


def _same_base(files: dict[str, bytes], base: dict[str, Any]) -> list[Finding]:
    found = []
    try:
        config = json.loads(files.get(ADAPTER_CONFIG, b"{}"))
        named = (config.get("base_model_name_or_path"), config.get("revision"))
    except (ValueError, AttributeError):
        return []  # among the findings of `scan`
    if named != (base.get("id"), base.get("revision")):
        found.append(error(f"`{ADAPTER_CONFIG}` is for {named[0]!r} at {named[1]!r}",
                           f"The manifest says {base.get('id')!r} at {base.get('revision')!r}",
                           "Do not load it: it would be put on another model"))  # fmt: skip
    if base.get("id") is None or (base.get("revision") is None and base.get("id") != "tiny-switch"):
        found.append(error("The base model is not named with its revision", "Another version may come in its place",
                           "Export again with `base_model` and `base_revision`", "warning"))  # fmt: skip
    return found
