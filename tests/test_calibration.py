"""Calibration: choices of kernel, separation and beta, expected errors, wrong input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from uhop_jax import (
    Centering,
    Cosine,
    Dot,
    Entmax,
    LikelihoodKernel,
    LinearKernel,
    Mask,
    Model,
    NegativeL1,
    NegativeL2,
    NegativeSquaredL2,
    Noise,
    Softmax,
    Softmax1,
    Sparsemax,
    calibrate,
    fit_sgd,
    load,
    posterior_mean,
    retrieve,
    save,
)
from uhop_jax.calibration import FINALISTS, NEGLIGIBLE, screened
from uhop_jax.candidates import default_candidates, two_sided_centering
from uhop_jax.data import images
from uhop_jax.experiments.kinds import FoldedNoise
from uhop_jax.trials import beta_grid, corrupted_copies, sweep_errors

KEY = jax.random.key(0)
MEMORIES = jnp.asarray(images("digits").patterns[:64])
SPREAD = float(MEMORIES.var(0).sum())
FIXED = {
    "cosine": Cosine(),
    "dot": Dot(),
    "squared l2": NegativeSquaredL2(),
    "l2": NegativeL2(),
    "l1": NegativeL1(),
}


def lower_half(key, patterns):
    """Hides the lower half of the images, and adds a little noise."""
    noise = 0.1 * jax.random.normal(key, patterns.shape, patterns.dtype)
    return (patterns + noise).at[..., 32:].set(0.0)


CORRUPTIONS = {
    "mask": Mask(0.8),
    "noise": Noise(0.6),
    "known": Mask(0.9, known=True),
    "function": lower_half,
}


def one_fast(names):
    """Cases of which all but the first are marked slow."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(scope="module", params=one_fast(CORRUPTIONS))
def calibrated(request):
    """A corruption, the model calibrated for it, and fresh corrupted copies."""
    corrupt = CORRUPTIONS[request.param]
    copies = corrupted_copies(jax.random.key(99), MEMORIES, corrupt, 1024)
    return corrupt, calibrate(KEY, MEMORIES, corrupt, queries=256), copies


def errors_of(state, target):
    return np.asarray(((state - MEMORIES[target]) ** 2).sum(-1))


def errors_and_top1(model, copies):
    query, observed, target = copies
    result = retrieve(model.model, MEMORIES, query, observed=observed)
    return errors_of(result.state, target), result.weights.argmax(-1) == target


def index_of(model):
    """Index of the chosen model in its trials: candidate, separation, beta."""
    candidate = model.names.index(model.name)
    beta = np.flatnonzero(np.asarray(model.betas[candidate]) == float(model.model.beta))
    return candidate, model.separations.index(repr(model.model.separation)), beta[0]


def test_the_chosen_model_has_the_least_error_of_all_trials(calibrated):
    _, model, _ = calibrated
    assert model.trials[index_of(model)] <= np.nanmin(model.trials) + 1.01e-6 * SPREAD
    assert model.trials.shape == (len(model.names), 3, model.betas.shape[1])


def test_among_equal_trials_the_first_and_the_middle_beta_are_chosen(calibrated):
    _, model, _ = calibrated
    equal = np.asarray(model.trials) <= np.nanmin(model.trials) + 1e-6 * SPREAD
    candidate, separation, _ = index_of(model)
    assert candidate == np.flatnonzero(equal.any((1, 2)))[0]
    assert separation == np.flatnonzero(equal[candidate].any(-1))[0]
    tied = np.sort(model.betas[candidate][equal[candidate, separation]])
    assert float(model.model.beta) == tied[len(tied) // 2]


def test_all_separations_are_tried_on_the_finalists_alone(calibrated):
    _, model, _ = calibrated
    assert model.screening.shape == model.betas.shape
    best = np.maximum(np.asarray(model.screening).min(-1), 1e-6 * SPREAD)
    finalists = set(np.argsort(best, kind="stable")[:FINALISTS])
    tried = np.isfinite(np.asarray(model.trials))
    assert set(np.flatnonzero(tried.all((1, 2)))) == finalists
    assert set(np.flatnonzero(tried.any((1, 2)))) == finalists


def test_no_fixed_similarity_is_clearly_better_on_fresh_copies(calibrated):
    _, model, copies = calibrated
    query, observed, target = copies
    errors, _ = errors_and_top1(model, copies)
    for name, similarity in FIXED.items():
        index = model.names.index(name)
        tried = model.trials[index, 0]
        if np.isnan(tried).all():
            tried = model.screening[index]
        beta = model.betas[index, int(jnp.argmin(tried))]
        state = retrieve(
            Model(similarity, beta=beta), MEMORIES, query, observed=observed
        ).state
        loss = errors - errors_of(state, target)
        slack = 3 * loss.std() / loss.size**0.5
        assert loss.mean() <= slack + 0.01 * errors.mean() + 1e-6 * SPREAD, name


def test_the_expected_error_is_the_error_of_fresh_copies(calibrated):
    _, model, copies = calibrated
    errors, right = errors_and_top1(model, copies)
    own = errors.std() / errors.size**0.5
    slack = 3 * np.hypot(own, float(model.standard_error)) + 1e-6 * SPREAD
    assert abs(errors.mean() - float(model.expected_error)) <= slack + (
        0.1 * errors.mean()
    )
    assert abs(right.mean() - float(model.expected_top1)) <= 0.05
    assert 0 <= model.standard_error <= 0.05 * model.expected_error + 1e-3 * SPREAD


@pytest.mark.slow  # calibrates twice more
def test_the_same_key_gives_the_same_numbers(calibrated):
    corrupt, model, _ = calibrated
    again = calibrate(KEY, MEMORIES, corrupt, queries=256)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)
    other = calibrate(jax.random.key(1), MEMORIES, corrupt, queries=256)
    assert (other.trials != model.trials).any()


