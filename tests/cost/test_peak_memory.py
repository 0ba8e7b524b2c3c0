from meshwright.cost import Block, Buffer, Parameter, Step, moments
from meshwright.cost.rank_memory import exchanged_in_memory

MIB = 2**20


def step(trainable=True, **given):
    weight = Parameter("weight", (1024, 1024), 4, trainable=trainable)
    head = Parameter("head", (4, 1024), 4)
    blocks = (Block("block", 3, (weight,)), Block("outside", 1, (head,)))
    return Step(**{"blocks": blocks, "axes": (("zero", 2),), "shard_axis": "zero"} | given)


def at_gather(gathered, **given):
    return moments(step(gathered=gathered, **given))["gather"].gathered


def test_a_device_keeps_what_is_flat_until_the_next_block_is_gathered():
    whole = 4 * MIB
    head = 4 * 1024 * 4
    assert at_gather("model") == head + 4 * whole
    assert at_gather("unit") == head + 3 * whole  # one in place, itself flat, and the next
    assert at_gather("unit", on_cpu=True) == head + 2 * whole


def test_what_is_replicated_is_not_gathered():
    assert "gather" not in moments(step(shard_axis=None, axes=()))


def test_buffers_are_sent_in_buckets_two_at_a_time():
    buffers = tuple(Buffer(200 * MIB, 1, floating=False) for _ in range(7))
    replicated = {"shard_axis": None, "axes": (("data", 2),), "buffers": buffers}
    assert moments(step(**replicated))["gather"].gathered == 800 * MIB
    assert "gather" not in moments(step(**replicated | {"buffers": ()}))


def test_experts_of_a_block_are_exchanged_by_themselves():
    of_experts = Parameter("experts", (4, 512, 1024), 4, expert=(None, 4))
    beside = Parameter("weight", (1024, 1024), 4)
    blocks = (Block("block", 3, (beside, of_experts)),)
    on_host = step(blocks=blocks, gathered="unit", on_cpu=True, on_one_host=True)
    # Three gathers, each rank's half of them, and one reduction; units of 4 and 8 MiB.
    assert exchanged_in_memory(on_host) == (3 * 8 // 2 + 8) * MIB


def test_gradients_that_accumulate_whole_are_reduced_block_by_block():
    own = Parameter("own", (1024, 256), 4, sharded=False)
    blocks = (*step().blocks, Block("beside", 1, (own,)))
    once = step(blocks=blocks, gathered="model", whole_gradients=True, num_micro_batches=2)
    found, head = moments(once)["reduction"], 4 * 1024 * 4
    # All are whole yet when the first block's are sent, packed and arriving; what no rank shards is there as well.
    assert found.gathered == 2 * (3 * 4 * MIB + head) + 2 * 4 * MIB
    assert found.gradients == MIB + 2 * MIB
