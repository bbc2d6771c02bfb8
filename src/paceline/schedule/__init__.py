"""Pipeline schedules as data: lists of actions for each rank, what makes them, and what proves them right.

A generator makes the computation of each rank in order; passes add weight versions, reductions, updates and messages;
the validator proves the result complete, ordered and free of deadlock, and accounts for time and memory. This room
knows nothing of PyTorch or of the model: stages are numbers, and durations are given.
"""

from paceline.schedule.actions import Action, Edges, Op, Payload, Schedule
from paceline.schedule.evaluation import evaluation
from paceline.schedule.kinds import Kind, make
from paceline.schedule.messages import communicate
from paceline.schedule.validate import Account, validate

__all__ = [
    "Account",
    "Action",
    "Edges",
    "Kind",
    "Op",
    "Payload",
    "Schedule",
    "communicate",
    "evaluation",
    "make",
    "validate",
]
