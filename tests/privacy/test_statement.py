"""The statement: a claim that cannot disagree with itself, survives a file, and is refuted when it is too small."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from raptor_hf.errors import PrivacyConfigError, ReleaseError
from raptor_hf.privacy import PrivacyStatement, StreamStatement, compute_epsilon
from raptor_hf.privacy._card import round_up

N, B, EXPERTS, PLANNED, DELTA = 1000, 50, 8, 60, 1e-5


def _statement(*, taken: tuple[int, int] = (21, 20), **changes: object) -> PrivacyStatement:
    shared = StreamStatement(1.1, B / N, 1.0, B, PLANNED, taken[0])
    expert = StreamStatement(4.0, B / N, 0.5, B / EXPERTS, PLANNED, taken[1])
    values = {
        "method": "raptor",
        "shared": shared,
        "expert": expert,
        "delta": DELTA,
        "dataset_size": N,
        "expected_batch_size": B,
        "num_experts": EXPERTS,
        "protected_layer": 11,
        "ownership": "gate",
        "base_model": "some/model",
        **changes,
    }
    return PrivacyStatement.build(**values)


@pytest.fixture(scope="module")
def statement() -> PrivacyStatement:
    return _statement()


def _mechanisms(steps: tuple[int, int]) -> list[tuple[float, float, int]]:
    return [(1.1, B / N, steps[0]), (4.0, B / N, steps[1])]


def test_states_the_upper_bounds_of_what_was_spent_and_planned(statement: PrivacyStatement) -> None:
    assert statement.epsilon_spent == compute_epsilon(_mechanisms((21, 20)), DELTA).upper
    assert statement.epsilon_planned == compute_epsilon(_mechanisms((PLANNED, PLANNED)), DELTA).upper
    assert [row.delta for row in statement.other_deltas] == [1e-6, 1e-8]
    for row in statement.other_deltas:
        assert row.epsilon_spent == compute_epsilon(_mechanisms((21, 20)), row.delta).upper > statement.epsilon_spent
    assert statement.accountant_version == "0.2.0"
    assert "torch" in statement.packages or "numpy" in statement.packages


def test_the_verdict_is_the_first_field_and_never_rounds_down(statement: PrivacyStatement) -> None:
    assert dataclasses.fields(statement)[0].name == "verdict"
    assert next(iter(json.loads(statement.to_json()))) == "verdict"
    stated = float(re.match(r"\(([0-9.]+), ", statement.verdict).group(1))
    assert statement.epsilon_spent <= stated <= statement.epsilon_spent * 1.001
    assert statement.private


def test_nothing_taken_spends_nothing() -> None:
    untouched = _statement(taken=(0, 0))
    assert untouched.epsilon_spent == 0.0 < untouched.epsilon_planned
    assert untouched.verdict.startswith("(0, 1e-05)")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_source": "insecure_seed"}, "seed"),
        ({"research_diagnostics": True}, "diagnostics"),
        ({"shared": StreamStatement(None, B / N, 1.0, B, PLANNED, 0)}, "without"),
        ({"expert": StreamStatement(1.0, B / N, None, B, PLANNED, 0)}, "without"),
    ],
)
def test_what_is_not_private_says_so_first(changes: dict, reason: str) -> None:
    said = _statement(**changes)
    assert said.verdict.startswith("NOT PRIVATE: ") and reason in said.verdict
    assert not said.private
    assert said.to_markdown().startswith("**NOT PRIVATE")
    assert PrivacyStatement.from_json(said.to_json()) == said


def test_a_run_without_noise_claims_no_epsilon() -> None:
    open_run = _statement(method="nonprivate_lora", shared=StreamStatement(None, B / N, None, B, 9, 9), expert=None)
    assert open_run.epsilon_spent is None and open_run.other_deltas == ()
    assert open_run.recompute().upper == math.inf
    assert "infinite / infinite" in open_run.to_markdown()
    with pytest.raises(ReleaseError, match="epsilon_spent"):
        dataclasses.replace(open_run, epsilon_spent=1.0)


def test_one_stream() -> None:
    single = _statement(expert=None, method="shared_only", num_experts=None, ownership=None, protected_layer=None)
    assert single.epsilon_planned == compute_epsilon([(1.1, B / N, PLANNED)], DELTA).upper
    assert "nothing composes in parallel" in single.parallel_composition
    assert "Expert stream" not in single.to_markdown()


def test_json_round_trip_is_exact(statement: PrivacyStatement) -> None:
    again = PrivacyStatement.from_json(statement.to_json())
    assert again == statement
    assert again.recompute().upper == statement.epsilon_spent


def _edited(statement: PrivacyStatement, **changes: object) -> str:
    return json.dumps({**json.loads(statement.to_json()), **changes})


def test_a_prettier_verdict_is_refused(statement: PrivacyStatement) -> None:
    with pytest.raises(ReleaseError, match="Its own numbers say"):
        PrivacyStatement.from_json(_edited(statement, verdict="(0.1, 1e-05)-differentially private"))
    seeded = _statement(noise_source="insecure_seed")
    with pytest.raises(ReleaseError, match="NOT PRIVATE"):
        PrivacyStatement.from_json(_edited(seeded, verdict=statement.verdict))


@pytest.mark.parametrize("name", ["epsilon_spent", "epsilon_planned"])
def test_a_claim_that_is_too_small_is_refuted(statement: PrivacyStatement, name: str) -> None:
    smaller = 0.98 * getattr(statement, name)
    text = _edited(statement, **{name: smaller})
    if name == "epsilon_spent":
        verdict = re.sub(r"^\([0-9.]+", "(" + round_up(smaller), statement.verdict)
        text = _edited(statement, epsilon_spent=smaller, verdict=verdict)
    claim = PrivacyStatement.from_json(text)
    with pytest.raises(ReleaseError, match="accountant"):
        claim.recompute()


def test_more_steps_than_claimed_are_refuted(statement: PrivacyStatement) -> None:
    longer = dataclasses.replace(statement, shared=dataclasses.replace(statement.shared, steps_taken=40))
    with pytest.raises(ReleaseError, match="steps_taken"):
        longer.recompute()


def test_a_claim_at_another_delta_is_checked_too(statement: PrivacyStatement) -> None:
    rows = list(statement.other_deltas)
    rows[1] = dataclasses.replace(rows[1], epsilon_spent=0.9 * rows[1].epsilon_spent)
    with pytest.raises(ReleaseError, match="1e-08"):
        dataclasses.replace(statement, other_deltas=tuple(rows)).recompute()


def test_a_larger_claim_stands(statement: PrivacyStatement) -> None:
    dataclasses.replace(statement, epsilon_planned=2 * statement.epsilon_planned).recompute()


def test_the_other_accountant_agrees(statement: PrivacyStatement) -> None:
    pytest.importorskip("dp_accounting")
    found = statement.recompute(accountant="pld")
    assert 0.98 * statement.epsilon_spent <= found.upper <= statement.epsilon_spent
    claim = _statement(accountant="pld")
    assert claim.recompute(accountant="prv").lower <= claim.epsilon_spent
    too_small = dataclasses.replace(claim, epsilon_planned=0.97 * claim.epsilon_planned)
    for accountant in ("prv", "pld"):
        with pytest.raises(ReleaseError, match="steps_planned"):
            too_small.recompute(accountant=accountant)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"schema_version": None}, "schema version None"),
        ({"owner_counts": [1, 2]}, "owner_counts"),
        ({"dataset_size": 2000}, "expected batch size"),
        ({"delta": 1e-12}, "1e-10 <= delta"),
        ({"noise_source": "urandom"}, "noise_source"),
        ({"epsilon_spent": None}, "epsilon_spent"),
        ({"epsilon_planned": -1.0}, "epsilon_planned"),
        ({"shared": {"sigma": 1.0}}, "damaged"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(statement: PrivacyStatement, changes: dict, message: str) -> None:
    with pytest.raises((ReleaseError, PrivacyConfigError), match=message):
        PrivacyStatement.from_json(_edited(statement, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_statement_is_refused(text: str) -> None:
    with pytest.raises(ReleaseError, match="not a privacy statement"):
        PrivacyStatement.from_json(text)


def test_it_is_frozen(statement: PrivacyStatement) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        statement.epsilon_spent = 0.0


def test_markdown_holds_what_a_reader_needs(statement: PrivacyStatement) -> None:
    text = statement.to_markdown()
    for part in [statement.verdict, "denominator 6.25", "steps 21 of 60", "8 experts of layer 11", "operating-system"]:
        assert part in text
    for caveat in statement.not_covered:
        assert caveat in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.count("|") == 3


def test_a_statement_needs_a_stream() -> None:
    with pytest.raises(PrivacyConfigError, match="No stream"):
        _statement(shared=None, expert=None)