def test_without_an_accuracy_the_choice_is_the_same_and_no_error_is_expected():
    options = {"queries": 60, "candidates": {"cosine": Cosine(), "l1": NegativeL1()}}
    full = calibrate(KEY, MEMORIES[:12], Noise(0.3), **options)
    short = calibrate(KEY, MEMORIES[:12], Noise(0.3), accuracy=None, **options)
    assert np.isfinite(full.expected_error)
    assert np.isnan(
        [short.expected_error, short.standard_error, short.expected_top1]
    ).all()
    assert (short.name, short.model) == (full.name, full.model)
    np.testing.assert_array_equal(short.trials, full.trials)


def test_a_saved_calibration_retrieves_as_before(calibrated, tmp_path):
    _, model, (query, observed, _) = calibrated
    query = query[:5]
    observed = None if observed is None else observed[:5]
    expected = retrieve(model.model, MEMORIES, query, observed=observed)
    loaded = load(save(tmp_path / "model", model))
    inside = jax.jit(
        lambda model: retrieve(model.model, MEMORIES, query, observed=observed)
    )
    assert_close(inside(loaded).state, expected.state)


def test_the_summary_names_the_chosen_model(calibrated):
    _, model, _ = calibrated
    number = r"-?\d\.?\d*(e[+-]\d+)?|\d+(\.\d+)?"
    pattern = (
        rf"{re.escape(model.name)} with (softmax|entmax|sparsemax) at beta ({number}): "
        rf"expected error ({number}) ± ({number}), top-1 ([01]\.\d\d\d)"
    )
    match = re.fullmatch(pattern, model.summary())
    assert match, model.summary()
    assert match[1] == type(model.model.separation).__name__.lower()
    assert float(match[2]) == pytest.approx(float(model.model.beta), rel=0.01)
    assert float(match[5]) == pytest.approx(float(model.expected_error), rel=0.01)


@pytest.mark.parametrize("calibrated", one_fast(["mask", "noise"]), indirect=True)
def test_calibration_comes_close_to_the_posterior_mean(calibrated):
    corrupt, model, copies = calibrated
    errors, _ = errors_and_top1(model, copies)
    query, _, target = copies
    limit = errors_of(posterior_mean(corrupt, MEMORIES, query), target).mean()
    assert limit - 0.1 <= errors.mean() <= max(1.5 * limit, limit + 0.5)
    if corrupt == Mask(0.8):
        assert isinstance(model.model.similarity.kernel, LikelihoodKernel)


def test_known_masks_try_no_kernel_that_differs_for_each_query():
    known = default_candidates(KEY, MEMORIES, Mask(0.5, known=True), ridges=(1.0,))
    unknown = default_candidates(KEY, MEMORIES, Mask(0.5), ridges=(1.0,), ranks=(2,))
    ranks = [f"likelihood, rank {rank}" for rank in (2, 8, "full")]
    assert list(known) == [*ranks[:2], *FIXED, ranks[2]]
    assert list(unknown) == [
        ranks[0],
        *FIXED,
        "centred cosine",
        "two-sided centred cosine",
        "closed form 1, angular",
        "closed form 1",
    ]
    assert unknown[ranks[0]].kernel.memory_table.shape[-1] == 2


