"""Training of models with Hopfield layers."""

from uhop_jax.training.arms import ARMS
from uhop_jax.training.examples import Data
from uhop_jax.training.judging import Goal
from uhop_jax.training.run import Options, best_state, train
from uhop_jax.training.steps import Trainer
from uhop_jax.training.study import train_and_evaluate
from uhop_jax.training.task import Split, StageOneOptions, Task, TrainState

__all__ = [
    "ARMS",
    "Data",
    "Goal",
    "Options",
    "Split",
    "StageOneOptions",
    "Task",
    "TrainState",
    "Trainer",
    "best_state",
    "train",
    "train_and_evaluate",
]
