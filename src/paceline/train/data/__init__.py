"""The data room: where samples come from, in which order they are seen, and which rank loads which.

A `Source` gives samples by index; a `Loader` turns it into steps of micro-batches, the same samples in the same order
whatever the number of ranks. This room knows neither models nor process groups: a rank is a pair (index, count).
"""

from paceline.train.data.config import DataConfig
from paceline.train.data.loader import Loader, MicroBatch, Step
from paceline.train.data.source import Batch, Source
from paceline.train.data.sources import open_source

__all__ = ["Batch", "DataConfig", "Loader", "MicroBatch", "Source", "Step", "open_source"]