def test_given_candidates_and_separations_are_tried_alone():
    memories = MEMORIES[:12].astype(jnp.float64)
    trained = fit_sgd(memories, relative_rate=1.0, steps=20).kernel
    candidates = {"plain": Dot(), "trained": Dot(trained), "angle": Cosine(trained)}
    separations = [Softmax(), Sparsemax()]
    model = calibrate(
        KEY,
        memories,
        Mask(0.5),
        candidates=candidates,
        separations=separations,
        queries=20,
    )
    assert model.names == ("plain", "trained", "angle")
    assert model.separations == ("Softmax()", "Sparsemax()")
    assert type(model.model.similarity) is type(candidates[model.name])
    assert model.name != "plain"
    assert model.trials.dtype == model.model.beta.dtype == jnp.float64
    # The trials are errors of plain retrievals.
    sweep_key = jax.random.split(KEY, 4)[1]
    query, _, target = corrupted_copies(sweep_key, memories, Mask(0.5), 24)
    for index in [(0, 0, 3), (1, 1, 9)]:
        state = retrieve(
            Model(
                tuple(candidates.values())[index[0]],
                separations[index[1]],
                beta=model.betas[index[0], index[2]],
            ),
            memories,
            query,
        ).state
        error = ((state - memories[target]) ** 2).sum(-1).mean()
        assert_close(model.trials[index], error)


def test_half_precision_memories_are_handled_in_float32():
    memories = MEMORIES[:12].astype(jnp.bfloat16)
    options = {"candidates": {"cosine": Cosine()}, "separations": [Softmax()]}
    model = calibrate(KEY, memories, Mask(0.3), **options)
    assert model.trials.dtype == model.expected_error.dtype == jnp.float32
    same = calibrate(KEY, memories.astype(jnp.float32), Mask(0.3), **options)
    jax.tree.map(np.testing.assert_array_equal, model, same)


@pytest.mark.parametrize("number", [3, 12, 30])
def test_all_memories_are_copied_equally_often(number):
    memories = MEMORIES[:12]
    query, observed, target = corrupted_copies(KEY, memories, Mask(0.0), number)
    assert observed is None
    np.testing.assert_array_equal(query, memories[target])
    counts = np.bincount(target, minlength=12)
    assert counts.sum() == number
    assert np.ptp(counts) <= 1


@pytest.mark.parametrize("count", [9, 80])  # fewer than the dimension, and more
@pytest.mark.parametrize("separation", [Softmax(), Softmax1()], ids=repr)
def test_sweep_errors_equal_the_errors_of_retrieval(count, separation):
    memories, target = MEMORIES[:count] + 3, jnp.asarray([0, 4, 8])
    query, betas = memories[target] + 0.1, jnp.asarray([0.1, 2.0, 30.0], jnp.float32)
    overlaps = Cosine()(memories, query)
    errors = sweep_errors(memories, overlaps, target, separation.tempered, betas)
    options = {"separation": separation, "similarity": Cosine()}
    for error, beta in zip(errors, betas, strict=True):
        state = retrieve(Model(beta=beta, **options), memories, query).state
        expected = ((state - memories[target]) ** 2).sum(-1).mean()
        assert_close(error, expected, scale=10)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_betas_follow_the_scale_of_the_overlaps(scale):
    overlaps = scale * jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)))
    betas = beta_grid(overlaps, (0.1, 1000.0, 5))
    assert betas[0] == 1
    spread = np.asarray(overlaps).std(-1).mean()
    assert_close(betas[1:] * spread, [0.1, 1.0, 10.0, 100.0, 1000.0])
    assert np.isfinite(beta_grid(0 * overlaps)).all()


def unobserved_nan(key, patterns):
    seen = jax.random.bernoulli(key, 0.5, patterns.shape)
    return jnp.where(seen, patterns, jnp.nan), seen


