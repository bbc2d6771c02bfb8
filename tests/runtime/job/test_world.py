"""What launchers leave in the environment."""

import pytest

from paceline.errors import LaunchError, PlanError
from paceline.plan import Mesh
from paceline.runtime.job.world import Launcher, World, check_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, None),
        (TORCHRUN, World(5, 8, 1, 4, Launcher.TORCHRUN)),
        (SLURM, World(5, 9, 1, 4, Launcher.SLURM)),
        ({**SLURM, "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, World(8, 9, 0, 1, Launcher.SLURM)),
        (OPEN_MPI, World(3, 4, 1, 2, Launcher.OPEN_MPI)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 1, 2, Launcher.VARIABLES)),
        ({**SLURM, **TORCHRUN}, World(5, 8, 1, 4, Launcher.TORCHRUN)),
        # One task may start ranks of its own.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, None),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_the_world_is_read(environment: dict[str, str], world: World | None):
    assert World.from_environment(environment) == world


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "RANK=0 but no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but no RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is not set"),
    ],
)
def test_a_world_that_cannot_be_is_refused(environment: dict[str, str], words: str):
    with pytest.raises(LaunchError, match=words):
        World.from_environment(environment)


def test_a_mesh_that_fits_passes():
    check_world(Mesh.parse("dp=2,fsdp=2"), World(3, 4))
    check_world(Mesh(), World())


@pytest.mark.parametrize(
    ("mesh", "world", "words"),
    [
        (
            "dp=2,fsdp=2",
            World(0, 3, 0, 3, Launcher.TORCHRUN),
            ["has 4 ranks, but 3 were", "node 4", "'dp=3', 'fsdp=3'"],
        ),
        ("dp=2", World(), ["but 1 was started by nobody", "torchrun --nproc-per-node 2", "serial"]),
        ("fsdp=2", World(0, 4, 0, 4, Launcher.SLURM), ["srun --ntasks 2", "'fsdp=4'"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_told_what_would(mesh: str, world: World, words: list[str]):
    with pytest.raises(PlanError) as refusal:
        check_world(Mesh.parse(mesh), world)
    for word in words:
        assert word in str(refusal.value)
