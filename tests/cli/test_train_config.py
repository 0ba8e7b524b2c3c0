import pytest
import torch

from meshwright.cli.train_config import TrainConfig, config_help
from meshwright.cli.train_model import optimizer_of
from meshwright.cli.train_options import PRELOADED, Options, parse_config, preloaded, read_config
from meshwright.errors import ConfigError
from meshwright.runtime.torch_internals.interpreter import COMPILER

MINIMAL = {"model": {"source": "a:b"}}


def _refusal(content):
    with pytest.raises(ConfigError) as caught:
        parse_config(content, "x.toml")
    assert "\n" not in str(caught.value)
    assert "--help-config" in str(caught.value)
    return str(caught.value)


def _file(tmp_path, text='[model]\nsource = "a:b"\n[run]\nsteps = 5\n'):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return path


def test_a_model_is_all_that_must_be_said():
    config = parse_config(MINIMAL, "x.toml")
    assert config.strategy.is_automatic
    assert config.data.source == "stdlib"
    assert config == parse_config(config.model_dump(), "again")


def test_a_byte_order_mark_before_a_training_file_is_left_out(tmp_path):
    path = _file(tmp_path)
    plain = read_config(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_config(path) == plain


def test_all_mistakes_are_named_at_once():
    text = _refusal(
        {
            "model": {"source": "gpt2"},
            "optimzer": {},
            "run": {"steps": -3, "stepz": 4, "seed": True, "device": "gpu"},
            "data": {"seq_len": "4", "source": 3},
            "optimizer": {"betas": [0.9]},
        }
    )
    assert "9 mistakes" in text
    for word in (
        "`model.source` takes 'hf:FOLDER' of a model; 'gpt2' names dimensions alone",
        "Unknown key `optimzer`",
        "`run.steps` must be greater than or equal to 1, and is -3",
        "Unknown key `run.stepz`",
        "`run.device` must be 'auto' or 'cpu', and is 'gpu'",
        "`run.seed` must be a valid integer, and is True",
        "`data.seq_len` must be a valid integer, and is '4'",
        "`data.source` must be a valid string",
        "`optimizer.betas`",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({}, "`model` is missing in x.toml"),
        ({"model": 3}, "`model` must be a table, and is 3 in x.toml"),
        ({"model": {"source": "a"}}, "`model.source` must be 'module:function'"),
        ({**MINIMAL, "strategy": {"methods": "zero2", "file": "x.json"}}, "not both"),
        ({**MINIMAL, "strategy": {"methods": "zero2", "excluded": ["fsdp"]}}, "beside methods = 'auto' only"),
        ({**MINIMAL, "optimizer": {"lr": float("nan")}}, "`optimizer.lr` must be a finite number"),
    ],
)
def test_single_mistakes(content, word):
    assert word in _refusal(content)


def test_changes_are_typed_as_toml_and_the_last_one_wins(tmp_path):
    changes = ["optimizer.lr=1e-3", "run.device=cpu", 'data.source=["a", "b"]', "run.steps=7", "model.args.dim=8"]
    config = read_config(_file(tmp_path), changes, {"run.steps": 9, "run.nproc": None})
    assert config.optimizer.lr == 1e-3
    assert config.run.device == "cpu"
    assert config.data.source == ["a", "b"]
    assert config.run.steps == 9
    assert config.model.args == {"dim": 8}
    assert read_config(_file(tmp_path), ["optimizer.max_grad_norm=none"]).optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("run.eval_every=1", "Unknown key `run.eval_every` in {file}. Did you mean `eval.every`?"),
        ("run.learning_rate=1", "Did you mean `optimizer.lr`?"),
        ("run.profile.stepz=1", "Unknown key `run.profile.stepz`"),
        ("data.warmup_steps=1", "Did you mean `optimizer.warmup_steps`?"),
        ("optimiser.lr=1", "Did you mean `optimizer`?"),
        ("run.memory_limit=lots", '`run.memory_limit` takes bytes, 1 or more, or a size such as "40 GiB"'),
        ("run.steps", "table.key=value"),
        ("run.steps.x=1", "run.steps to be a table"),
        ("run.steps=many", "`run.steps` must be a valid integer, and is 'many' in {file}"),
    ],
)
def test_wrong_changes_are_refused(tmp_path, change, word):
    with pytest.raises(ConfigError) as caught:
        read_config(_file(tmp_path), [change])
    assert word.format(file=tmp_path / "x.toml") in str(caught.value)


