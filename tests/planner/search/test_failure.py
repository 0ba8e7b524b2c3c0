"""What is said when nothing can be found."""

from meshwright.planner.search.find import nothing_works


def test_why_what_was_wished_cannot_be_comes_first():
    refused = {
        "offload: activations stay on the device under a pipeline": "a",
        "a pipeline has more stages than the model has blocks": "b",
        "zero1 does not go together with fsdp": "c",
        "offload: nothing to send": "d",
        "tensor_parallel: the tensor axis does not divide embed": "e",
    }
    told = str(nothing_works(4, refused, ["tensor_parallel"]))
    assert "Got tensor_parallel: the tensor axis does not divide embed; offload: activations" in told
    assert "does not go together" not in told
    assert "Got offload: activations" in str(nothing_works(4, refused, []))
