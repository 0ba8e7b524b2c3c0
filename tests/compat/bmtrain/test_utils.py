import contextlib
import io
import re
import sys

import numpy as np
import pytest
import torch

import meshwright as bmt
from meshwright import ConfigError
from meshwright.compat.bmtrain import AverageRecorder, debug, print_block, print_dict, see_memory, utils
from meshwright.compat.bmtrain.config import config
from tests.compat.bmtrain.tensor_models import tensor_groups

BLOCK = """\
========================= a title ==========================
two
lines
============================================================
"""
PAIRS = """\
========================= settings =========================
lr:    0.1
steps: 3
============================================================
"""


def _everything():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_block("a title", "two\nlines")
        print_dict("settings", {"lr": 0.1, "steps": 3})
        print_block("alone")
        held = torch.ones(2**22)
        numbers = see_memory("after the model")
        see_memory("in detail", detail=True)
        del held
    return text.getvalue(), numbers


def test_prints_are_framed_and_on_rank_0_only(ranks):
    (shown, numbers), (silent, other_numbers) = ranks(2).run(_everything)
    assert silent == ""
    assert shown.startswith(BLOCK + PAIRS + " alone ".center(60, "=") + "\nafter the model\n")
    assert list(numbers) == list(other_numbers)
    assert numbers["max_resident_bytes"] >= 2**24
    if sys.platform == "linux":
        assert 2**24 <= numbers["resident_bytes"] <= numbers["max_resident_bytes"] + 2**20
        assert f"resident: {numbers['resident_bytes'] / 2**30:.3f} GiB" in shown
        assert "RssAnon: " in shown.split("in detail")[1]


def test_average_of_records():
    recorder = AverageRecorder(alpha=0.5, start_value=7)
    assert recorder.value == 7
    decayed = 0.0
    for count, value in enumerate([2.0, torch.tensor(4.0), 1.0], start=1):
        recorder.record(value)
        decayed = 0.5 * decayed + 0.5 * float(value)
        assert recorder.value == pytest.approx(decayed / (1 - 0.5**count))
    constant = AverageRecorder()
    for _ in range(50):
        constant.record(3.0)
        assert constant.value == pytest.approx(3.0, rel=1e-12)


def test_an_average_goes_on_from_its_state():
    first, second = AverageRecorder(0.8), AverageRecorder()
    for value in (1.0, 5.0):
        first.record(value)
    second.load_state_dict(first.state_dict())
    first.record(2.0)
    second.record(2.0)
    assert second.value == first.value
    with pytest.raises(ConfigError, match="Got no decayed_sum"):
        second.load_state_dict({"alpha": 0.1, "start_value": 0, "weight": 0})
    assert second.value == first.value


@pytest.mark.parametrize("alpha", [1.0, -0.1])
def test_alpha_is_a_share(alpha):
    with pytest.raises(ConfigError, match="0 <= alpha < 1"):
        AverageRecorder(alpha)


def test_sizes_and_versions():
    assert [utils.round_up(size, 4) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]
    for version, sign in (("1.13.1", 1), ("99.0.0", -1), (re.match(r"[0-9.]+", torch.__version__)[0], 0)):
        assert np.sign(utils.check_torch_version(version)) == sign
    assert utils.check_torch_version("1.0.0") - utils.check_torch_version("1.2.3") == 203


def _pieces():
    utils.wait_loader()
    whole = torch.arange(24.0).view(4, 6)
    with tensor_groups(2):
        for dim in (0, 1, -1):
            piece = utils.tp_split_tensor(whole, dim)
            assert piece.is_contiguous()
            assert torch.equal(piece, whole.chunk(2, dim)[config["tp_rank"]])
            assert piece.data_ptr() not in [part.data_ptr() for part in whole.chunk(2, dim)]
        with pytest.raises(ConfigError, match=r"a multiple of 2 along dim 0.*\(3, 6\)"):
            utils.tp_split_tensor(whole[:3], 0)


def test_pieces_for_tensor_ranks(ranks):
    ranks(2).run(_pieces)


def test_values_to_look_at_later():
    weight = torch.ones(2, requires_grad=True)
    debug.set("loss", weight * 2)
    assert not debug.get("loss").requires_grad
    assert debug.get("loss").tolist() == [2, 2]
    debug.append("norms", 1)
    debug.extend("norms", [2, 3])
    assert (debug.get("norms"), debug.get("other"), debug.get("other", 0)) == ([1, 2, 3], None, 0)
    debug.clear("norms")
    assert debug.get("norms") is None
    debug.clear()
    assert debug.get("loss") is None


def test_names_of_bmtrains_modules():
    from meshwright.block_layer import Block, CheckpointBlock, TransformerBlockList
    from meshwright.global_var import config as other, rank, world_size
    from meshwright.layer import DistributedModule
    from meshwright.optim import optim_manager
    from meshwright.param_init import grouped_parameters, init_parameters
    from meshwright.parameter import DistributedParameter, ParameterInitializer
    from meshwright.pipe_layer import PipelineTransformerBlockList
    from meshwright.wrapper import BMTrainModelWrapper

    for each in (
        Block, CheckpointBlock, TransformerBlockList, rank, world_size, DistributedModule, grouped_parameters,
        init_parameters, DistributedParameter, ParameterInitializer, PipelineTransformerBlockList, BMTrainModelWrapper,
    ):  # fmt: skip
        assert getattr(bmt, each.__name__) is each or each is CheckpointBlock is bmt.CheckpointBlock
    assert other is bmt.config
    assert optim_manager.OptimManager is bmt.optim.OptimManager
    assert bmt.debug is debug
    assert bmt.utils.print_rank is bmt.print_rank
    x, weight, bias = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)
    assert torch.equal(bmt.nn.OpLinear.apply(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
