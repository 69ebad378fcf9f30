"""Privacy auditing in one training run (Steinke, Nasr and Jagielski 2023): the estimator.

Each of m canaries is put into the training set or left out by its own fair coin, the model is trained *once*, and the
auditor guesses the coins of r canaries from the scores that the model gives them. If training is (eps, delta)-DP under
adding or removing one record, the number V of right guesses obeys (their theorem for approximate DP; any number of
guesses <= r)

    P(V >= v) <= beta + 2 m delta alpha,        W ~ Binomial(r, e^eps / (1 + e^eps)),
    beta = P(W >= v),        alpha = max over i >= 1 of P(v - i <= W < v) / i.

The canaries need not be independent of one another, and the model may be trained on other records too. What must hold:
the coins are fair, independent and unseen by whoever chooses the canaries and the guesses; r is fixed without the
scores (`one_run_audit` corrects for choosing it). It catches gross errors: at small epsilon, or with few canaries, a
broken mechanism often passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from raptor_hf.audit.roc import checked_scores
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import integer, one_of, positive, probability

__all__ = ["OneRunAudit", "guess_membership", "one_run_audit", "one_run_epsilon", "one_run_p_value"]

_MAX_EPSILON = 40.0  # e^40 / (1 + e^40) is 1 in float64: every guess is expected to be right, and nothing is refuted
_FEWEST_GUESSES = 16
_UNFAIR = 1e-9


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of `correct` or more right guesses under (epsilon, delta)-DP, at most 1.

    Args:
        canaries: m, all that were flipped for. guesses: r <= m. correct: v <= r. epsilon: >= 0. delta: in [0, 1).
    """
    integer("canaries", canaries, minimum=1)
    integer("guesses", guesses)
    integer("correct", correct)
    probability("delta", delta, zero=True, one=False)
    if epsilon != 0:
        positive("epsilon", epsilon)
    if not correct <= guesses <= canaries:
        raise PrivacyConfigError(
            f"{correct} right of {guesses} guesses about {canaries} canaries were given",
            "Guesses are about canaries, and right ones are guesses",
            "Check the counts: correct <= guesses <= canaries",
        )
    right = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    # P(v - i <= W < v) as a running sum of its positive terms: no difference of nearly equal tails. Beyond i = v the
    # probability stays and 1 / i falls, so the maximum is at i <= v.
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    alpha = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_epsilon(canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95) -> float:
    """The epsilon that the guesses refute: with probability >= `confidence`, no smaller one holds at delta.

    The end of a bisection where the p-value is below 1 - confidence, to 1e-9. Zero where epsilon 0 is not refuted.
    The guarantee does not need the p-value to be monotone in epsilon: any epsilon whose p-value is that small is
    refuted, and with it every smaller one, as (eps', delta)-DP implies (eps, delta)-DP.
    """
    probability("confidence", confidence, one=False)
    level = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < level

    low, high = 0.0, _MAX_EPSILON
    if not refuted(low):
        return 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess_membership(scores: np.ndarray, most: int, least: int) -> np.ndarray:
    """(m,) int8: 1 ("in") for the `most` highest scores, -1 ("out") for the `least` lowest, 0 for no guess.

    Scores that tie across either cut are not guessed: breaking the tie by position would let the order of the
    canaries, which may be the order of their coins, decide. Fewer guesses than allowed are covered by the theorem.
    """
    values = np.asarray(scores, dtype=np.float64).ravel()
    integer("most", most)
    integer("least", least)
    if most + least > values.size:
        raise PrivacyConfigError(
            f"{most} guesses of in and {least} of out were asked for {values.size} canaries",
            "Each canary is guessed once at most",
            "Ask for fewer guesses",
        )
    return _upper(values, most) - _upper(-values, least)


def _upper(values: np.ndarray, count: int) -> np.ndarray:
    """1 for the `count` highest values, without the ties of the cut."""
    if count == 0:
        return np.zeros(values.size, dtype=np.int8)
    ordered = np.sort(values)[::-1]
    last = ordered[count - 1]
    tied = count < values.size and ordered[count] == last
    return (values > last if tied else values >= last).astype(np.int8)


