"""``generate`` of transformers' models under every strategy, between steps: the tokens of one process."""

import pytest
import torch

import meshwright as mw
from tests.methods.split_runs import build

pytest.importorskip("transformers")

STRATEGIES = {
    "data": ["parallel_mode"],
    "fsdp": ["fsdp"],
    "tensor": ["tensor_parallel", ("parallel_mode", {"tensor": 2})],
    "pipeline": ["pipeline_parallel", ("parallel_mode", {"pipeline": 2})],
}
MODELS = {"data": ["llama"], "fsdp": ["llama", "t5-decoder"], "tensor": ["llama"], "pipeline": ["llama"]}
IDS = torch.randint(3, 60, (2, 4), generator=torch.Generator().manual_seed(1))


def tokens(model, count, **keys):
    model.eval()
    try:
        return model.generate(input_ids=IDS, max_new_tokens=count, pad_token_id=0, **keys).tolist()
    finally:
        model.train()


def generated(name, strategy):
    """Before a step and after it; for the second time in one process with weights that are as far."""
    count = 5
    if strategy in ("data", "fsdp"):
        count += 2 * mw.rank()  # replicas have answers of different lengths
    batch = {"input_ids": IDS, "labels": IDS}
    plain = build(name)
    expected = [tokens(plain, count)]
    plain(**batch).loss.backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    expected.append(tokens(plain, count))
    job = mw.accelerate(
        build(name), torch.optim.SGD, None, None, strategy=STRATEGIES[strategy], optim_args={"lr": 1.0},
        model_input_format="unpack_dict", sample_batch=batch, batch_size=2,
    )  # fmt: skip
    found = [tokens(job.model, count)]
    samples = batch if strategy in ("tensor", "pipeline") else {key: ids[[mw.rank()]] for key, ids in batch.items()}
    job.step(samples)
    found.append(tokens(job.model, count))
    drawn = tokens(job.model, 4, do_sample=True, top_k=0)
    job.step(samples)
    assert job.model.config is not None
    return found, expected, drawn


def every_model(strategy):
    return [generated(name, strategy) for name in MODELS[strategy]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_tokens_are_those_of_one_process(ranks, strategy):
    first, second = ranks(2).run(every_model, strategy)
    for found, expected, _ in (*first, *second):
        assert found == expected
    if strategy in ("tensor", "pipeline"):
        assert [drawn for *_, drawn in first] == [drawn for *_, drawn in second]


def adapters_and_saving(folder):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    expected = tokens(peft.get_peft_model(build("llama"), lora), 5)
    for strategy in ("pipeline", "fsdp"):
        torch.manual_seed(3)
        model = peft.get_peft_model(build("llama"), lora)
        job = mw.accelerate(
            model, torch.optim.SGD, None, None, strategy=STRATEGIES[strategy], model_input_format="unpack_dict",
            sample_batch={"input_ids": IDS, "labels": IDS}, batch_size=2,
        )  # fmt: skip
        assert tokens(job.model, 5) == expected
        with pytest.raises(mw.ModelError, match="save_folder"):
            job.model.save_pretrained(folder)


def test_adapters_generate_and_divided_models_do_not_save_themselves(ranks, tmp_path):
    ranks(2).run(adapters_and_saving, str(tmp_path))
    assert not list(tmp_path.iterdir())


def other_methods():
    model = build("llama")
    job = mw.accelerate(model, None, strategy=["parallel_mode"])
    with pytest.raises(AttributeError, match=r"train on this rank alone.*What to do.*model\.module\.get_input_embed"):
        _ = job.model.get_input_embeddings
    with pytest.raises(AttributeError, match="nothing"):
        _ = job.model.nothing


def test_replicas_answer_for_nothing_that_would_train_apart(ranks):
    ranks(2).run(other_methods)
