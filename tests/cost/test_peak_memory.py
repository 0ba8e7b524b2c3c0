from meshwright.cost import Block, Buffer, Parameter, Step, moments

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
