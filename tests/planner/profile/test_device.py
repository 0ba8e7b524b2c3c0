import torch
from torch import nn

from meshwright.planner.profile.device import device_of_pass, stands_in


def test_a_model_on_the_host_is_traced_on_the_device_that_it_will_train_on(monkeypatch):
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    for place in ("cpu", "meta"):
        model = nn.Linear(2, 2, device=place)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert device_of_pass(model, cuda) == cuda
        assert stands_in(model, cuda) is None
        assert device_of_pass(model, cpu) == cpu
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device_of_pass(model, cuda) == cpu
        assert "no cuda device here" in stands_in(model, cuda)
