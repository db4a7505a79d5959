"""Each statement of the paper as corrected, and counterexamples to printed ones."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

import uhop_jax as uj
from uhop_jax import Model, theory
from uhop_jax.theory._geometry import image_of
from uhop_jax.theory.storing import _sample_ball


def name(x):
    kernel = getattr(x, "kernel", uj.Identity())
    plain = isinstance(kernel, uj.Identity)
    return repr(x) if plain else f"{type(x).__name__}({type(kernel).__name__})"


def gaussian(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


BALL_SIMILARITIES = [
    uj.Dot(),
    uj.Dot(uj.LinearKernel(gaussian(1, 9, 6))),
    uj.Cosine(),
    uj.NegativeSquaredL2(),
]


def norm(x):
    return np.linalg.norm(np.asarray(x), axis=-1)


def features(x, similarity):
    """Features compared by the similarity, written out."""
    kernel = similarity.kernel
    if not isinstance(kernel, uj.Identity):
        x = x @ np.asarray(kernel.weights).T
    if isinstance(similarity, uj.Cosine):
        x = x / norm(x)[..., None]
    return x


def ball(seed, memories, similarity, distance, samples=64):
    """Patterns `(M, samples, d)` whose features lie at `distance` from a memory's.

    Half of the patterns lie towards another memory. Bisection finds the distance, for
    every feature map.
    """
    rng, memories = np.random.default_rng(seed), np.asarray(memories)
    count = len(memories)
    other = np.arange(count)[:, None] + rng.integers(1, count, (count, samples))
    other = other % count
    away = memories[other] - memories[:, None]
    away[:, samples // 2 :] = rng.normal(size=away[:, samples // 2 :].shape)
    centre = features(memories, similarity)[:, None]
    low, high = np.zeros((count, samples, 1)), np.full((count, samples, 1), 10.0)
    for _ in range(60):
        middle = (low + high) / 2
        x = features(memories[:, None] + middle * away, similarity)
        inside = (norm(x - centre) <= distance)[..., None]
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return jnp.asarray(memories[:, None] + low * away)


def iterate(memories, x, beta, steps):
    """Updates of `Dot` and `Softmax`, without compiling."""
    for _ in range(steps):
        z = beta * x @ memories.T
        p = np.exp(z - z.max(-1, keepdims=True))
        x = p / p.sum(-1, keepdims=True) @ memories
    return x


def likelihood_kernel():
    edges = jnp.array([-1.0, 0.0, 1.0])
    table = gaussian(4, 4, 2)
    return uj.LikelihoodKernel(table, table, edges, pattern_dimension=6)


# -- [lemma:retrieval_dyn], [lemma:convergence], [lem:help-conv] -----------------------


@pytest.mark.parametrize("rank", [3, 6])
def test_retrieval_dynamics_never_raise_the_energy(rank):
    # The theorem assumes a full-rank W, and alpha in [1, 2]; it needs neither.
    alphas = jnp.array([1.0, 1.2, 1.5, 2.0, 3.0])
    projection = jnp.eye(rank, 6)
    for seed in range(10):
        weights = gaussian(seed + 300, 9, rank) @ projection
        result = uj.trajectory(
            uj.Model(
                uj.Dot(uj.LinearKernel(weights)),
                uj.Entmax(alphas),
                beta=jnp.exp(gaussian(seed + 200, 8, 5)),
            ),
            gaussian(seed, 7, 6),
            jnp.broadcast_to(2 * gaussian(seed + 100, 8, 1, 6), (8, 5, 6)),
            steps=6,
        )
        scale = jnp.abs(result.energies).max()
        assert jnp.diff(result.energies).max() <= 1e-12 * scale


def test_limit_points_are_stationary_points_of_the_energy():
    memories = gaussian(0, 7, 6)
    separation = uj.Entmax(jnp.repeat(jnp.array([1.0, 1.5, 2.0]), 7))
    kernel = uj.LinearKernel(gaussian(1, 9, 6))
    model = uj.Model(uj.Dot(kernel), separation, beta=0.3)
    limit = uj.converge(model, memories, gaussian(2, 21, 6), max_steps=5000)
    assert limit.converged.all()
    slope = jax.grad(lambda x: uj.energy(model, memories, x).sum())(limit.pattern)
    assert_close(slope, jnp.zeros_like(slope))
    assert_close(uj.retrieve(model, memories, limit.pattern).state, limit.pattern)


def test_a_limit_point_need_not_be_a_local_minimum():
    # The proof of [lemma:convergence] ends with "converge to local minimum".
    memories = jnp.array([[1.0, 0.0], [-1.0, 0.0]])
    limit = uj.retrieve(uj.Model(beta=3.0), memories, jnp.array([0.0, 1.0])).state
    assert (limit == 0).all()
    assert (uj.retrieve(uj.Model(beta=3.0), memories, limit).state == limit).all()
    aside = limit + jnp.array([0.1, 0.0])
    energy = uj.energy(uj.Model(beta=3.0), memories, jnp.stack([limit, aside]))
    assert energy[1] < energy[0] - 1e-3


# memories, query, beta, mu; from a random search over four patterns of the plane, which
# finds a counterexample for one stored memory in twenty.
NAIVE = (
    [[-0.595, 0.804], [0.546, 0.838], [-1.0, -0.024], [-0.554, -0.832]],
    [-0.9297, 0.1662],
    3.191,
    2,
)


def test_naive_bound_of_the_retrieval_error_is_false():
    # [sec:exact_retrieval] ||T(x) - xi|| <= max(||x - xi||, ||x* - xi||).
    memories, query, beta, mu = (np.array(x) for x in NAIVE)
    radius = float(theory.radius(jnp.asarray(memories)))
    angle, share = np.random.default_rng(0).random((2, 2000))
    share = radius * np.sqrt(share)[:, None]
    angle = 2 * np.pi * angle
    around = memories[mu] + share * np.stack([np.cos(angle), np.sin(angle)], 1)
    limit = iterate(memories, np.stack([memories[mu], query, *around]), beta, 500)
    assert norm(query - memories[mu]) < radius
    assert (norm(limit - limit[0]) < 1e-9).all()  # stored: one fixed point,
    assert norm(limit[0] - memories[mu]) < radius  # in the ball
    error = norm(iterate(memories, query, beta, 1) - memories[mu])
    claimed = norm(np.stack([query, limit[0]]) - memories[mu]).max()
    assert error > 1.1 * claimed


# -- [eqn:error_bound_exp] -------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("similarity", BALL_SIMILARITIES, ids=name)
def test_error_bounds_hold_in_the_ball_and_follow_from_one_another(similarity):
    for seed, beta in itertools.product(range(3), [0.3, 3.0, 30.0]):
        memories = gaussian(seed, 5, 6) * jnp.linspace(0.5, 2.0, 5)[:, None]
        model = {"beta": beta, "similarity": similarity}
        radius = theory.radius(memories, similarity=similarity)
        query = ball(seed, memories, similarity, radius)
        state, weights = uj.retrieve(uj.Model(**model), memories, query)
        error = norm(state - memories[:, None])
        own = theory.weight_error_bound(memories, weights)
        own = jnp.diagonal(own, axis1=0, axis2=2).T
        in_ball = theory.error_bound(memories, distance=radius, **model)
        paper = theory.error_bound(memories, **model)
        slack = 1 + 1e-9
        assert (error <= own * slack + 1e-14).all()
        assert (own <= in_ball[:, None] * slack + 1e-14).all()
        assert (in_ball <= paper * slack).all()


def test_the_error_bound_of_the_paper_is_vacuous_for_the_closest_memories():
    for seed in range(20):
        memories = gaussian(seed, 5, 3)
        m = norm(memories).max()
        gaps = norm(memories[:, None] - memories[None]) + np.diag([np.inf] * 5)
        bound = np.asarray(theory.error_bound(memories, beta=2.0))
        assert (bound[np.argwhere(gaps == gaps.min())] >= 8 * m).all()
    informative = jnp.array([[4.0, 0.0], [0.0, 0.1], [0.0, -0.1]])
    assert theory.error_bound(informative, beta=2.0)[0] < 1e-6


@pytest.mark.parametrize(
    "separation", [uj.Softmax1(), uj.Sparsemax(), uj.Polynomial(3)], ids=name
)
def test_weight_error_bound_holds_for_every_separation(separation):
    memories, query = gaussian(0, 5, 6), gaussian(1, 50, 6)
    weights = separation(2.0 * query @ memories.T)
    error = norm(np.asarray(weights @ memories)[:, None] - np.asarray(memories))
    assert (error <= theory.weight_error_bound(memories, weights) + 1e-12).all()


@pytest.mark.parametrize("similarity", BALL_SIMILARITIES, ids=name)
def test_pattern_separation_is_the_smallest_lead_in_the_ball(similarity):
    memories, distance = gaussian(3, 5, 6), 0.2
    query = ball(0, memories, similarity, distance)
    overlaps = similarity(memories, query)
    own = jnp.diagonal(overlaps, axis1=0, axis2=2).T
    others = jnp.where(jnp.eye(5, dtype=bool)[:, None], -jnp.inf, overlaps).max(-1)
    seen = (own - others).min(-1)
    claimed = theory.pattern_separation(
        memories, similarity=similarity, distance=distance
    )
    assert (claimed <= seen + 1e-12).all()
    if not isinstance(similarity, uj.Cosine):  # a chord stays off the sphere
        assert_close(claimed, seen, floor=1e-8)


def test_pattern_separation_at_the_memories_equals_the_definition():
    memories = gaussian(0, 5, 6)
    gram = np.asarray(memories @ memories.T)
    naive = [gram[i, i] - np.delete(gram[i], i).max() for i in range(5)]
    assert_close(theory.pattern_separation(memories), naive)
    traced = jax.jit(lambda r: theory.pattern_separation(memories, distance=r))
    assert_close(traced(0.0), naive)
    assert jnp.isnan(traced(-1.0)).all()
    difference = np.asarray(memories)[:, None] - np.asarray(memories)[None]
    lengths = norm(difference)[np.triu_indices(5, 1)]
    assert_close(theory.radius(memories), lengths.min() / 2)
    manhattan = theory.pattern_separation(memories, similarity=uj.NegativeL1())
    naive = np.abs(difference).sum(-1) + np.diag([np.inf] * 5)
    assert_close(manhattan, naive.min(1))


def test_well_separated_memories_retrieve_their_balls():
    certified = 0
    for seed, beta in itertools.product(range(4), [2.0, 4.0, 8.0, 16.0]):
        memories = gaussian(seed, 5, 6)
        distance = 0.4 * theory.radius(memories)
        good = theory.well_separated(memories, beta=beta, distance=distance)
        certified += int(good.sum())
        patterns = np.asarray(memories)
        query = np.asarray(ball(seed, memories, uj.Dot(), distance))
        once = iterate(patterns, query, beta, 1)
        limit = iterate(patterns, query, beta, 500)
        inside = norm(once - patterns[:, None]) <= distance
        common = norm(limit - limit[:, :1]).max(1) <= 1e-9
        assert (inside.all(-1) | ~good).all() and (common | ~good).all()
        q = 4 * jnp.exp(-beta * theory.pattern_separation(memories, distance=distance))
        spread = jnp.linalg.norm(memories[:, None] - memories[None], axis=-1).max(-1)
        off = norm(limit[:, 0] - patterns)
        assert ((off <= spread * q) | ~good).all()
    assert 20 < certified < 80


def test_the_well_separation_of_the_literature_does_not_keep_the_ball():
    # Delta_min >= log(2 (M - 1)/R)/beta, on a simplex of 100 unit features.
    memories = unit(jnp.eye(100) - 0.01)
    delta, radius = theory.pattern_separation(memories).min(), theory.radius(memories)
    beta = 1.01 * math.log(2 * 99 / float(radius)) / float(delta)
    patterns = np.asarray(memories)
    assert norm(iterate(patterns, patterns, beta, 1) - patterns).max() <= radius
    edge = 0.51 * patterns[0] + 0.49 * patterns[1]
    assert norm(edge - patterns[0]) < radius
    assert norm(iterate(patterns, edge, beta, 1) - patterns[0]) > 1.2 * radius
    for beta in [1.0, 100.0, 1e6]:
        whole = theory.well_separated(memories, beta=beta, distance=radius)
        assert not whole.any()


# -- [thm:exact], [coro:exact_coro] ----------------------------------------------------


@pytest.mark.few(12)
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("similarity", BALL_SIMILARITIES, ids=name)
@pytest.mark.parametrize("share", [0.0, 0.3], ids=["memory", "ball"])
def test_exact_retrieval_if_and_only_if_the_slack_is_not_negative(
    alpha, similarity, share
):
    memories = gaussian(8, 5, 6)
    distance = share * float(theory.radius(memories, similarity=similarity))
    where = {"similarity": similarity, "distance": distance}
    lead = np.asarray(theory.pattern_separation(memories, **where))
    tried = 0
    for mu in np.flatnonzero(lead > 0):  # the others: at no beta
        query = ball(mu, memories, similarity, distance)[mu]
        for factor in (1 - 1e-6, 1 + 1e-6):
            model = {
                "beta": float(factor / ((alpha - 1) * lead[mu])),
                "separation": uj.Entmax(alpha),
            }
            slack = theory.exact_retrieval_slack(
                Model(similarity, **model), memories, distance=distance
            )
            assert (slack[int(mu)] >= 0) == (factor > 1)
            state, weights = uj.retrieve(
                uj.Model(similarity=similarity, **model), memories, query
            )
            exact = (np.delete(np.asarray(weights), mu, axis=1) == 0).all()
            if factor > 1:
                assert exact
                assert norm(state - memories[mu][None]).max() < 1e-12
            elif share == 0 or not isinstance(similarity, uj.Cosine):
                assert not exact
            tried += 1
    assert tried >= 4


def test_exact_retrieval_on_the_sphere_and_the_inequalities_of_the_paper():
    t, alpha = 1.7, 1.5
    memories, beta = unit(gaussian(1, 5, 6)), 4.0
    rbf = theory.log_rbf(memories, memories, t=t)
    largest = jnp.where(jnp.eye(5, dtype=bool), -jnp.inf, rbf).max(-1)
    bound = 2 * t / (beta * (alpha - 1))
    slack = theory.exact_retrieval_slack(
        Model(separation=uj.Entmax(alpha), beta=beta), memories
    )
    assert ((largest <= -bound) == (slack >= 0)).all()
    assert 0 < (slack >= 0).sum() < 5
    # [prop:eq1] as printed holds for none, exactly retrieved or not,
    assert not (jnp.diagonal(rbf) - largest <= -bound).any()
    # and [eqn:exact-condition-1], at the end of its proof, for all.
    assert (largest <= bound).all()


def test_rbf_is_the_inner_product_on_the_sphere():
    # [eqn:L_normalize]; off the sphere the proof's K = ell/(2t) is out by more.
    memories, query, kernel = gaussian(0, 5, 6), gaussian(1, 4, 6), gaussian(2, 9, 6)
    similarity = uj.Cosine(uj.LinearKernel(kernel))
    rbf = theory.log_rbf(memories, query, t=1.3, similarity=similarity)
    assert_close(rbf, 2 * 1.3 * similarity(memories, query) - 2 * 1.3)
    # With ell := 2tK - 2t, K bilinear, the sum beneath it in the paper has mu for nu.
    ell = lambda u, v: 2 * 1.3 * float(u @ v) - 2 * 1.3  # noqa: E731
    xi, r = memories[0], query[0]
    assert math.isclose(ell(xi + r, xi), ell(xi, xi) + ell(r, xi) + 2 * 1.3)


def test_a_mixture_of_memories_is_a_fixed_point_without_one_hot_weights():
    memories = jnp.array([[-1.0], [0.0], [1.0]])
    model = {"beta": 1.0, "separation": uj.Entmax(1.5)}
    assert theory.exact_retrieval_slack(Model(**model), memories)[1] < 0
    assert uj.retrieve(uj.Model(**model), memories, memories[1]).state == 0


def test_softmax_is_never_exact():
    memories = unit(gaussian(0, 5, 6))
    for beta in (0.1, 1.0, 10.0, 40.0):
        weights = uj.retrieve(uj.Model(beta=beta), memories, memories).weights
        assert (weights > 0).all()  # the largest rounds to one
    for separation in (uj.Softmax(), uj.Softmax1(), uj.Entmax(1.0), uj.TopK(2)):
        slack = theory.exact_retrieval_slack(
            Model(separation=separation, beta=10.0), memories
        )
        assert (slack == -jnp.inf).all()


def equal_feature_norms(seed, count=5, d=6):
    """Patterns whose features under a random kernel are on the unit sphere."""
    kernel = gaussian(seed, 9, d)
    q, r = jnp.linalg.qr(kernel)
    sphere = unit(gaussian(seed + 50, count, d))
    return jnp.linalg.solve(r, sphere.T).T, uj.LinearKernel(kernel)


def closest(memories):
    return 2 * theory.radius(memories)


def slack_at(model, beta, memories):
    return theory.exact_retrieval_slack(dataclasses.replace(model, beta=beta), memories)


def test_sufficient_and_necessary_distances_for_exact_retrieval():
    separation, lost = uj.Entmax(1.5), 0
    for seed in range(10):
        memories, kernel = equal_feature_norms(seed)
        model = Model(uj.Dot(kernel), separation, beta=1.0)
        one = theory.exact_retrieval_distance(model)
        values = np.linalg.svd(np.asarray(kernel.weights), compute_uv=False)
        assert_close(one.sufficient, math.sqrt(4) / values[-1])
        assert_close(one.necessary, math.sqrt(4) / values[0])
        # At this beta the memories are just far enough apart.
        beta = float((one.sufficient / closest(memories)) ** 2) * (1 + 1e-9)
        slack = theory.exact_retrieval_slack(
            dataclasses.replace(model, beta=beta), memories
        )
        assert (slack >= 0).all()
        # With the upper Lipschitz constant, the paper's, not: it is necessary only.
        beta = float((one.necessary / closest(memories)) ** 2) * (1 + 1e-9)
        lost += int(
            (
                theory.exact_retrieval_slack(
                    dataclasses.replace(model, beta=beta), memories
                )
                < 0
            ).any()
        )
        slack = theory.exact_retrieval_slack(
            dataclasses.replace(model, beta=0.99 * beta), memories
        )
        assert (slack < 0).any()
    assert lost == 10


def test_distance_needs_only_that_no_other_feature_norm_is_larger():
    separation = uj.Sparsemax()
    for seed in range(20):
        memories = gaussian(seed, 5, 6)
        need = theory.exact_retrieval_distance(Model(uj.Dot(), separation, beta=1.0))
        memories = memories * 1.0001 * need.sufficient / closest(memories)
        slack = theory.exact_retrieval_slack(
            Model(separation=separation, beta=1.0), memories
        )
        norms = jnp.linalg.norm(memories, axis=-1)
        assert slack[jnp.argmax(norms)] >= 0
        # The necessary one, for the memory of the smallest norm, by contraposition.
        memories = memories * 0.999 * need.necessary / closest(memories)
        slack = theory.exact_retrieval_slack(
            Model(separation=separation, beta=1.0), memories
        )
        gaps = jnp.linalg.norm(memories[:, None] - memories[None], axis=-1)
        near = jnp.where(jnp.eye(5, dtype=bool), jnp.inf, gaps).min(-1)
        small = jnp.argmin(norms)
        assert slack[small] < 0 or near[small] >= need.necessary
    # Otherwise no distance is enough.
    far = jnp.array([[0.0, 0.0], [1e6, 0.0]])
    assert (
        theory.exact_retrieval_slack(Model(separation=separation, beta=1.0), far)[0] < 0
    )


def test_a_kernel_that_forgets_a_direction_has_no_sufficient_distance():
    for weights in (gaussian(0, 4, 6), jnp.ones((9, 6))):
        distance = theory.exact_retrieval_distance(
            Model(uj.Dot(uj.LinearKernel(weights)), uj.Sparsemax(), beta=1.0)
        )
        assert distance.sufficient == jnp.inf and jnp.isfinite(distance.necessary)
    centred = theory.exact_retrieval_distance(
        Model(uj.Dot(uj.Centering(jnp.ones(6))), uj.Sparsemax(), beta=2.0)
    )
    assert centred.sufficient == centred.necessary == 1.0


# -- [def:stored_and_retrieved] --------------------------------------------------------

EXAMPLES = {
    # name: patterns (6, 6), beta, which of them are stored
    "orthogonal": (jnp.eye(6), 50.0, [True] * 6),
    "one fixed point": (jnp.eye(6), 0.01, [False] * 6),
    "duplicates": (jnp.eye(6)[jnp.array([0, 1, 2, 3, 4, 0])], 50.0, [False] * 6),
    # The shorter of the closest pair: 0 is nearer to all, by overlap, than itself.
    "short": (jnp.eye(6).at[0, 0].set(0.1), 50.0, [False] + [True] * 5),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_stored_where_the_answer_is_known(case):
    patterns, beta, expected = EXAMPLES[case]
    report = theory.stored(jax.random.key(0), Model(beta=beta), patterns)
    assert report.stored.tolist() == expected
    assert_close(report.radius, theory.radius(patterns))
    assert ((report.fraction == 1) == report.stored).all()
    if case == "short":
        report = theory.stored(
            jax.random.key(0), Model(uj.Cosine(), beta=beta), patterns
        )
        assert report.stored.all()


@pytest.mark.parametrize(
    "similarity",
    [
        uj.Dot(uj.LinearKernel(gaussian(2, 9, 4) @ gaussian(3, 4, 6))),
        uj.Cosine(uj.LinearKernel(gaussian(2, 9, 6))),
        uj.Dot(uj.Centering(gaussian(3, 6))),
    ],
    ids=name,
)
def test_points_are_sampled_in_the_image_of_the_kernel_within_the_ball(similarity):
    memories = gaussian(0, 6, 6)
    keys = similarity.keys(memories)
    radius = theory.radius(memories, similarity=similarity)
    image = image_of(similarity.kernel)
    sphere = isinstance(similarity, uj.Cosine)
    sample = jax.jit(_sample_ball, static_argnums=(4, 5))
    for seed, centre in enumerate(keys):
        points = sample(jax.random.key(seed), centre, radius, image, 500, sphere)
        points, centre = np.asarray(points), np.asarray(centre)
        gap = norm(points - centre[None])
        assert (gap <= radius * (1 + 1e-12)).all()
        rank = 6 if image is None else np.linalg.matrix_rank(similarity.kernel.weights)
        rank -= sphere
        assert_close(np.mean((gap / radius) ** rank), 0.5, floor=0.07)
        if sphere:
            assert_close(norm(points), np.ones(500))
        if image is not None:
            assert_close(points @ np.asarray(image @ image.T), points)


def test_stored_agrees_with_the_theorem():
    memories = unit(jnp.eye(6) - 1 / 12)
    radius = theory.radius(memories)
    good = theory.well_separated(memories, beta=60.0, distance=0.9 * radius)
    assert good.all()
    assert theory.stored(jax.random.key(0), Model(beta=60.0), memories).stored.all()


def test_capacity_compiles_once_and_stops_at_the_first_duplicate(compilations):
    patterns = jnp.eye(6)[jnp.array([0, 1, 2, 3, 1, 4])]
    key = jax.random.key(0)
    result = theory.capacity(key, Model(beta=50.0), patterns, sizes=[2, 3, 4, 5])
    assert result.capacity == 4
    assert result.sizes.tolist() == [2, 3, 4, 5]
    assert result.stored.tolist() == [1.0, 1.0, 1.0, 0.0]
    before = len(compilations)
    again = theory.capacity(key, Model(beta=51.0), patterns, sizes=[2, 3, 6, 5])
    assert again.capacity == 3 and len(compilations) == before
    assert theory.capacity(key, Model(beta=50.0), patterns, sizes=[6]).capacity == 0


# -- U-Hop+ ----------------------------------------------------------------------------


def test_spherical_code_bounds_enclose_known_optimal_codes():
    best = {5: 1.0, 7: 0.7899, 8: 0.7388, 9: 0.6667, 10: 0.5956, 12: 0.5528}
    best |= {4: 4 / 3, 6: 1.0, 20: 0.3235, 24: 0.2769}
    for size, delta in best.items():
        lower, upper = theory.spherical_code_bounds(size, 3)
        assert lower <= delta + 1e-12 and delta <= upper + 1e-12
    for size in range(3, 12):
        lower, upper = theory.spherical_code_bounds(size, 2)
        assert_close(np.array([lower, upper]), [1 - math.cos(2 * math.pi / size)] * 2)


@pytest.mark.parametrize("dimension", [3, 4, 8, 64])
def test_spherical_code_bounds_are_inside_the_bounds_of_the_released_code(dimension):
    half = math.exp(math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2))
    for size in (2 * dimension + 1, 10 * dimension, 1000 * dimension):
        lower, upper = theory.spherical_code_bounds(size, dimension)
        s = (2 * math.sqrt(math.pi) / size * half) ** (1 / (dimension - 1))
        # Gamma(D/2 + 1) = D/2 Gamma(D/2)
        released = 0.5 * (s ** (dimension - 1) / dimension) ** (2 / (dimension - 1))
        assert released <= lower <= upper <= 2 * s


# -- Metastable states -----------------------------------------------------------------


def test_metastable_size_and_effective_memories():
    weights = jnp.array([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0.0] * 4])
    assert theory.metastable_size(weights).tolist() == [1, 2, 4, 0]
    assert theory.metastable_size(weights, threshold=0.3).tolist() == [1, 2, 0, 0]
    wrong = jax.jit(lambda t: theory.metastable_size(weights, threshold=t))(-0.1)
    assert wrong.tolist() == [-1] * 4  # not read while it is traced
    assert_close(theory.effective_memories(weights), [1.0, 2.0, 4.0, 0.0])
    weights = jax.nn.softmax(gaussian(0, 4, 4))
    assert_close(theory.effective_memories(weights), 1 / (weights**2).sum(-1))
    half = theory.effective_memories(1e-30 * weights.astype(jnp.float32))
    assert_close(half, theory.effective_memories(weights), floor=1e-5)


# -- [thm:perfect_kernel] --------------------------------------------------------------


def softmax(z):
    """Softmax over each column."""
    p = np.exp(z - z.max(0))
    return p / p.sum(0)


@pytest.mark.parametrize("kind", ["orthonormal", "independent"])
def test_attention_attains_any_positive_column_stochastic_matrix(kind):
    for seed, (count, d) in enumerate([(20, 64)]):
        x = np.asarray(gaussian(seed, count, d))
        if kind == "orthonormal":
            x = np.linalg.qr(x.T)[0].T
        target = softmax(3 * np.asarray(gaussian(seed + 9, count, count)))
        for scale in (1.0, jnp.exp(gaussian(seed + 20, count))):
            keys, queries = theory.representation(
                jnp.asarray(x), jnp.asarray(target), beta=0.7, scale=scale
            )
            assert keys.shape == queries.shape == (count, d)
            logits = 0.7 * (keys @ x.T).T @ (queries @ x.T)
            assert np.abs(softmax(np.asarray(logits)) - target).max() < 1e-12


def test_nearly_dependent_features_attain_the_target_too():
    """The inverse cut singular values that the check of the rank had passed."""
    x, target = np.diag([1.0, 2e-15]), np.array([[0.3, 0.6], [0.7, 0.4]])
    keys, queries = theory.representation(jnp.asarray(x), jnp.asarray(target), beta=1.0)
    assert_close(softmax(np.asarray((keys @ x.T).T @ (queries @ x.T))), target)


def test_the_features_of_the_theorem_minimise_the_deep_learning_loss():
    def loss(x):
        pairs = x @ x.T
        pairs = pairs[np.triu_indices(5, 1)]
        return jnp.log(jnp.exp(2 * 2.0 * (pairs**2 - 1)).mean())

    orthonormal = jnp.linalg.qr(gaussian(0, 6, 5))[0].T
    assert_close(loss(orthonormal), -4.0)
    for seed in range(20):
        assert loss(unit(orthonormal + 0.3 * gaussian(seed, 5, 6))) > -4.0


def test_representation_refuses_what_the_theorem_excludes(untyped):
    uniform = jnp.full((3, 3), 1 / 3)
    cases = [
        (gaussian(0, 3, 2), uniform, r"3 are more than their dimension 2"),
        (jnp.ones((3, 5)), uniform, r"3 have rank 1"),
        (
            gaussian(0, 3, 5),
            uniform.at[0, 0].set(0.0),
            r"target must be positive.*0\.0",
        ),
        (
            gaussian(0, 3, 5),
            1.5 * uniform,
            r"columns of target must sum to 1, got 1\.5",
        ),
        (gaussian(0, 3, 5), jnp.full((2, 2), 0.5), r"\(3, 3\) for 3 .* got \(2, 2\)"),
        (gaussian(0, 3), uniform, r"features must have shape \(M, D\), got \(3,\)"),
    ]
    for x, target, message in cases:
        with pytest.raises(ValueError, match=message):
            theory.representation(x, target, beta=1.0)
    for bad in ({"beta": 0.0}, {"beta": 1.0, "scale": -1.0}):
        with pytest.raises(ValueError, match="must be positive"):
            theory.representation(gaussian(0, 3, 5), uniform, **bad)


# -- [lem:converge-gd] -----------------------------------------------------------------


def test_gradient_descent_bound_on_convex_quadratics():
    for seed in range(10):
        a = np.asarray(gaussian(seed, 4, 6))
        hessian = a.T @ a  # singular: convex, not strongly
        x = start = np.asarray(gaussian(seed + 50, 6))
        learning_rate = 1 / np.linalg.norm(hessian, 2)
        # To the nearest minimiser, in the null space.
        distance = norm(np.linalg.pinv(a) @ (a @ start))
        for steps in range(1, 40):
            x = x - learning_rate * hessian @ x
            bound = theory.gradient_descent_bound(
                distance, learning_rate=learning_rate, steps=steps
            )
            assert 0.5 * x @ hessian @ x <= bound


def test_the_separation_loss_is_not_convex():
    memories = gaussian(0, 5, 6)

    def loss(w):
        x = memories @ w.T
        squared = ((x[:, None] - x[None]) ** 2).sum(-1)
        return jnp.log(jnp.exp(-2.0 * squared).mean())

    w = gaussian(1, 9, 6)
    assert_close(loss(w), loss(-w))
    assert loss(0 * w) == 0 and loss(w) < -0.5  # above the chord from w to -w


# -- Bad input -------------------------------------------------------------------------


def test_duplicates_have_radius_zero_and_no_positive_separation():
    memories = gaussian(0, 5, 6)[jnp.array([0, 1, 2, 1, 3])]
    for similarity in BALL_SIMILARITIES:
        assert theory.radius(memories, similarity=similarity) == 0
        lead = theory.pattern_separation(memories, similarity=similarity)
        assert (lead[jnp.array([1, 3])] <= 1e-12).all()
        slack = theory.exact_retrieval_slack(
            Model(similarity, uj.Sparsemax(), beta=9.0), memories
        )
        assert (slack[jnp.array([1, 3])] < 0).all()
    good = theory.well_separated(memories, beta=100.0, distance=0.1)
    assert not good[jnp.array([1, 3])].any()
    same = jnp.ones((2, 6))  # maps all balls to one pattern, and stores none
    assert not theory.well_separated(same, beta=0.1, distance=0.1).any()


def test_bad_input_is_refused_by_name_and_value(untyped):
    x, key = gaussian(0, 5, 6), jax.random.key(0)
    likelihood = uj.Dot(uj.Centering(jnp.zeros(7)))
    two_sided = uj.Centering(jnp.zeros(6), jnp.ones(6))
    stacked = uj.Dot(uj.LinearKernel(jnp.ones((2, 4, 6))))
    cases = [
        (lambda: theory.radius(x[:1]), r"M at least 2, got \(1, 6\)"),
        (lambda: theory.radius(x[0]), r"M at least 2, got \(6,\)"),
        (lambda: theory.radius(x, similarity=likelihood), "dimension 7, .* 6"),
        (lambda: theory.radius(x, similarity=stacked), "kernel has 1 axes"),
        (
            lambda: theory.radius(x, similarity=uj.Dot(two_sided)),
            "Centering maps queries and memories differently",
        ),
        (
            lambda: theory.exact_retrieval_distance(
                Model(uj.Dot(two_sided), uj.Sparsemax(), beta=2.0)
            ),
            "kernel must have one center",
        ),
        (lambda: theory.radius(x.at[0, 0].set(jnp.nan)), "memories must be finite"),
        (lambda: theory.pattern_separation(x, distance=-1.0), "distance .* got -1.0"),
        (
            lambda: theory.pattern_separation(
                x, distance=0.1, similarity=uj.NegativeL1()
            ),
            "NegativeL1, only for Dot, Cosine, NegativeSquaredL2",
        ),
        (lambda: theory.error_bound(x, beta=-2.0), "beta must be positive.*-2.0"),
        (lambda: theory.error_bound(x, beta=jnp.ones(5)), r"beta .* got shape \(5,\)"),
        (
            lambda: theory.error_bound(x, beta=1.0, similarity=uj.NegativeL2()),
            "NegativeL2, only",
        ),
        (
            lambda: theory.weight_error_bound(x, jnp.ones((3, 4))),
            r"shape \(3, 4\), but there are 5 memories",
        ),
        (
            lambda: theory.exact_retrieval_slack(
                Model(separation=uj.Polynomial(3), beta=1.0), x
            ),
            "no margin .* Polynomial",
        ),
        (
            lambda: theory.exact_retrieval_slack(
                Model(separation=uj.Entmax(0.5), beta=1.0), x
            ),
            "alpha must be at least 1, got 0.5",
        ),
        (
            lambda: theory.exact_retrieval_distance(
                Model(uj.Dot(stacked.kernel), uj.Sparsemax(), beta=1.0)
            ),
            "got 1 axes of memory sets",
        ),
        (lambda: theory.well_separated(x, beta=1.0, distance=0.0), "distance .* 0.0"),
        (lambda: theory.log_rbf(x, x[0], t=0.0), "t must .* 0.0"),
        (lambda: theory.log_rbf(x, x[0, :3]), "dimension 6, queries 3"),
        (lambda: theory.stored(key, Model(beta=1.0), x, samples=0), "samples .* got 0"),
        (
            lambda: theory.stored(key, Model(beta=1.0), x, tolerance=0.0),
            "tolerance .* 0.0",
        ),
        (lambda: theory.capacity(key, Model(beta=1.0), x, sizes=[]), "got none"),
        (lambda: theory.capacity(key, Model(beta=1.0), x, sizes=[1]), "least 2, got 1"),
        (
            lambda: jax.jit(
                lambda b: theory.capacity(key, Model(beta=b), x, sizes=[2])
            )(1.0),
            "capacity runs on the host and cannot be traced",
        ),
        (lambda: theory.capacity(key, Model(beta=1.0), x, sizes=[6]), "most 5, got 6"),
        (lambda: theory.spherical_code_bounds(1, 3), "size .* got 1"),
        (lambda: theory.spherical_code_bounds(4, 1), "dimension .* got 1"),
        (lambda: theory.metastable_size(x, threshold=-1.0), "threshold .* -1"),
        (
            lambda: theory.gradient_descent_bound(1.0, learning_rate=0.1, steps=0),
            "steps .* 0",
        ),
        (
            lambda: theory.gradient_descent_bound(-1.0, learning_rate=0.1, steps=1),
            "distance .* -1",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_likelihood_kernel_has_leads_but_no_ball():
    kernel = likelihood_kernel()
    similarity, memories = uj.Dot(kernel), gaussian(0, 5, 6)
    assert theory.pattern_separation(memories, similarity=similarity).shape == (5,)
    for call in (
        lambda: theory.radius(memories, similarity=similarity),
        lambda: theory.error_bound(memories, beta=1.0, similarity=similarity),
        lambda: theory.stored(jax.random.key(0), Model(similarity, beta=1.0), memories),
    ):
        with pytest.raises(ValueError, match="LikelihoodKernel .* no ball"):
            call()
    with pytest.raises(ValueError, match="got LikelihoodKernel"):
        theory.exact_retrieval_distance(Model(uj.Dot(kernel), uj.Sparsemax(), beta=1.0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_can_be_traced_and_single_precision_stays(dtype):
    model = {"beta": 2.0}
    exact = model | {"separation": uj.Entmax(1.5)}

    def closed_forms(x, weights):
        kernel = uj.LinearKernel(weights)
        for similarity in (uj.Dot(), uj.Cosine(kernel), uj.NegativeSquaredL2()):
            where = {"similarity": similarity, "distance": 0.1}
            yield theory.radius(x, similarity=similarity)
            yield theory.log_rbf(x, x, similarity=similarity)
            yield theory.pattern_separation(x, **where)
            yield theory.error_bound(x, **model, similarity=similarity)
            yield theory.error_bound(x, **model, **where)
            yield theory.exact_retrieval_slack(
                Model(similarity, **exact), x, distance=where["distance"]
            )
            yield theory.stored(
                jax.random.key(0), Model(similarity=similarity, **exact), x
            )[1]
        yield from theory.exact_retrieval_distance(Model(uj.Dot(kernel), **exact))
        yield theory.weight_error_bound(x, x[:, :5])
        yield theory.effective_memories(x[:, :5])
        target = jnp.full((5, 5), 0.2, jnp.float32)
        yield from theory.representation(x, target, beta=1.0)
        lead = theory.well_separated(x, **model, distance=0.1)
        yield lead.astype(jnp.float32)

    results = jax.eval_shape(
        lambda x, weights: list(closed_forms(x, weights)),
        gaussian(0, 5, 6).astype(dtype),
        gaussian(1, 9, 6).astype(dtype),
    )
    assert {r.dtype for r in results} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("similarity", BALL_SIMILARITIES[::2], ids=name)
def test_bounds_have_the_slopes_of_finite_differences(similarity):
    """Slopes are finite, although each memory is at distance 0 from itself."""

    @jax.jit
    def statements(memories, beta, distance):
        s, x = similarity, memories
        slack = {"beta": beta, "separation": uj.Sparsemax(), "similarity": s}
        values = (
            theory.radius(x, similarity=s),
            theory.pattern_separation(x, similarity=s),
            theory.pattern_separation(x, similarity=s, distance=distance),
            theory.error_bound(x, beta=beta, similarity=s),
            theory.error_bound(x, beta=beta, similarity=s, distance=distance),
            theory.exact_retrieval_slack(Model(**slack), x, distance=distance),
            theory.weight_error_bound(x, x[:, 0] ** 2),
        )
        return jnp.stack([part.sum() for part in values])

    memories = gaussian(3, 4, 6) / 2
    point = memories, jnp.asarray(1.5), jnp.asarray(0.1)
    slopes_at = jax.jit(jax.jacrev(statements, argnums=(0, 1, 2)))
    for slope in slopes_at(memories.at[2].set(0.0), *point[1:]):
        assert np.isfinite(slope).all()
    along = gaussian(4, 4, 6), jnp.asarray(0.4), jnp.asarray(0.03)
    up, down = (
        statements(*(x + step * d for x, d in zip(point, along, strict=True)))
        for step in (1e-6, -1e-6)
    )
    slopes = sum(
        np.tensordot(x, d, np.ndim(d))
        for x, d in zip(slopes_at(*point), along, strict=True)
    )
    assert_close(slopes, (up - down) / 2e-6, floor=1e-6)
    assert (abs(slopes) > 1e-3).all()


def test_a_distance_of_zero_has_no_slope_in_beta():
    def needed(beta):
        return theory.exact_retrieval_distance(
            Model(uj.Dot(), uj.TopK(1), beta=beta)
        ).sufficient

    assert needed(2.0) == 0 == jax.grad(needed)(2.0)
