"""A replica that dies in mid-block: the others stop at the next synchronisation, and say who is missing."""

import os

import pytest

from meshwright import runtime
from meshwright.errors import LaunchError
from meshwright.optim import LocalSGD
from tests.optim.outer import simulation as sim
from tests.pool import Pool, RemoteFailure


def one_dies(file):
    net = sim.model()
    optimizer = LocalSGD(sim.sgd(net), 3)
    for step in range(6):
        sim.local_gradients(net, runtime.rank(), step)
        if step == 4 and runtime.rank() == 1:
            os._exit(9)
        try:
            optimizer.step()
        except LaunchError as error:
            assert optimizer.num_updates == 6, "it trains on until the block ends"
            file.write_text(str(error))
            raise


def test_the_one_who_is_missing_is_named(tmp_path):
    pool = Pool(2)
    with pytest.raises(RemoteFailure):
        pool.run(one_dies, tmp_path / "said")
    pool.stop()
    said = (tmp_path / "said").read_text()
    assert "Synchronising the replicas failed. Expected ranks 0, 1 to meet. Got nothing from rank 1;" in said
    assert "resume from the last checkpoint" in said
