import signal

from paceline.train.stop import StopRequest
from tests.ranks import ranks


@ranks(2, backend="gloo")
def test_ranks_agree_on_the_step_to_stop_after(rank):
    votes = []
    with StopRequest() as stop:
        for step in range(3):
            if (rank, step) == (1, 1):
                signal.raise_signal(signal.SIGTERM)
            stop.begin_vote()
            votes.append(stop.end_vote())
    assert votes == [None, signal.SIGTERM, signal.SIGTERM]


def test_alone_the_request_is_the_vote():
    stop = StopRequest()
    stop.begin_vote()
    assert stop.end_vote() is None
    stop.request(signal.SIGTERM)
    stop.request(signal.SIGINT)
    assert stop.end_vote() == signal.SIGTERM
