# SPDX-License-Identifier: Apache-2.0
"""Properties of the estimators: unbiased, exact at full budget, calibrated p and error bars."""
import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import estimators  # noqa: E402
import sketches  # noqa: E402
import synthetic  # noqa: E402

N, D = 1024, 64


def make_problem(sigma=2.4, seed=3, n_tokens=N, local=64):
    q, k, v = synthetic.make_group(seed, n_tokens, np.array([n_tokens - 1]), dim=D, sigma=sigma)
    in_exact = np.zeros(n_tokens, bool)
    in_exact[:4] = in_exact[n_tokens - local:] = True
    return estimators.Problem(q[0], k, v, 1 / np.sqrt(D), in_exact)


def sketch_scores(problem, kind, seed=1):
    sketch = sketches.build(kind, problem.k, problem.v, seed=seed)
    return sketch, problem.scale * sketch.scores(problem.q)


def relative(estimate, truth):
    return (np.linalg.norm(estimate.o - truth.o, axis=1) / np.linalg.norm(truth.o, axis=1))


class RandomTest(unittest.TestCase):
    def test_known_values(self):
        # SplitMix64 with state 0 returns 0xe220a8397b1dcdaf first: its published test vector.
        state = np.array([0x9E3779B97F4A7C15], np.uint64)
        with np.errstate(over="ignore"):
            self.assertEqual(int(sketches.splitmix64(state)[0]), 0xE220A8397B1DCDAF)
        # tests/unit/hash_index/sketch_test.cc pins the same ones.
        for seed, first, wanted in (
                (0, 0, (8601915, 134215, 5833036, 10975883)),
                (1, 0, (1921361, 5117469, 10289115, 11869297)),
                (7, 123456, (14499800, 961951, 814972, 2583010)),
                (2**64 - 1, 2**32 - 2, (9839450, 14443986, 5428208, 2581592)),
                (12345678901234567, 5 * 2**33 + 17, (10310482, 11738624, 1269694, 8226507))):
            u = sketches.permanent_random(seed, 4, first)
            self.assertEqual(tuple(int(x) for x in u * 2**24), wanted)

    def test_uniform_and_independent_of_the_cut(self):
        u = sketches.permanent_random(7, 100000)
        counts, _ = np.histogram(u, 20, (0, 1))
        self.assertLess(np.sum((counts - 5000.0)**2 / 5000), 43.8)  # chi^2, 19 degrees, p = .001
        self.assertLess(abs(np.corrcoef(u[1:], u[:-1])[0, 1]), 0.011)
        for lag in (2, 16, 64, 4096, 12288):
            self.assertLess(abs(np.corrcoef(u[lag:], u[:-lag])[0, 1]), 0.011)
        other = sketches.permanent_random(8, 100000)
        self.assertLess(abs(np.corrcoef(u, other)[0, 1]), 0.011)
        np.testing.assert_array_equal(sketches.permanent_random(7, 10, first=50), u[50:60])


