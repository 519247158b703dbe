"""Statistics of an evaluation: shares, paired differences, ratios, and the rules for speed and accuracy.

The unit is always the problem. Several runs of one problem depend on each other, so they never count as that many
problems. How much they add is estimated from the data. `python -m evals.bench coverage` simulates how often each
interval covers the true value.

    accuracy = Share.of([[1, 1], [0, 1], [0, 0]])  # two runs of each of three problems
    accuracy.value, accuracy.interval()
    loss = Paired.of(own_scores, target_scores)
    loss.difference, loss.interval(), loss.loss_upper(), loss.p_value(rng)
    speedup, interval = ratio_of_sums(target_wall_s, own_wall_s, rng)
"""

from stepspec.base.extras import from_extra

with from_extra("eval", "An evaluation"):
    from stepspec.evaluation.stats.answers import Answered
    from stepspec.evaluation.stats.front import pareto_front
    from stepspec.evaluation.stats.intervals import Interval, wilson, z_value
    from stepspec.evaluation.stats.judge_scores import MIN_CLASS, Area, Bin, auc, reliability
    from stepspec.evaluation.stats.matched import MatchedPolicy, corrected_confidence, fastest
    from stepspec.evaluation.stats.paired import Paired, mcnemar_p
    from stepspec.evaluation.stats.products import Powers, Ratio, products_of_sums
    from stepspec.evaluation.stats.ratios import median_of_ratios, ratio_of_rates, ratio_of_sums
    from stepspec.evaluation.stats.resamples import MIN_FOR_BOOTSTRAP, NUM_RESAMPLES, Resamples
    from stepspec.evaluation.stats.runs import Scores
    from stepspec.evaluation.stats.shares import Share
    from stepspec.evaluation.stats.spread import quantile_interval

__all__ = [
    "Interval",
    "z_value",
    "wilson",
    "Scores",
    "Share",
    "Paired",
    "mcnemar_p",
    "MIN_FOR_BOOTSTRAP",
    "NUM_RESAMPLES",
    "Resamples",
    "Powers",
    "Ratio",
    "products_of_sums",
    "ratio_of_rates",
    "ratio_of_sums",
    "median_of_ratios",
    "Answered",
    "MatchedPolicy",
    "corrected_confidence",
    "fastest",
    "pareto_front",
    "MIN_CLASS",
    "Area",
    "Bin",
    "reliability",
    "auc",
    "quantile_interval",
]
