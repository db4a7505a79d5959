"""Training of models with Hopfield layers."""

from uhop_jax.training.arms import ARMS
from uhop_jax.training.run import Data, Goal, Options, best_state, train
from uhop_jax.training.steps import Split, StageOne, Task, Trainer, TrainState
from uhop_jax.training.study import train_and_evaluate

__all__ = [
    "ARMS",
    "Data",
    "Goal",
    "Options",
    "Split",
    "StageOne",
    "Task",
    "TrainState",
    "Trainer",
    "best_state",
    "train",
    "train_and_evaluate",
]