class SketchTest(unittest.TestCase):
    def test_rotation_keeps_products(self):
        x = np.random.default_rng(1).standard_normal((5, D))
        turned = sketches.rotate(x, 3)
        np.testing.assert_allclose(turned @ turned.T, x @ x.T, rtol=1e-12)

    def test_bases_keep_scores(self):
        rng = np.random.default_rng(2)
        keys = rng.standard_normal((500, D)) * np.linspace(3, 0.1, D)
        queries = rng.standard_normal((40, D)) * np.linspace(0.2, 2, D)
        for a, b in (sketches.pca_basis(keys), sketches.balanced_basis(keys, queries)):
            np.testing.assert_allclose((queries @ a) @ (keys @ b).T, queries @ keys.T, atol=1e-8)

    def test_two_bit_codewords_are_the_best(self):
        x = np.random.default_rng(4).standard_normal((20, 6))
        code = sketches.codewords(x, 2)
        got = np.einsum("nd,nd->n", code, x) / np.linalg.norm(code, axis=1)
        grid = np.stack(np.meshgrid(*[[-1.5, -0.5, 0.5, 1.5]] * 6), -1).reshape(-1, 6)
        best = ((x @ grid.T) / np.linalg.norm(grid, axis=1)).max(axis=1)
        np.testing.assert_allclose(got, best, rtol=1e-12)

    def test_unbiased_over_rotations_with_the_noise_of_theory(self):
        rng = np.random.default_rng(5)
        keys, query = rng.standard_normal((64, D)), rng.standard_normal((1, D))
        truth = (query @ keys.T)[0]
        for kind, tau in (("1b", 0.755), ("2b", 0.36)):
            draws = np.array([sketches.build(kind, keys, keys, seed=s).scores(query)[0]
                              for s in range(300)])
            error = draws.mean(axis=0) - truth
            self.assertLess(np.abs(error / (draws.std(axis=0) / 300**0.5)).max(), 5.5)
            # RaBitQ: sd = |q| |k - c| tau / sqrt(d - 1), tau = sqrt(1 - a^2) / a.
            radius = np.linalg.norm(keys - keys.mean(axis=0), axis=1)
            theory = np.linalg.norm(query) * radius * tau / np.sqrt(D - 1)
            self.assertAlmostEqual(np.mean(draws.std(axis=0) / theory), 1.0, delta=0.12)

    def test_alignment_of_one_bit(self):
        keys = np.random.default_rng(6).standard_normal((2000, D))
        alignment = sketches.build("1b", keys, keys).alignment()
        self.assertAlmostEqual(alignment, np.sqrt(2 / np.pi), delta=0.01)

    def test_lead_is_rounded_to_nearest(self):
        rng = np.random.default_rng(7)
        keys = np.zeros((4000, D))
        keys[:, :8] = rng.standard_normal((4000, 8))
        keys -= keys.mean(axis=0)
        query = rng.standard_normal((3, D))
        error = sketches.build("8i8+1b", keys, keys).scores(query) - query @ keys.T
        # Eight coordinates, each uniform within half a step of 16 sd / 127.
        step = sketches.LEAD_RANGE_SD / 127
        wanted = step / 12**0.5 * np.linalg.norm(query[:, :8], axis=1)
        np.testing.assert_allclose(error.std(axis=1), wanted, rtol=0.1)
        self.assertLess(np.abs(error.mean(axis=1) / wanted).max(), 0.1)

    def test_bytes(self):
        keys = np.random.default_rng(6).standard_normal((256, 128))
        for kind, size in (("1b", 20), ("8i8+1b", 28), ("2b", 36)):
            self.assertEqual(sketches.build(kind, keys, keys).bytes_per_key, size)

    def test_lead_helps_where_the_spectrum_is_steep(self):
        problem = make_problem()
        sd = {kind: (sketch_scores(problem, kind)[1] - problem.logits)[:, problem.rest].std()
              for kind in sketches.KINDS}
        self.assertLess(sd["8i8+1b"], 0.7 * sd["1b"])
        self.assertLess(sd["2b"], 0.7 * sd["1b"])


class ThresholdTest(unittest.TestCase):
    def test_solves_the_sum(self):
        rng = np.random.default_rng(8)
        for spread in (0.1, 1.0, 4.0):
            sizes = np.exp(spread * rng.standard_normal(500))
            for wanted in (1, 7, 100, 499):
                c = estimators.threshold(sizes, wanted)
                self.assertAlmostEqual(np.minimum(1, c * sizes).sum(), wanted, places=6)
        self.assertEqual(estimators.threshold(np.array([1.0, 0.0]), 1), np.inf)


class ExactTest(unittest.TestCase):
    def test_state_merges(self):
        problem = make_problem()
        truth = estimators.exact(problem)
        logits, v = problem.logits[0], problem.v.astype(np.float64)
        (o_a, lse_a), (o_b, lse_b) = (estimators.state(logits[:300], v[:300]),
                                      estimators.state(logits[300:], v[300:]))
        lse = np.logaddexp(lse_a, lse_b)
        o = np.exp(lse_a - lse) * o_a + np.exp(lse_b - lse) * o_b
        np.testing.assert_allclose(o, truth.o[0], rtol=1e-12)
        self.assertAlmostEqual(lse, truth.lse[0], places=12)

    def test_every_method_is_exact_at_full_budget(self):
        problem = make_problem()
        truth = estimators.exact(problem)
        sketch, scores = sketch_scores(problem, "1b")
        blocks = estimators.BlockMeans.build(problem.v)
        size = len(problem.rest)
        found = [estimators.top_k(problem, size), estimators.uniform_residual(problem, size, 1)]
        for control in ("none", "scalar", "block"):
            found.append(estimators.sampled(problem, scores, sketch.value_norm, size, 1, control,
                                            blocks=blocks))
        for estimate in found:
            self.assertLess(relative(estimate, truth).max(), 1e-9)
            np.testing.assert_allclose(estimate.lse, truth.lse, atol=1e-9)

    def test_keys_without_a_value_are_drawn(self):
        norms = np.ones(150)
        norms[[3, 70]] = 0.0
        norms[128:] = 0.0      # nothing to compare with
        norms[100] = 1e6
        raised = sketches.raise_norms(norms)
        self.assertAlmostEqual(raised[3], 0.5 * (63 / 64)**2)
        self.assertAlmostEqual(raised[70], 0.5 * (1062 / 64)**2)
        self.assertEqual(raised[100], 1e6)
        self.assertTrue(np.all(raised[128:] == 0))
        problem = make_problem()
        key = problem.rest[17]
        problem.k[key], problem.v[key] = 2 * problem.q[0], 0.0
        problem = estimators.Problem(problem.q, problem.k, problem.v, problem.scale,
                                     problem.in_exact)
        sketch, scores = sketch_scores(problem, "2b")
        found = estimators.sampled(problem, scores, sketch.value_norm, 40, 1)
        self.assertAlmostEqual(found.lse[0], estimators.exact(problem).lse[0], places=2)

    def test_errors_fall_with_the_budget(self):
        problem = make_problem()
        truth = estimators.exact(problem)
        sketch, scores = sketch_scores(problem, "8i8+1b")
        means = []
        for wanted in (10, 40, 160, 640):
            errors = [relative(estimators.sampled(problem, scores, sketch.value_norm, wanted, seed),
                               truth) for seed in range(60)]
            means.append(np.mean(errors))
        self.assertTrue(np.all(np.diff(means) < 0), means)
        self.assertLess(means[-1], 0.25 * means[0])


