from meshwright.compat.bmtrain.block import note_gather, take_gather_order


def order(*places):
    for place in places:
        note_gather(place)
    return take_gather_order()


def test_the_number_tells_what_was_gathered_and_in_which_order():
    take_gather_order()  # of whoever ran before
    assert order() == 0
    assert order(0, 1) == order(0, 1)
    assert len({order(0), order(1), order(0, 0), order(0, 1), order(1, 0)}) == 5
    assert 0 <= order(*range(1000)) < 2**24  # whole in fp32