def test_words_of_commands_are_those_of_files(tmp_path):
    file = _file(
        tmp_path, '[model]\nsource = "a:b"\n[strategy]\nmethods = "auto"\nexcluded = ["fsdp"]\ncluster = "c"\n'
    )
    config = read_config(file, ["run.memory_limit=40 GiB"], strategy="zero2")
    assert config.run.memory_limit_bytes == 40 * 2**30
    assert (config.strategy.methods, config.strategy.excluded, config.strategy.cluster) == ("zero2", [], "c")
    config = read_config(file, ["run.memory_limit_gb=1.5"], strategy="x.json")
    assert config.run.memory_limit_bytes == 1_500_000_000
    assert config.strategy.file.endswith("/x.json")
    in_file = parse_config({**MINIMAL, "strategy": {"methods": "x.json"}}, "x.toml").strategy
    assert (in_file.file, in_file.methods, in_file.is_automatic) == ("x.json", "auto", False)
    with pytest.raises(ConfigError, match="memory_limit or memory_limit_gb, not both"):
        read_config(file, ["run.memory_limit=9", "run.memory_limit_gb=1.5"])


def test_files_that_are_no_toml(tmp_path):
    with pytest.raises(ConfigError, match="line 1"):
        read_config(_file(tmp_path, "steps = = 3"))
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "absent.toml")


def test_the_help_explains_every_key():
    text = config_help()
    assert "# list of number: decay rates" in text
    for name, field in TrainConfig.model_fields.items():
        assert f"\n[{name}]\n" in text
        for key, entry in field.annotation.model_fields.items():
            assert entry.description, f"{name}.{key}"
            assert f"{key} = " in text
    assert "integer, ≥ 1: optimizer steps of the whole run" in text
    assert "lr = 0.0003" in text


def test_optimizers_take_the_keys_that_are_set():
    def options(**keys):
        choice = optimizer_of(parse_config({**MINIMAL, "optimizer": keys}, "x.toml").optimizer)
        return choice.build, choice.arguments

    optimizer, arguments = options(lr=0.1, betas=[0.9, 0.95])
    assert optimizer.__name__ == "AdamW"
    assert arguments == {"lr": 0.1, "fused": True, "betas": (0.9, 0.95)}
    optimizer, arguments = options(name="torch.optim:RMSprop", momentum=0.5, args={"alpha": 0.9})
    assert optimizer.__name__ == "RMSprop"
    assert arguments == {"lr": 3e-4, "momentum": 0.5, "alpha": 0.9}
    with pytest.raises(ConfigError, match=r"sgd takes no 'betas'.*optimizer\.betas"):
        options(name="sgd", betas=[0.9, 0.95])
    with pytest.raises(ConfigError, match=r"did you mean 'amsgrad'.*optimizer\.args\.amsgrat"):
        options(args={"amsgrat": True})
    with pytest.raises(ConfigError, match="did you mean 'Adam"):
        options(name="torch.optim:AdamV")
    with pytest.raises(ConfigError, match=r"Unknown optimizer 'adafacto' \(did you mean 'adafactor'\?\)"):
        options(name="adafacto")


@pytest.mark.parametrize(
    ("name", "keys", "num_groups"),
    [
        ("lamb", {}, 1),
        ("adafactor", {"args": {"beta1": 0.9}}, 1),
        ("came", {"betas": [0.9, 0.99, 0.999]}, 1),
        ("galore", {"args": {"rank": 4, "update_proj_gap": 5}, "weight_decay": 0.1}, 3),
        ("galore_8bit", {"args": {"rank": 4, "nbits": 8}}, 3),
        ("muon", {"args": {"adamw_names": ["2.*"], "nesterov": False}}, 2),
    ],
)
def test_our_optimizers_by_name(name, keys, num_groups):
    choice = optimizer_of(parse_config({**MINIMAL, "optimizer": {"name": name, "lr": 1e-2, **keys}}, "x").optimizer)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    params = model.parameters() if choice.param_func is None else choice.param_func(model)
    optimizer = choice.build(params, **choice.arguments)
    assert len(optimizer.param_groups) == num_groups
    assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.arange(9)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(now, start) for now, start in zip(model.parameters(), before, strict=True))


def test_what_a_compiled_model_needs_is_imported_before_ranks_are_forked(tmp_path):
    file = _file(tmp_path, '[model]\nsource = "a:b"\n[strategy]\nmethods = ["fsdp", "compile"]\n')
    assert preloaded(Options(file)) == (COMPILER, *PRELOADED)
    assert preloaded(Options(file, strategy="fsdp")) == PRELOADED
    assert preloaded(Options(_file(tmp_path))) == PRELOADED  # a strategy is still to be chosen
