"""Fully automatic mode on models of transformers: what is chosen for GPT-2, Llama, BERT and ViT, and that it trains."""

import pytest
import torch

import meshwright as mw
from tests import tiny

pytest.importorskip("transformers")

SAMPLES = 8
SHARDS = {"zero1", "zero2", "fsdp"}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=8, hidden_size=20, intermediate_size=50, num_hidden_layers=2, num_labels=4,
            num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


MODELS = {"gpt2": tiny.hf_gpt2, "llama": tiny.hf_llama, "bert": tiny.hf_bert, "vit": vit}


def batch_of(name):
    generator = torch.Generator().manual_seed(7)
    if name == "vit":
        labels = torch.arange(SAMPLES) % 4
        return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator), "labels": labels}
    ids = torch.randint(0, tiny.VOCAB, (SAMPLES, tiny.SEQ_LEN), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Rows(torch.utils.data.Dataset):
    def __init__(self, name):
        self.batch = batch_of(name)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.batch.items()}


def train(name, **arguments):
    """What is chosen without a word about it, what it is said to need, and three losses."""
    torch.manual_seed(0)
    job = mw.accelerate(
        MODELS[name](), torch.optim.AdamW, Rows(name), model_input_format="unpack_dict", optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": SAMPLES, "shuffle": False}, **arguments,
    )  # fmt: skip
    batch = next(iter(job.dataloader))
    return set(job.strategy.names), job.plan.needed_bytes, [job.step(batch).loss.item() for _ in range(3)]


def small_and_limited(name):
    return (free := train(name)), train(name, memory_limit=free[1] - 1)


def every_model():
    return {name: small_and_limited(name) for name in MODELS}


@pytest.fixture(scope="module")
def chosen(ranks):
    return ranks(2).run(every_model)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_is_replicated_and_a_limit_shards_it(chosen, name):
    (free, needed, losses), (limited, less, same_losses) = chosen[0][name]
    assert chosen[1][name] == chosen[0][name]
    assert free == {"parallel_mode"}
    assert limited & SHARDS
    assert less < needed
    assert losses[-1] < losses[0]
    assert same_losses == pytest.approx(losses, rel=1e-4)


def by_the_seeds_door():
    limits = []
    for limit in (None, 1):
        status, result, best = mw.auto_accelerate(
            MODELS["gpt2"](), torch.optim.AdamW, Rows("gpt2"), model_input_format="unpack_dict",
            dataloader_args={"batch_size": SAMPLES}, memory_limit=limit,
        )  # fmt: skip
        limits.append((status, None if best is None else set(best.names)))
        assert (result is None) == (best is None)
    return limits


def test_auto_accelerate_takes_a_limit_too(ranks):
    for (status, names), (refused, nothing) in ranks(2).run(by_the_seeds_door):
        assert status
        assert names == {"parallel_mode"}
        assert not refused  # no strategy fits into one byte
        assert nothing is None


def cluster_file(folder, devices_per_node):
    path = folder / "two.toml"
    path.write_text(f'device = "A10"\nnum_devices = 2\ndevices_per_node = {devices_per_node}\n')
    return str(path)


DIVIDED = ("pipeline_parallel", "tensor_parallel", "sequence_parallel", "context_parallel")
FAMILIES = {
    # What shards most must still gather a block beside its part of the states; a stage holds half of them and no more.
    "pipeline_parallel": ("gpt:layers=4,hidden=768,heads=3,vocab=512", 4),
    # One block makes no stages, and one sample no replicas.
    "tensor_parallel": ("gpt:layers=1,hidden=768,heads=4,vocab=512", 1),
}


def demanded(model, cluster, batch, **arguments):
    """The best plan where what shards the states, at its smallest, is a byte too large."""
    limit = None
    if batch > 1:
        arguments = {"global_batch": batch, **arguments}
        (smallest,) = mw.plan(model, cluster, objective="memory", excluded=("offload", *DIVIDED), top=1, **arguments)
        limit = smallest.needed_bytes - 1
        assert set(smallest.strategy.names) & SHARDS
    excluded = ("offload", "sequence_parallel", "context_parallel")
    arguments = {"global_batch": batch, **arguments}
    (best,) = mw.plan(model, cluster, excluded=excluded, top=1, memory_limit=limit, **arguments)
    assert best.fits
    return set(best.strategy.names)


@pytest.mark.parametrize("method", FAMILIES)
def test_a_cluster_that_demands_it_gets_a_pipeline_or_tensor_parallelism(method, tmp_path):
    model, batch = FAMILIES[method]
    assert method in demanded(model, cluster_file(tmp_path, 1 if batch > 1 else 2), batch, seq=128)


def wide(name):
    """Make a small one, of sizes that two ranks can divide and of one block (no stages); nothing of it is built."""
    config = MODELS[name]().config
    wider = {"gpt2": {"n_embd": 256, "n_layer": 1}}.get(
        name, {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1}
    )
    for key, value in (wider | ({} if name == "vit" else {"vocab_size": 64})).items():
        setattr(config, key, value)
    return config


@pytest.mark.long  # a model that is traced takes seconds where a family takes milliseconds
@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_traced_are_divided_where_one_sample_makes_no_replicas(name, tmp_path):
    wide(name).save_pretrained(tmp_path / name)
    seq = None if name == "vit" else tiny.SEQ_LEN
    assert "tensor_parallel" in demanded(f"hf:{tmp_path / name}", cluster_file(tmp_path, 2), 1, seq=seq)
