"""What `shm` becomes when a group is made, and what its works give."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.shm import build
from paceline.shm.backend import CHOICE, create, unavailable
from tests.ranks import ranks
from tests.shm.implementations import Implementation, needs_native


def options() -> SimpleNamespace:
    return SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=5), global_ranks_in_group=[]
    )


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def native() -> None:
        raise build.BuildError("there is no C++ compiler")

    monkeypatch.setattr(build, "native", native)


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "natvie")
    with pytest.raises(LaunchError, match="PACELINE_SHM is 'natvie'; it is native, portable, or not set"):
        create(options(), None)


@pytest.mark.skipif(unavailable() is not None, reason="no shared memory on this system")
@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_python_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHOICE, raising=False)
    with pytest.warns(RuntimeWarning, match=r"pure Python, slower than it could be: there is no C\+\+ compiler"):
        group = create(options(), None)
    assert type(group).__name__ == "PortableGroup"


@pytest.mark.skipif(unavailable() is not None, reason="no shared memory on this system")
@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_native_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "native")
    with pytest.raises(LaunchError, match="the native part cannot be built here"):
        create(options(), None)


@needs_native
@ranks(2, backend="gloo")
def test_futures_hold_what_was_filled() -> None:
    Implementation.NATIVE.choose()
    group = dist.new_group(backend="shm")
    part, whole = torch.ones(3), torch.zeros(6)
    gathered = dist.all_gather_into_tensor(whole, part, group=group, async_op=True).get_future()
    assert gathered.wait()[0].data_ptr() == whole.data_ptr()
    scattered = dist.reduce_scatter_tensor(part, whole, group=group, async_op=True).get_future()
    assert scattered.wait()[0].data_ptr() == part.data_ptr()
    assert torch.equal(part, torch.full((3,), 2.0))
