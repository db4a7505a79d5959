"""Blind calibration, and foreign queries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, every_dtype, queries_of

import uhop_jax as uhop
from uhop_jax import _blind_trials, _expectation, data
from uhop_jax._blind_scores import chosen_beta, narrowed, supported
from uhop_jax._blind_trials import (
    Problem,
    _trial,
    fixed_trial,
    inverted_trial,
    learned_trial,
)
from uhop_jax._expectation import (
    Leading,
    counted,
    fold,
    leading_by_likelihood,
    leading_by_similarity,
    predictive,
    shares,
)
from uhop_jax.blind import LEARNED, MOVED, _used, fixed_similarities
from uhop_jax.experiments.blind import _best
from uhop_jax.experiments.kinds import (
    Blur,
    FoldedNoise,
    Inverted,
    SaltAndPepper,
    Shift,
)
from uhop_jax.likelihood import probabilities
from uhop_jax.posterior import mean_and_variance, with_squares
from uhop_jax.transformations import (
    Occlusions,
    Shifts,
    image_transformations,
)

SHAPE = (8, 8, 1)


def error(model, memories, query, target):
    state = uhop.retrieve(model, memories, query).state
    return float(((state - memories[target]) ** 2).sum(-1).mean())


@pytest.mark.parametrize(
    "corruption",
    [Inverted(0.2), pytest.param(SaltAndPepper(0.5), marks=pytest.mark.slow)],
    ids=str,
)
def test_learns_what_no_fixed_similarity_can(digits, corruption):
    query, target = queries_of(digits, corruption)
    calibration = uhop.calibrate_blind(digits, query)
    assert calibration.name == LEARNED and calibration.certain
    known = uhop.fit_likelihood(jax.random.key(2), digits, corruption)
    best = error(uhop.Model(uhop.Dot(known), beta=1.0), digits, query, target)
    blind = error(calibration.model, digits, query, target)
    assert blind <= 1.25 * best + 0.1
    fixed = min(
        error(uhop.Model(similarity, beta=beta), digits, query, target)
        for similarity in (uhop.Cosine(), uhop.NegativeSquaredL2())
        for beta in (1.0, 10.0, 100.0)
    )
    assert blind < 0.5 * fixed
    assert "without labels" in calibration.summary()
    assert abs(float(calibration.expected_error) - blind) < 0.1 + blind


@pytest.mark.parametrize("known", [1.0, 0.7], ids="observed {}".format)
def test_inverted_contrast_of_patterns_whose_negatives_look_like_patterns(known):
    # Bright and dark patches are alike: the best fixed similarity takes memories that
    # resemble the negative, and the table that it implies never turns round.
    fields = jax.random.normal(jax.random.key(0), (60, 20, 20, 1))
    smooth = Blur(2.0, (20, 20, 1))(jax.random.key(0), fields.reshape(60, -1))
    memories = jax.nn.sigmoid(2 * smooth / smooth.std())
    query, target = queries_of(memories, Inverted(0.3))
    seen = jax.random.uniform(jax.random.key(3), query.shape) < known
    calibration = uhop.calibrate_blind(
        memories, jnp.where(seen, query, 0), observed=seen if known < 1 else None
    )
    assert calibration.name == LEARNED and calibration.certain
    result = uhop.retrieve(
        calibration.model, memories, query, observed=seen if known < 1 else None
    )
    assert (result.weights.argmax(-1) == target).mean() > 0.95


@pytest.mark.parametrize("known", [1.0, 0.7], ids="observed {}".format)
def test_twenty_negatives_of_patterns_without_structure(known):
    rng = np.random.default_rng(0)
    memories = rng.normal(size=(200, 128))
    seen = rng.random((20, 128)) < known
    queries = np.where(seen, rng.normal(size=(20, 128)) - memories[:20], 0)
    observed = {} if known == 1 else {"observed": seen}
    calibration = uhop.calibrate_blind(memories, queries, **observed)
    weights = uhop.retrieve(calibration.model, memories, queries, **observed).weights
    assert (weights.argmax(-1) == np.arange(20)).all() and weights.max(-1).mean() > 0.9


def test_transformations_undo_what_moves_components(digits):
    query, target = queries_of(digits, Shift(1, SHAPE))
    moves = Shifts(1, SHAPE)
    calibration = uhop.calibrate_blind(digits, query, transformations=moves)
    assert calibration.name == MOVED and calibration.certain
    assert error(calibration.model, digits, query, target) < 0.1
    weights = jnp.exp(calibration.model.similarity.log_weights)
    # The four directions are equally frequent, and nothing else occurs.
    assert_close(weights[jnp.asarray([1, 3, 5, 7])], np.full(4, 0.25), floor=0.08)
    plain = uhop.calibrate_blind(digits, query)
    assert error(plain.model, digits, query, target) > 1


def test_transformations_without_an_advantage_are_given_up_early(digits, monkeypatch):
    """The first part of the queries tells: one maximisation, not four."""
    query, _ = queries_of(digits, uhop.Noise(0.4))
    maximised, calls = _blind_trials.maximised, []

    def counting(*args, groups=1, **options):
        calls.append(groups)
        return maximised(*args, groups=groups, **options)

    monkeypatch.setattr(_blind_trials, "maximised", counting)
    options = {"transformations": Shifts(1, SHAPE)}
    calibration = uhop.calibrate_blind(digits, query, **options)
    assert calls == [1] * 8 + [9]
    assert MOVED not in calibration.names and len(calibration.scores) == 8
    plain = uhop.calibrate_blind(digits, query)
    assert (calibration.name, calibration.names) == (plain.name, plain.names)
    np.testing.assert_array_equal(calibration.scores, plain.scores)


@pytest.mark.slow
def test_an_easy_corruption_loses_nothing(digits):
    query, target = queries_of(digits, uhop.Noise(0.1))
    moves = image_transformations(SHAPE)
    calibration = uhop.calibrate_blind(digits, query, transformations=moves)
    assert error(calibration.model, digits, query, target) < 0.01
    unsure = dataclasses.replace(calibration, advantage=calibration.standard_error)
    assert not unsure.certain and "not enough queries to tell" in unsure.summary()


def test_known_components_alone_count(digits):
    seen = jax.random.bernoulli(jax.random.key(3), 0.5, (60, 64))
    query = jnp.where(seen, 1 - digits, 0.77)
    calibration = uhop.calibrate_blind(digits, query, observed=seen)
    model = calibration.model
    state = uhop.retrieve(model, digits, query, observed=seen).state
    assert float(((state - digits) ** 2).sum(-1).mean()) < 0.1


def test_mean_and_variance_far_from_the_origin():
    rng = np.random.default_rng(0)
    patterns, weights = rng.normal(size=(5, 7)), rng.dirichlet(np.ones(5), 3)
    mean = weights @ patterns
    variance = weights @ (patterns**2).sum(-1) - (mean**2).sum(-1)
    for total, offset in ((1.0, 1000.0), (0.7, 10.0)):
        rows, center = (patterns + offset).astype(np.float32), np.full(7, offset)
        values = with_squares(rows, center.astype(np.float32))
        moments = jnp.asarray(total * weights @ values, jnp.float32)
        state, spread = mean_and_variance(moments, center, normalized=total == 1)
        assert_close(state, (total * (mean + offset)), scale=100)
        if total == 1:
            assert_close(spread, variance, scale=100)
        else:  # the rest is at zero
            second = total * weights @ (rows.astype(float) ** 2).sum(-1)
            assert_close(
                spread, second - (np.asarray(state, float) ** 2).sum(-1), scale=100
            )


@pytest.mark.slow
def test_candidates_of_nan_are_never_chosen():
    rng = np.random.default_rng(0)
    memories = jnp.asarray(rng.normal(size=(12, 8)), jnp.float32)
    query = memories[:10] + 0.1
    nan = uhop.Dot(uhop.LinearKernel(jnp.full((8, 8), jnp.nan)))
    with pytest.raises(ValueError, match="weights of LinearKernel"):
        uhop.calibrate_blind(memories, query, candidates={"nan": nan})
    huge = {"squared l2": uhop.NegativeSquaredL2(), "cosine": uhop.Cosine()}
    calibration = uhop.calibrate_blind(1e20 * memories, 1e20 * query, candidates=huge)
    assert calibration.rival == "cosine" or calibration.name == "cosine"
    assert bool(jnp.isfinite(calibration.advantage))
    message = "every candidate gave NaN: .* too large or too small for float32"
    with pytest.raises(ValueError, match=message):
        del huge["cosine"]
        uhop.calibrate_blind(1e20 * memories, 1e20 * query, candidates=huge)


def test_the_spread_of_overlaps_is_of_all_memories():
    rng = np.random.default_rng(0)
    alike, others = 1 + 1e-4 * rng.normal(size=(1000, 4)), rng.normal(size=(1000, 4))
    memories = np.concatenate([alike, others]).astype(np.float32)
    betas = [
        np.asarray(
            fixed_trial(
                Problem.of(x, x[::100] + np.float32(0.01), None),
                uhop.NegativeSquaredL2(),
            ).betas
        )
        for x in map(jnp.asarray, (memories, memories[::-1]))
    ]
    assert (abs(np.log(betas[0] / betas[1])) < 1).all()


@pytest.mark.slow
@every_dtype
def test_every_dtype(digits, dtype):
    query, target = queries_of(digits, Inverted(0.2), 40)
    memories, query = digits[:20].astype(dtype), query.astype(dtype)
    calibration = uhop.calibrate_blind(memories, query[target < 20])
    weights = uhop.retrieve(calibration.model, memories, query[target < 20]).weights
    assert (weights.argmax(-1) == target[target < 20]).mean() > 0.9


def test_the_predictive_likelihood_is_its_formula():
    rng = np.random.default_rng(0)
    K, M, Q, d, F = 5, 7, 3, 6, 3
    memories, queries = rng.integers(0, K, (M, d)), rng.integers(0, K, (Q, d))
    order = rng.permutation(d)
    bins = jnp.asarray(memories), jnp.asarray(queries)
    problem = fold(*bins, jnp.asarray(order), folds=F, number=K)
    counts = jnp.asarray(rng.integers(1, 9, (K, K)), jnp.float64)
    table = np.asarray(probabilities(counts))
    prior = rng.normal(size=M)
    betas = jnp.asarray([0.3, 1.0])
    leading = leading_by_likelihood(
        problem, counts, jnp.asarray(prior), betas, tabulate=probabilities, rank=K
    )
    common = shares(problem.queries, K, jnp.dtype("float64"))
    actual = predictive(problem, leading, betas, common, jnp.asarray(table)[None])
    _, uses = counted(problem, leading, betas[1], leading.total[..., 1], common)
    log_table = np.log(table)
    marginal = np.bincount(queries.ravel(), minlength=K) + 0.5
    marginal /= marginal.sum()
    expected, used = np.zeros((Q, 2)), np.zeros(M)
    fold_of = np.empty(d, int)
    fold_of[order] = np.arange(d) * F // d
    for q in range(Q):
        for f in range(F):
            inside = fold_of == f
            logits = prior + sum(
                log_table[memories[:, j], queries[q, j]]
                for j in np.flatnonzero(~inside)
            )
            for b, beta in enumerate(betas):
                p = np.exp(beta * (logits - logits.max()))
                p /= p.sum()
                used += p if b else 0
                for j in np.flatnonzero(inside):
                    c = queries[q, j]
                    chance = p @ table[memories[:, j], c]
                    expected[q, b] += np.log(chance / marginal[c])
    assert_close(actual, expected)
    assert_close(uses, used)


def test_shares_of_a_part_are_of_the_other_parts():
    """Shares that have seen a query would be ahead of a table that has not."""
    rng = np.random.default_rng(0)
    K, d, parts = 5, 6, 3
    queries = rng.integers(0, K + 1, (7, d))  # K counts for nothing
    problem = fold(
        *map(jnp.asarray, (queries, queries, np.arange(d))), folds=2, number=K
    )
    actual = shares(problem.queries, K, jnp.dtype("float64"), parts=parts)
    for part in range(parts):
        others = queries[np.arange(7) % parts != part]
        counts = np.bincount(others.ravel(), minlength=K + 1)[:K] + 0.5
        assert_close(actual[part], np.append(counts / counts.sum(), 1.0))


def test_few_queries_under_much_noise_are_not_given_up():
    """Twenty queries: a posterior that knows something is told from one that does not.

    At the last level nothing is known, and a sharp posterior would be far worse than
    the mean of the memories.
    """
    patterns = jnp.asarray(data.load("digits", limit=240).values, jnp.float32)
    target = np.arange(20) * 3
    shares_left = []
    for level in (0.5, 2.0):
        ratios = []
        for seed, memories in enumerate(patterns.reshape(4, 60, -1)):
            key = jax.random.fold_in(jax.random.key(0), seed)
            query = FoldedNoise(level)(key, memories[target])
            model = uhop.calibrate_blind(memories, query).model
            mean = (
                ((memories.mean(0, keepdims=True) - memories[target]) ** 2)
                .sum(-1)
                .mean()
            )
            ratios.append(error(model, memories, query, target) / float(mean))
        shares_left.append(np.mean(ratios))
    assert shares_left[0] < 0.45, shares_left
    assert shares_left[1] < 1.2, shares_left


@pytest.mark.parametrize("hopeless", ["noise", "other pixels"])
def test_queries_that_tell_nothing_are_not_answered_with_confidence(hopeless):
    # A table that says nothing makes no beta worse than another: the sharpest was ahead
    # by a few hundredths of a nat, with full confidence in one memory.
    rng = np.random.default_rng(0)
    strokes = rng.random((60, 16, 16, 1)) ** 4
    memories = Blur(1.0, (16, 16, 1))(jax.random.key(0), strokes.reshape(60, -1))
    memories = jnp.asarray(memories / memories.max(), jnp.float32)
    query, target = queries_of(
        memories, FoldedNoise(2.0 if hopeless == "noise" else 0.3)
    )
    if hopeless != "noise":
        query = query[:, rng.permutation(256)]
    result = uhop.calibrate_blind(memories, query)
    confidence = uhop.retrieve(result.model, memories, query).weights.max(-1)
    assert confidence.mean() < 0.15
    mean = ((memories.mean(0)[None] - memories[target]) ** 2).sum(-1).mean()
    assert error(result.model, memories, query, target) < 1.1 * mean


def test_narrowing_is_the_divergence_from_the_prior():
    rng = np.random.default_rng(0)
    prior = jnp.asarray(rng.normal(size=12))
    logits = jnp.asarray(rng.normal(size=(4, 3, 12))) + prior[None, None]
    betas = jnp.asarray([0.5, 2.0])
    total = jax.nn.logsumexp(betas[:, None, None, None] * logits[None], axis=-1)
    order = jnp.argsort(-logits, axis=-1)
    best = jnp.take_along_axis(logits, order, -1)
    leading = Leading(best, order, jnp.moveaxis(total, 0, -1))
    result = narrowed(leading, betas, prior)
    for b, beta in enumerate(betas):
        p = jax.nn.softmax(beta * logits, axis=-1)
        divergence = p * (jnp.log(p) - jax.nn.log_softmax(prior)[None, None])
        assert_close(result[:, b], divergence.sum(-1).mean(0))
    # Beyond the leading ones, memories are told apart no further.
    few = Leading(best[..., :4], order[..., :4], leading.total)
    assert (narrowed(few, betas, prior) < result).all()


def test_a_posterior_that_predicts_less_than_half_of_its_claim_is_left_out():
    scores = jnp.broadcast_to(jnp.asarray([0.1, 1.9, 2.1, 2.2])[None], (50, 4))
    claims = jnp.broadcast_to(jnp.asarray([0.1, 3.9, 4.1, 4.5])[None], (50, 4))
    left = supported(scores, claims)
    assert jnp.isfinite(left[0]).tolist() == [True, False, True, False]
    uncertain = scores + jnp.linspace(-1.0, 1.0, 50)[:, None]  # two errors are .17
    assert jnp.isfinite(supported(uncertain, claims)).all()
    assert jnp.isfinite(supported(scores, claims + 9)[0]).tolist() == [
        True,
        *[False] * 3,
    ]


def test_the_chosen_beta_is_the_first_of_those_that_scores_do_not_tell_apart():
    means = np.array([0.0, 4.9, 4.95, 5.0, 4.97, -np.inf])
    signs = (-1.0) ** (np.arange(64)[:, None] >> np.arange(6)[None])  # orthogonal
    scores = means[None] + signs  # differences have a standard error of 0.18
    assert chosen_beta(scores, np.arange(6)) == 1
    assert chosen_beta(scores, np.array([0, 3, 2, 9, 1, 0])) == 4
    told = means[None] + 1e-3 * signs
    assert chosen_beta(told, np.arange(6)) == 3
    assert chosen_beta(np.full((5, 3), -np.inf), np.array([2, 1, 0])) == 0


def test_where_scores_do_not_tell_a_likelihood_stays_at_beta_1_and_others_flat(digits):
    query, _ = queries_of(digits, Inverted(0.2), 20)
    problem = Problem.of(digits, query, None)
    learned = learned_trial(problem, inverted_trial(problem).counts)
    betas, scores = jnp.asarray([0.25, 0.5, 1.0, 2.0]), jnp.zeros((20, 4))
    for similarity, expected in (
        (learned.model.similarity, 1.0),
        (uhop.Cosine(), 0.25),
    ):
        trial = _trial(similarity, scores, betas, *learned[4:6])
        assert float(trial.model.beta) == trial.betas[trial.chosen] == expected


def test_large_blocks_of_logits_are_split(monkeypatch):
    rng = np.random.default_rng(0)
    memories, queries = (jnp.asarray(rng.normal(size=(n, 7))) for n in (50, 9))
    leading = leading_by_similarity.__wrapped__
    about = uhop.Cosine(), memories, queries, None, jnp.asarray([0.5, 2.0])
    whole = leading(*about, strips=2)
    monkeypatch.setattr(_expectation, "LOGITS", 9 * 2 * 20)  # 20 memories at a time
    sizes = []
    slice_of = jax.lax.dynamic_slice_in_dim

    def watched(x, first, size, *args, **kwargs):
        sizes.append(size)
        return slice_of(x, first, size, *args, **kwargs)

    monkeypatch.setattr(jax.lax, "dynamic_slice_in_dim", watched)
    for a, b in zip(whole, leading(*about, strips=2), strict=True):
        assert_close(a.astype(jnp.float64), b)
    assert set(sizes) == {20}


def test_posteriors_without_strips_are_those_of_the_other_components():
    rng = np.random.default_rng(0)
    memories, queries = rng.normal(size=(23, 7)), rng.normal(size=(3, 7))
    betas = jnp.asarray([0.5, 2.0])
    center, query_center = memories.mean(0), queries.mean(0)
    similarity = uhop.Cosine(
        uhop.Centering(jnp.asarray(center), jnp.asarray(query_center))
    )
    about = similarity, jnp.asarray(memories), jnp.asarray(queries), None, betas
    leading = leading_by_similarity(*about, strips=3)
    strip = np.arange(7) // 3
    for f in range(3):
        kept = strip != f
        a, b = (memories - center)[:, kept], (queries - query_center)[:, kept]
        norms = np.linalg.norm(a, axis=1)[None] * np.linalg.norm(b, axis=1)[:, None]
        expected = b @ a.T / norms
        order = np.argsort(-expected, axis=1)[:, :16]
        assert_close(leading.logits[f], np.take_along_axis(expected, order, 1))
        assert (np.asarray(leading.places[f]) == order).all()
        assert_close(leading.total[f, :, 1], np.log(np.exp(2 * expected).sum(1)))
    parts = leading_by_similarity(*about, strips=3, size=10)
    for a, b in zip(leading, parts, strict=True):
        assert_close(a.astype(jnp.float64), b)


def test_twenty_queries_under_much_noise(digits):
    """Smooth tables tell the memory where free ones, of 4,225 entries, cannot."""
    enlarged = jnp.repeat(jnp.repeat(digits.reshape(-1, 8, 8), 3, 1), 3, 2)
    memories, target = enlarged.reshape(60, -1), np.arange(20) * 3
    errors, best = [], []
    for key in range(2):
        query = FoldedNoise(0.8)(jax.random.key(key), memories[target])
        calibration = uhop.calibrate_blind(memories, query)
        errors.append(error(calibration.model, memories, query, target))
        fixed = fixed_similarities(memories, query).values()
        about = memories, query, target
        best.append([_best(*about, similarity)["error"] for similarity in fixed])
    # 3.9 beside 6.0; free tables alone had 7.9.
    assert np.mean(errors) < np.mean(best, 0).min()


@pytest.mark.parametrize("number", [2, 3, 5, 20, 300])
def test_no_query_is_left_out(digits, number):
    """A query that is not judged may be the one that a similarity gets wrong."""
    query, _ = queries_of(digits, uhop.Noise(0.4), number)
    used, observed = _used(digits, query, query > 0.1)
    np.testing.assert_array_equal(used, query)
    np.testing.assert_array_equal(observed, query > 0.1)
    problem = Problem.of(digits, query, None)
    assert fixed_trial(problem, uhop.Cosine()).scores.shape[0] == number


@pytest.mark.slow
def test_parts_of_unlike_size_are_put_together(digits):
    query, _ = queries_of(digits, uhop.Noise(0.4), 20)
    problem = Problem.of(digits, query, None)
    start = fixed_trial(problem, uhop.Cosine()).counts
    scores = learned_trial(problem, start).each
    assert scores.shape == (20,)
    order = np.r_[3:20, 2, 0, 1]  # each query stays in its part
    other = Problem.of(digits, query[order], None)
    assert_close(learned_trial(other, start).each, scores[order], floor=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": jnp.zeros((3, 5))}, "memories have dimension 4, queries 5"),
        ({"queries": jnp.ones((3, 4))}, "queries must differ: all are equal"),
        ({"memories": jnp.ones((3, 4))}, "memories must differ: all are equal"),
        ({"queries": jnp.eye(4)[:1]}, r"needs queries of shape \(Q, d\), at least 2"),
        ({"queries": jnp.eye(4) * jnp.nan}, "queries must be finite, got 16 NaN"),
        ({"candidates": {}}, "candidates must name at least one"),
        ({"candidates": {LEARNED: uhop.Dot()}}, "must not be named"),
        ({"transformations": abs}, "transformations must be Transformations"),
        (
            {"transformations": Occlusions(1, 1, (2, 3, 1))},
            r"images of shape \(2, 3, 1\) have dimension 6, patterns have 4",
        ),
    ],
    ids=str,
)
def test_bad_input_is_refused(untyped, changes, message):
    arguments = {"memories": jnp.eye(4), "queries": jnp.eye(4)} | changes
    with pytest.raises(ValueError, match=message):
        uhop.calibrate_blind(
            arguments.pop("memories"), arguments.pop("queries"), **arguments
        )


def test_it_runs_on_the_host_alone():
    with pytest.raises(ValueError, match="calibrate_blind"):
        jax.jit(uhop.calibrate_blind)(jnp.eye(4), jnp.eye(4))