def test_unobserved_components_may_hold_nan():
    options = {"candidates": {"cosine": Cosine()}, "separations": [Softmax()]}
    model = calibrate(KEY, MEMORIES[:12], unobserved_nan, **options)
    assert np.isfinite(model.trials).all()
    assert np.isfinite(model.expected_error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memories": MEMORIES[:1]}, r"at least two memories.*got \(1, 64\)"),
        ({"memories": MEMORIES[None]}, r"shape \(M, d\), got \(1, 64, 64\)"),
        (
            {"memories": MEMORIES.at[1, 2].set(jnp.nan)},
            "memories must be finite, got 1",
        ),
        ({"corrupt": 0.5}, "corrupt must be a function.*got 0.5"),
        (
            {"corrupt": lambda key, x: x[:, :3]},
            r"keep the shape .*\d+, 64\), it ret.* 3",
        ),
        ({"corrupt": lambda key, x: x * jnp.nan}, "corrupted patterns must be finite"),
        (
            {"corrupt": lambda key, x: np.where(x > 0.5, x, 0)},
            "corrupt is compiled and must be a function of JAX arrays: use jax.numpy",
        ),
        (
            {"corrupt": lambda key, x: x if x.sum() > 0 else 0 * x},
            "corrupt is compiled",
        ),
        ({"corrupt": lambda key, x: (x, x)}, "observed must be boolean.* dtype float"),
        (
            {"corrupt": lambda key, x: (x, x[:, :3] > 0)},
            r"observed has shape \(12, 3\), which does not broadcast to \(12, 64\)",
        ),
        ({"corrupt": lambda key, x: (x, x, x)}, "a pair .*, it returned 3 values"),
        ({"corrupt": Mask(50.0)}, r"fraction must be in \[0, 1\], got 50.0"),
        ({"corrupt": Noise(-1.0)}, "scale must be at least 0, got -1"),
        ({"accuracy": 0.0}, "accuracy must be positive"),
        ({"queries": 0}, "queries must be at least 1, got 0"),
        ({"queries": 1.5}, "queries must be an integer, got 1.5"),
        ({"separations": ()}, "separations must name at least one"),
        ({"separations": ("softmax",)}, r"separations such as .*got \('softmax',\)"),
        ({"separations": Softmax()}, r"sequence of separations .*got Softmax\(\)"),
        ({"separations": (Entmax(0.5),)}, "alpha must be at least 1, got 0.5"),
        ({"candidates": {}}, "candidates must name at least one"),
        ({"candidates": {"dot": "dot"}}, "similarity must be one of Dot, .*got 'dot'"),
        ({"candidates": [Dot()]}, r"mapping of names to similarities, got \[Dot"),
        (
            {"candidates": {"dot": Dot(Centering(jnp.zeros(3)))}},
            "kernel maps dimension 3, memories have dimension 64",
        ),
        ({"memories": 0.1 * jnp.ones((3, 4))}, "memories must differ: all are equal"),
    ],
)
def test_bad_calibrations_are_refused(untyped, options, message):
    arguments = {"memories": MEMORIES[:12], "corrupt": Mask(0.5)}
    arguments |= {"candidates": {"cosine": Cosine()}} | options
    with pytest.raises(ValueError, match=message):
        calibrate(KEY, **arguments)


@pytest.mark.parametrize(
    "trace",
    [
        lambda f: jax.jit(f)(MEMORIES[:4]),
        lambda f: jax.vmap(f)(MEMORIES[None, :4]),
        lambda f: jax.jit(lambda _: f(MEMORIES[:4]))(0),
    ],
)
def test_calibration_cannot_be_traced(trace):
    with pytest.raises(ValueError, match="calibrate runs on the host and cannot be tr"):
        trace(lambda x: calibrate(KEY, x, Mask(0.5)).beta)


def test_one_observed_mask_for_all_queries_broadcasts():
    def left_half(key, patterns):
        del key
        return patterns, jnp.arange(64) < 32

    options = {"candidates": {"cosine": Cosine()}, "separations": [Softmax()]}
    model = calibrate(KEY, MEMORIES[:12], left_half, **options)
    same = calibrate(
        KEY,
        MEMORIES[:12],
        lambda key, x: (x, jnp.broadcast_to(left_half(key, x)[1], x.shape)),
        **options,
    )
    np.testing.assert_array_equal(model.trials, same.trials)


def test_ridges_and_corruptions_are_checked_before_the_sweep():
    with pytest.raises(ValueError, match="ridges must be positive and finite, got -1"):
        default_candidates(KEY, MEMORIES[:12], Mask(0.5), ridges=(-1.0,))


def test_candidates_that_tie_are_compared_on_more_copies():
    # Of six components all are masked once in 64 times, of 40 never.
    memories = jnp.asarray([[1.0], [-1.0]]) * jnp.ones((1, 40))
    candidates = {"six": Dot(LinearKernel(jnp.eye(6, 40))), "all": Dot()}
    names = []
    for seed in range(12):
        model = calibrate(
            jax.random.key(seed),
            memories,
            Mask(0.5),
            queries=32,
            accuracy=None,
            candidates=candidates,
        )
        least = np.nanmin(model.trials, axis=(1, 2))
        if least[0] <= least[1] + NEGLIGIBLE * float(memories.var(0).sum()):
            names.append(model.name)
    assert len(names) >= 4
    assert names.count("all") > len(names) / 2