class HorvitzThompsonTest(unittest.TestCase):
    DRAWS = 3000

    def draws(self, problem, control="none", shared=True, wanted=40, n_draws=None):
        sketch, scores = sketch_scores(problem, "8i8+1b")
        blocks = estimators.BlockMeans.build(problem.v)
        return [estimators.sampled(problem, scores, sketch.value_norm, wanted, seed, control,
                                   shared, blocks) for seed in range(n_draws or self.DRAWS)]

    def test_numerator_and_denominator_are_unbiased(self):
        problem = make_problem(sigma=1.8)
        truth = estimators.exact(problem)
        for shared in (True, False):
            found = self.draws(problem, shared=shared, n_draws=1500)
            d = np.array([np.exp(e.lse - truth.lse) for e in found])             # [draws, G]
            n = np.array([e.o for e in found]) * d[..., None]                    # N_hat / D
            for sample, mean in ((d, 1.0), (n, truth.o)):
                z = (sample.mean(axis=0) - mean) / (sample.std(axis=0) / len(found)**0.5)
                # 4 heads x 65 numbers: five standard errors would be missed once in 7000.
                self.assertLess(np.abs(z).max(), 5.0, f"shared={shared}")

    def test_variance_of_the_denominator(self):
        """The estimated variance has the mean that Poisson sampling gives, from all keys."""
        problem = make_problem(sigma=1.8)
        truth = estimators.exact(problem)
        sketch, scores = sketch_scores(problem, "8i8+1b")
        rest = problem.rest
        p = estimators.inclusion(scores[:, rest], sketch.value_norm[rest], 40)
        share = np.exp(problem.logits[:, rest] - truth.lse[:, None])
        wanted = (share**2 * (1 - p) / p).sum(axis=1)
        found = self.draws(problem, shared=False)
        d = np.array([np.exp(e.lse - truth.lse) for e in found])
        plug_in = np.mean([(e.sigma_lse * np.exp(e.lse - truth.lse))**2 for e in found], axis=0)
        np.testing.assert_allclose(plug_in, wanted, rtol=0.12)
        np.testing.assert_allclose(d.var(axis=0), wanted, rtol=0.15)

    def test_rows_are_what_was_asked_for(self):
        problem = make_problem()
        found = self.draws(problem, shared=False, wanted=50, n_draws=400)
        rows = np.array([e.rows for e in found])
        np.testing.assert_allclose(rows.mean(axis=0), 50, atol=5 * np.sqrt(50 / 400))
        shared = self.draws(problem, shared=True, wanted=50, n_draws=400)
        self.assertTrue(all((e.rows == e.unique).all() for e in shared))
        # The common p is the largest: the group's rows are those of its heads taken together.
        self.assertEqual([e.unique for e in shared], [e.unique for e in found])

    def test_samples_of_growing_budgets_are_nested(self):
        problem = make_problem()
        sketch, scores = sketch_scores(problem, "1b")
        rest = problem.rest
        u = sketches.permanent_random(5, N)[rest]
        small, large = (u < estimators.inclusion(scores[:, rest], sketch.value_norm[rest], m)
                        for m in (20, 80))
        self.assertTrue((large | ~small).all())
        self.assertGreater(large.sum(), small.sum())

    def test_controls(self):
        problem = make_problem(sigma=1.8)
        truth = estimators.exact(problem)
        plain, scalar, block = (self.draws(problem, control, n_draws=400)
                                for control in ("none", "scalar", "block"))
        for one, other in zip(plain, scalar):
            np.testing.assert_array_equal(one.o, other.o)
        rms = [np.sqrt(np.mean([(e.lse - truth.lse)**2 for e in found]))
               for found in (plain, scalar, block)]
        self.assertLess(rms[1], 0.8 * rms[0])
        # Almost unbiased: the ratio's bias is O(1/m) of the error itself.
        for found in (scalar, block):
            self.assertLess(abs(np.mean([e.lse - truth.lse for e in found])), 0.2 * rms[0])

    def test_block_means_help_where_values_are_smooth(self):
        problem = make_problem(sigma=1.8)
        v = np.repeat(np.random.default_rng(9).standard_normal((N // 32, D)), 32, axis=0)
        problem = estimators.Problem(problem.q, problem.k, v, problem.scale, problem.in_exact)
        truth = estimators.exact(problem)
        errors = [np.mean([relative(e, truth) for e in self.draws(problem, control, n_draws=50)])
                  for control in ("none", "block")]
        self.assertLess(errors[1], 0.6 * errors[0])

    def test_coverage_of_the_bar(self):
        """Near nominal where the sketch is good: LSE like a normal z, the bar rarely missed."""
        z, plain, told = [], [], []
        for seed in range(6):
            problem = make_problem(sigma=1.8, seed=seed, n_tokens=4096)
            truth = estimators.exact(problem)
            for e in self.draws(problem, shared=False, wanted=200, n_draws=60):
                error = np.linalg.norm(e.o - truth.o, axis=1)
                z.append((e.lse - truth.lse) / e.sigma_lse)
                plain.append(error <= estimators.KAPPA * e.sigma_o)
                told.append(error <= e.bar)
        z = np.abs(np.array(z))
        self.assertAlmostEqual((z < 1.96).mean(), 0.95, delta=0.02)
        self.assertAlmostEqual((z < 1.0).mean(), 0.683, delta=0.035)
        self.assertGreater(np.mean(plain), 0.97)
        self.assertGreaterEqual(np.mean(told), np.mean(plain))

    def test_bars_of_few_draws_are_wider(self):
        # Student's t and the chi-square's root, from tables; the quantile is careful at one degree.
        one = estimators.ErrorShape()
        for draws, t in ((21, 2.845), (101, 2.626), (1e7, 2.576)):
            self.assertAlmostEqual(estimators.kappa_of(one, draws) / t, 1.0, delta=0.02)
        self.assertEqual(estimators.kappa_of(one, 0.0), estimators.kappa_of(one, 5.0))
        forty = estimators.ErrorShape(largest=1 / 40, squares=1 / 40)
        self.assertAlmostEqual(estimators.kappa_of(forty, 1e7), 1.262, delta=0.005)
        self.assertAlmostEqual(estimators.effective_draws(np.full(7, 0.3), np.full(7, 0.9)), 7.0)
        uneven = estimators.effective_draws(np.array([1.0, 1e-3, 1e-3]), np.full(3, 1e-3))
        self.assertLess(uneven, 1.01)

    def test_the_shape_of_an_error(self):
        rng = np.random.default_rng(3)
        o = np.eye(D)[0]
        line = estimators.error_shape(rng.standard_normal((90, 1)) * o, o)
        for share in (line.largest, line.squares, line.along_o):
            self.assertAlmostEqual(share, 1.0, delta=1e-9)
        ball = estimators.error_shape(rng.standard_normal((96, D)), o)
        self.assertAlmostEqual(ball.squares * D, 1.0, delta=0.3)
        self.assertLess(ball.largest, 0.15)
        self.assertAlmostEqual(ball.along_o * D, 1.0, delta=0.5)
        # Quantiles of sums of chi-squares by simulation, one eigenvalue apart from the others.
        for first in (0.1, 0.3, 0.6, 0.9):
            values = np.append(first, np.full(30, (1 - first) / 30))
            shape = estimators.ErrorShape(first, (values**2).sum())
            lengths = np.sqrt(rng.chisquare(1, (200000, 31)) @ values)
            self.assertAlmostEqual(estimators.kappa_of(shape, 1e9) / np.quantile(lengths, 0.99),
                                   1.02, delta=0.04)

    def test_same_seed_same_bits(self):
        problem = make_problem()
        first, second = self.draws(problem, n_draws=3), self.draws(problem, n_draws=3)
        for one, other in zip(first, second):
            np.testing.assert_array_equal(one.o, other.o)
            np.testing.assert_array_equal(one.bar, other.bar)

    def test_edge_cases(self):
        rng = np.random.default_rng(1)
        v = rng.standard_normal((100, D))
        nothing = np.zeros(100, bool)
        equal = estimators.Problem(np.zeros((1, D)), rng.standard_normal((100, D)), v, 1.0, nothing)
        e = estimators.sampled(equal, equal.logits, np.ones(100), 30, 1, "scalar")
        self.assertAlmostEqual(e.lse[0], np.log(100), places=9)  # The control is perfect.
        one = estimators.Problem(np.ones((1, D)), np.zeros((100, D)), v, 1.0, nothing)
        one.k[7] = 10.0                                         # 640 nats: all mass on one key
        e = estimators.sampled(one, one.logits, np.ones(100), 5, 1, "scalar")
        np.testing.assert_allclose(e.o[0], v[7], rtol=1e-12)
        self.assertEqual(e.lse[0], 640.0)
        none = estimators.Problem(np.ones((1, D)), one.k, v, 1.0, ~nothing)
        e = estimators.sampled(none, none.logits, np.ones(100), 5, 1, "scalar")
        np.testing.assert_allclose(e.o, estimators.exact(none).o)


class UniformResidualTest(unittest.TestCase):
    def test_denominator_is_unbiased(self):
        problem = make_problem(sigma=1.0)
        truth = estimators.exact(problem)
        d = np.array([np.exp(estimators.uniform_residual(problem, 60, seed).lse - truth.lse)
                      for seed in range(1500)])
        z = (d.mean(axis=0) - 1) / (d.std(axis=0) / len(d)**0.5)
        self.assertLess(np.abs(z).max(), 4.5)


class LshTest(unittest.TestCase):
    def test_inclusion_probability_against_hashing(self):
        """Brute force: fresh planes many times over, pairs at known angles."""
        rng = np.random.default_rng(11)
        dim, bits, tables, repeats = 16, 4, 12, 6000
        query = np.zeros(dim)
        query[0] = 3.0
        wanted = np.array([-0.3, 0.0, 0.2, 0.5, 0.8, 0.95])
        keys = np.zeros((len(wanted), dim))
        keys[:, 0], keys[:, 1] = wanted, np.sqrt(1 - wanted**2)
        keys *= rng.uniform(0.1, 10, (len(wanted), 1))  # Signs do not see lengths.
        cosine = estimators.cosines(query[None], keys)[0]
        np.testing.assert_allclose(cosine, wanted, atol=1e-12)
        hits = np.zeros(len(wanted))
        for seed in range(repeats):
            lsh = estimators.Lsh(bits, tables, dim, seed)
            hits += (lsh.hash(keys) == lsh.hash(query[None])).sum(axis=1) >= 2
        u = estimators.inclusion_probability(wanted, bits, tables)
        error = np.sqrt(u * (1 - u) / repeats)
        self.assertLess(np.abs((hits / repeats - u) / np.maximum(error, 1e-9)).max(), 4.5)

    def test_probability_limits(self):
        u = estimators.inclusion_probability
        self.assertAlmostEqual(u(1.0, 10, 150), 1.0)
        self.assertAlmostEqual(u(-1.0, 10, 150), 0.0)
        self.assertEqual(u(1.0 + 1e-12, 10, 150), 1.0)   # Rounding beyond 1 is no NaN.
        self.assertAlmostEqual(u(0.0, 2, 2), 1 / 16)     # Both of two tables, each 1/4.

    def test_estimator_is_consistent(self):
        """Over fresh planes sum w/u has the mean sum w; the output comes near with many tables."""
        problem = make_problem(sigma=1.0, n_tokens=512)
        truth = estimators.exact(problem)
        center = problem.k.mean(axis=0)
        d = []
        for seed in range(150):
            lsh = estimators.Lsh(4, 30, D, seed)
            found, ids_read = estimators.lsh_sampled(problem, lsh, center,
                                                     lsh.hash(problem.k - center))
            self.assertGreaterEqual(ids_read, 2 * found.rows.sum())
            d.append(np.exp(found.lse - truth.lse))
        d = np.array(d)
        z = (d.mean(axis=0) - 1) / (d.std(axis=0) / len(d)**0.5)
        self.assertLess(np.abs(z).max(), 4.0)
        many = estimators.Lsh(1, 200, D, 1)              # u = 1 for all but opposite keys
        found, _ = estimators.lsh_sampled(problem, many, center, many.hash(problem.k - center))
        self.assertLess(relative(found, truth).max(), 1e-6)


if __name__ == "__main__":
    unittest.main()
