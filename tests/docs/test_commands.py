"""Commands, training files and cluster files in the manual: they exist, parse, and say nothing that is not known."""

import re
import shlex
import subprocess
import tomllib

import pytest

from meshwright.cli.train_options import parse_config
from tests.docs.pages import ROOT, blocks, hooks, pages

SHELL = [block for page in pages() for block in blocks(page, "bash", "console", "")]
COMMANDS = dict(hooks("cli_page").commands())


def joined(code):
    """A block's commands, one a line: prompts, comments and continuations taken away."""
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def calls():
    """Every call of the program, with where it stands; torchrun's ``-m meshwright`` counts."""
    for block in SHELL:
        for line in joined(block.code):
            match = re.match(r"(?:srun .*)?(?:torchrun .*-m |python -m )?meshwright (?!:)(.+)", line)
            if match and not line.startswith("meshwright:"):
                yield pytest.param(match[1], id=f"{block.where} {line[:50]}")


@pytest.mark.parametrize("call", calls())
def test_commands_and_their_options_exist(call):
    words = shlex.split(call, comments=True)
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version")
        return
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    assert name in COMMANDS, f"no command {name!r}"
    params = COMMANDS[name].params
    known = {option for param in params for option in param.opts if option.startswith("-")} | {"--help", "-h"}
    flags = {option for param in params if getattr(param, "is_flag", False) for option in param.opts} | {"--help", "-h"}
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert set(given) <= known
    needed = [param for param in params if param.required and param.param_type_name == "option"]
    if "--help" not in given:
        assert all(set(param.opts) & set(given) for param in needed)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and "=" not in word and word not in flags:
            assert not following.startswith("--"), f"{word} takes a value"


@pytest.mark.parametrize(
    "block", [each for page in pages() for each in blocks(page, "toml")], ids=lambda block: block.where
)
def test_training_files_are_valid(block):
    content = tomllib.loads(block.code)
    if "device" in content:  # a cluster, not a run
        assert content["num_devices"]
        return
    parse_config(content, block.where)


@pytest.mark.parametrize("block", [each for each in SHELL if each.language == "bash"], ids=lambda block: block.where)
def test_scripts_are_of_valid_syntax(block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_manifests_parse():
    yaml = pytest.importorskip("yaml")
    found = [block for page in pages() for block in blocks(page, "yaml")]
    assert found
    for block in found:
        documents = list(yaml.safe_load_all(block.code))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= set(document) for document in documents)
        arguments = [item for document in documents if document["kind"] == "Job"
                     for item in document["spec"]["template"]["spec"]["containers"][0]["args"]]  # fmt: skip
        assert torchrun_options(arguments) <= known_to_torchrun()


def test_launchers_are_called_with_options_that_they_have():
    lines = [line for block in SHELL for line in joined(block.code) if "torchrun" in line.split("#")[0]]
    assert len(lines) >= 4
    for line in lines:
        assert torchrun_options(line.partition("torchrun")[2].partition(" -m ")[0].partition(".py")[0].split()) <= (
            known_to_torchrun()
        ), line


def torchrun_options(words):
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


def known_to_torchrun():
    from torch.distributed.run import get_args_parser

    return {option.replace("_", "-") for action in get_args_parser()._actions for option in action.option_strings}


def test_make_targets_exist():
    rules = re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = {target for text in pages().values() for target in re.findall(r"\bmake ([a-z]+)\b(?=[`\s]*[`#(\n])", text)}
    assert {name for name in named if f"`make {name}`" in "".join(pages().values())} <= targets
