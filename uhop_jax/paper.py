"""Results that the paper states, for tables that print them beside measured results."""

from typing import NamedTuple


class Forecast(NamedTuple):
    """A row of "STanHop: Multivariate Time Series Predictions" [app:ts].

    Errors of standardised values, each `(MSE, MAE)`.
    """

    plain: tuple[float, float]
    uhop: tuple[float, float]


#: By data set and horizon.
FORECASTS = {
    ("etth1", 96): Forecast((0.395, 0.402), (0.392, 0.400)),
    ("etth1", 192): Forecast((0.425, 0.432), (0.420, 0.428)),
    ("etth1", 336): Forecast((0.495, 0.487), (0.470, 0.473)),
    ("etth1", 720): Forecast((0.631, 0.600), (0.572, 0.559)),
    ("ettm1", 96): Forecast((0.334, 0.366), (0.333, 0.365)),
    ("ettm1", 192): Forecast((0.351, 0.380), (0.355, 0.385)),
    ("ettm1", 336): Forecast((0.391, 0.393), (0.392, 0.399)),
    ("ettm1", 720): Forecast((0.436, 0.431), (0.435, 0.423)),
    ("wth", 96): Forecast((0.494, 0.505), (0.483, 0.498)),
    ("wth", 192): Forecast((0.513, 0.526), (0.528, 0.536)),
    ("wth", 336): Forecast((0.523, 0.539), (0.523, 0.539)),
    ("wth", 720): Forecast((0.601, 0.609), (0.603, 0.589)),
}


class Accuracy(NamedTuple):
    """A cell pair of "Model maximal training accuracy and test accuracy" [tab:img-cls].

    Percent, each `(maximal training accuracy, test accuracy)`.
    """

    plain: tuple[float, float]
    uhop: tuple[float, float]


#: By data set and model.
ACCURACIES = {
    ("cifar10", "MHM"): Accuracy((56.0, 52.2), (64.6, 55.2)),
    ("cifar10", "Sparse MHM"): Accuracy((55.9, 52.0), (66.4, 55.4)),
    ("cifar100", "MHM"): Accuracy((32.3, 26.3), (44.1, 28.7)),
    ("cifar100", "Sparse MHM"): Accuracy((49.6, 26.0), (45.4, 29.0)),
    ("tiny_imagenet", "MHM"): Accuracy((48.9, 12.2), (61.4, 12.7)),
    ("tiny_imagenet", "Sparse MHM"): Accuracy((17.2, 12.3), (60.6, 12.5)),
}

#: Average margins that the introduction and the conclusion state [sec:intro].
RETRIEVAL_MARGIN, LEARNING_MARGIN = 0.30, 0.03