@dataclass(frozen=True)
class OneRunAudit:
    """A bound and what it was computed from. **Private**: the counts are functions of the trained model's scores.

    Attributes:
        epsilon: lower bound at delta, with `confidence`. canaries: m that the bound is about (half of them under
        "split"). guesses: r allowed. correct: v. most, least: how many were guessed in, and out, at most.
        selection: how r was chosen. tests: among how many choices the confidence was shared.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    most: int
    least: int
    selection: str
    tests: int


def _choices(canaries: int) -> list[tuple[int, int]]:
    """(most, least) tried: halving numbers of guesses, on both ends or on the upper one. Depends on m alone."""
    found = []
    size = canaries
    while size >= min(_FEWEST_GUESSES, canaries):
        found.append((size // 2, size // 2))
        if size < canaries:
            found.append((size, 0))
        size //= 2
    return found


def _bound(
    scores: np.ndarray, member: np.ndarray, pair: tuple[int, int], delta: float, confidence: float
) -> tuple[float, float]:
    """(epsilon, minus the p-value of epsilon 0): the second tells bounds of zero apart."""
    guesses, correct = sum(pair), _counts(scores, member, *pair)
    epsilon = one_run_epsilon(scores.size, guesses, correct, delta=delta, confidence=confidence)
    return epsilon, -one_run_p_value(scores.size, guesses, correct, 0.0, delta)


def _counts(scores: np.ndarray, member: np.ndarray, most: int, least: int) -> int:
    guess = guess_membership(scores, most, least)
    return int(((guess == 1) & member).sum() + ((guess == -1) & ~member).sum())


def one_run_audit(
    scores: np.ndarray,
    member: np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    selection: str = "union",
    guesses: tuple[int, int] | None = None,
    seed: int = 0,
) -> OneRunAudit:
    """Lower bound on epsilon from the scores of the canaries of one run, the number of guesses chosen for you.

    Args:
        scores: (m,), higher says "in". member: (m,) bool, the coins.
        selection: "union" tries a fixed grid of numbers of guesses, each at (1 - confidence) / (size of the grid), and
            gives the best (union bound). "split" chooses among the grid on a random half of the canaries and bounds on
            the other half, whose coins are as fair given those of the first: m is then halved. "fixed" uses `guesses`.
        guesses: (most, least) for "fixed", decided before any score was seen.
        seed: of the split, which looks at no score and no coin. Fix it beforehand.

    Raises:
        PrivacyConfigError: fewer than two canaries, NaN scores, or coins that cannot have been fair (p < 1e-9).
    """
    one_of("selection", selection, ("union", "split", "fixed"))
    probability("delta", delta, zero=True, one=False)
    probability("confidence", confidence, one=False)
    integer("seed", seed)
    values, coins = checked_scores(scores, member, both=False)  # few fair coins may all fall alike
    integer("canaries", coins.size, minimum=2)
    if stats.binomtest(int(coins.sum()), coins.size, 0.5).pvalue < _UNFAIR:
        raise PrivacyConfigError(
            f"{int(coins.sum())} of {coins.size} canaries were put in",
            "The bound holds for canaries put in by independent fair coins only, and these cannot have been",
            "Flip one fair coin for each canary, and give the scores of all of them",
        )
    if (selection == "fixed") != (guesses is not None):
        raise PrivacyConfigError(
            f"`selection={selection!r}` and `guesses={guesses}` were given",
            "A number of guesses fixed beforehand needs no choice, and a choice needs none given",
            "Give `guesses` with selection 'fixed', and only then",
        )
    tests = 1
    if guesses is not None:
        choices = [guesses]
    elif selection == "union":
        choices = _choices(values.size)
        tests = len(choices)
    else:
        order = np.random.default_rng(seed).permutation(values.size)
        first, second = order[: values.size // 2], order[values.size // 2 :]
        # The grid is that of the second half; on the first, one canary smaller at most, the sizes are cut to fit.
        fitting = [(most, least) for most, least in _choices(second.size) if most + least <= first.size]
        fitting = fitting or [(0, 0)]
        tried = [_bound(values[first], coins[first], pair, delta, confidence) for pair in fitting]
        choices = [fitting[tried.index(max(tried))]]
        values, coins = values[second], coins[second]
    level = 1 - (1 - confidence) / tests
    bounds = [_bound(values, coins, pair, delta, level) for pair in choices]
    best = max(bounds)
    most, least = choices[bounds.index(best)]
    return OneRunAudit(
        epsilon=best[0],
        delta=delta,
        confidence=confidence,
        canaries=values.size,
        guesses=most + least,
        correct=_counts(values, coins, most, least),
        most=most,
        least=least,
        selection=selection,
        tests=tests,
    )