KEYS_USED = []


class Recorder(Mask):
    """A mask that notes each key with which it is called."""

    def __call__(self, key, patterns):
        jax.debug.callback(
            lambda data: KEYS_USED.append(tuple(data.tolist())),
            jax.random.key_data(key),
        )
        return super().__call__(key, patterns)


def keys_used(call):
    KEYS_USED.clear()
    result = jax.block_until_ready(call())
    jax.effects_barrier()
    return result, list(KEYS_USED)


@pytest.mark.parametrize("memories", [2, 4, 100, 500])
def test_copies_of_all_memories_are_screened(memories):
    target = np.arange(-(-1000 // memories) * memories) % memories
    chosen = screened(len(target), memories)
    counts = np.bincount(target[chosen], minlength=memories)
    assert len(chosen) == len(set(chosen)) == 256
    assert counts.max() - counts.min() <= 1


@pytest.mark.few(2)
@pytest.mark.parametrize("ties", [1, 2, 3, 4, 5])
def test_copies_for_different_purposes_have_different_keys(ties):
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, 40))
    memories = jnp.asarray(signs)
    plain = (NegativeSquaredL2(), NegativeL2(), NegativeL1(), Dot(), Cosine())
    candidates = {str(i): plain[i] for i in range(ties)}
    model, keys = keys_used(
        lambda: calibrate(
            KEY, memories, Recorder(0.05), candidates=candidates, queries=16
        )
    )
    least = np.nanmin(model.trials, axis=(1, 2))
    assert (least <= NEGLIGIBLE * float(memories.var(0).sum())).all()
    assert len(keys) >= 3
    assert len(set(keys)) == len(keys)


def test_default_candidates_learn_from_their_own_copies(monkeypatch):
    copies = 16  # of each memory in `fit_likelihood`, in place of thousands
    monkeypatch.setattr("uhop_jax.likelihood._VALUES", copies * MEMORIES[:8].size)
    _, keys = keys_used(
        lambda: default_candidates(
            KEY, MEMORIES[:8], Recorder(0.5), ridges=(1.0,), ranks=(2,)
        )
    )
    assert len(keys) > copies
    assert len(set(keys)) == len(keys)


def test_two_sided_centring_is_about_the_means_of_memories_and_of_copies():
    centering = two_sided_centering(KEY, MEMORIES, Noise(0.0))
    np.testing.assert_allclose(centering.center, MEMORIES.mean(0))
    np.testing.assert_allclose(centering.query_center, MEMORIES.mean(0), atol=1e-6)
    half = two_sided_centering(KEY, MEMORIES, Mask(0.5))
    assert 0.45 < half.query_center.sum() / half.center.sum() < 0.55
    known = two_sided_centering(KEY, MEMORIES, Mask(0.5, known=True))
    assert 0.95 < known.query_center.sum() / known.center.sum() < 1.05


def test_two_sided_centring_beats_every_fixed_similarity_under_folded_noise():
    query, _, target = corrupted_copies(KEY, MEMORIES, FoldedNoise(0.5), 512)
    two_sided = two_sided_centering(jax.random.key(1), MEMORIES, FoldedNoise(0.5))
    others = [Cosine(Centering(two_sided.center)), *FIXED.values()]
    least = []
    for similarity in (Cosine(two_sided), *others):
        z = similarity(MEMORIES, query)
        weights, betas = Softmax().tempered, beta_grid(z)
        least.append(sweep_errors(MEMORIES, z, target, weights, betas).min())
    assert least[0] < 0.9 * min(least[1:])


@pytest.mark.parametrize("accuracy", [0.5, None])
def test_calibration_under_debug_nans(accuracy):
    memories = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (12, 6)))
    options = {"queries": 24, "accuracy": accuracy}
    similarities = (Dot(), Cosine(), NegativeL1(), NegativeL2(), NegativeSquaredL2())
    options["candidates"] = {type(s).__name__: s for s in similarities} | {
        "other": Cosine(Centering(memories.mean(0)))
    }
    expected = calibrate(jax.random.key(1), memories, Mask(0.5), **options)
    with jax.debug_nans(True):
        model = calibrate(jax.random.key(1), memories, Mask(0.5), **options)
    jax.tree.map(np.testing.assert_array_equal, model, expected)
    assert np.isnan(model.trials).any()
