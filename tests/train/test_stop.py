import os
import signal

import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.train.stop import StopRequest


def _vote(rank: int, ranks: int, folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    votes = []
    with StopRequest() as stop:
        for step in range(3):
            if (rank, step) == (1, 1):
                signal.raise_signal(signal.SIGTERM)
            stop.begin_vote()
            votes.append(stop.end_vote())
    with open(os.path.join(folder, f"votes-{rank}"), "w") as file:
        file.write(repr(votes))
    dist.destroy_process_group()


def test_ranks_agree_on_the_step_to_stop_after(tmp_path):
    mp.spawn(_vote, args=(2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert (tmp_path / f"votes-{rank}").read_text() == "[None, 15, 15]"


def test_alone_the_request_is_the_vote():
    stop = StopRequest()
    stop.begin_vote()
    assert stop.end_vote() is None
    stop.request(signal.SIGTERM)
    stop.request(signal.SIGINT)
    assert stop.end_vote() == signal.SIGTERM
