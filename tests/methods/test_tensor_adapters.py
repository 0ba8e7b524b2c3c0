"""Adapters under tensor parallelism: trained and saved as in one process."""

import pytest
import torch

import meshwright as mw
from meshwright.compat.colossalai import Booster, HybridParallelPlugin
from tests.compat.colossalai.test_booster_tensor_parallel import STEPS, build, train

EVERY = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted(targets=EVERY, **options):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build()[0], LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, **options))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # of zeros, as peft makes it, A has no gradient at first
            parameter.data.normal_(std=0.3, generator=generator)
    return model


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def split(folder):
    from peft import PeftModel

    model = adapted()
    expected = train(model, optimizer_of(model), torch.Tensor.backward, 0, STEPS)
    wanted = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    for zero_stage in (0, 2):
        booster, model = (
            Booster(plugin=HybridParallelPlugin(tp_size=2, zero_stage=zero_stage, precision="fp32")),
            adapted(),
        )
        model, optim, *_ = booster.boost(model, optimizer_of(model))
        assert train(model, optim, optim.backward, 0, STEPS) == pytest.approx(expected, rel=1e-4)
        place = folder / str(zero_stage)
        booster.save_lora_as_pretrained(model, place)
        mw.synchronize()
        read = PeftModel.from_pretrained(build()[0], place).state_dict()
        for name, value in wanted.items():
            torch.testing.assert_close(read[name], value, rtol=1e-3, atol=1e-4)
    return True


def refused():
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    for targets, options, text in (
        (["q_proj"], {"use_dora": True}, r"adapters of \S*q_proj cannot be split.*lora_variant"),
        (["lm_head"], {}, r"adapters of \S*lm_head cannot be split.*colwise_gather_output"),
        (["embed_tokens"], {}, r"adapters of \S*embed_tokens cannot be split"),
    ):
        with pytest.raises(mw.ModelError, match=text):
            booster.boost(adapted(targets, **options))
    sequence = HybridParallelPlugin(
        tp_size=2, precision="fp32", enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"
    )
    with pytest.raises(mw.ModelError, match="adapters and sequence=True"):
        Booster(plugin=sequence).boost(adapted())
    return True


@pytest.mark.parametrize("case", [split, refused], ids=lambda case: case.__name__)
def test_adapters_follow_the_split(ranks, tmp_path, case):
    assert all(ranks(2).run(case, *([tmp_path] if case is split else [])))
