"""Drawings of schedules: a row for each rank, time from left to right, a box for each computation."""

from paceline.schedule.draw.picture import save_picture
from paceline.schedule.draw.svg import svg
from paceline.schedule.draw.terminal import staves

__all__ = ["save_picture", "staves", "svg"]
